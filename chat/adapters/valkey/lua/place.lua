-- Place of a generation in the queue, and what the wait estimate needs.
-- KEYS: jobs, rate, replicas, booked, then the lanes in the order in which they are served
-- ARGV: generation, then the lanes' plans
-- Answers {} unknown, {0} dispatched, else {position, 1 when a replica has room for it now, count, at, since}
local raw = redis.call('HGET', KEYS[1], ARGV[1])
if not raw then return {} end
local job = cjson.decode(raw)
if job.s ~= 'q' then return {0} end
local position = 1
for place = 5, #KEYS do
  if ARGV[place - 3] == job.p then
    position = position + (redis.call('ZRANK', KEYS[place], ARGV[1]) or 0)
    break
  end
  position = position + redis.call('ZCARD', KEYS[place])
end
local room = 0
if position == 1 then
  local rows = redis.call('HGETALL', KEYS[3])
  for place = 1, #rows, 2 do
    local replica = cjson.decode(rows[place + 1])
    local booked = tonumber(redis.call('HGET', KEYS[4], rows[place]) or 0) + replica.x
    if not replica.d and booked + job.k <= replica.k then
      room = 1
      break
    end
  end
end
local rate = redis.call('HMGET', KEYS[2], 'count', 'at', 'since')
return {position, room, rate[1] or '0', rate[2] or '0', rate[3] or '0'}
