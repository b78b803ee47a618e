-- Place of a generation in the queue and the drain rate of the pool.
-- KEYS: jobs, rate, then the lanes in the order in which they are served.  ARGV: generation, then the lanes' plans
-- Answers {} unknown, else {position, 0 = dispatched; decayed count of dispatches}
local raw = redis.call('HGET', KEYS[1], ARGV[1])
if not raw then return {} end
local job = cjson.decode(raw)
if job.s ~= 'q' then return {0, '0'} end
local ahead = 0
for place = 3, #KEYS do
  if ARGV[place - 1] == job.p then
    local rank = redis.call('ZRANK', KEYS[place], ARGV[1])
    return {ahead + (rank or 0) + 1, redis.call('HGET', KEYS[2], 'count') or '0'}
  end
  ahead = ahead + redis.call('ZCARD', KEYS[place])
end
return {ahead + 1, redis.call('HGET', KEYS[2], 'count') or '0'}
