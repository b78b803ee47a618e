-- Note that a replica lives. An unknown replica (new, or forgotten by a lost Valkey) enters with what it has in hand.
-- KEYS: replicas, booked, jobs, running, inbox
-- ARGV: replica, KV capacity, draining (0 or 1), now (ms), work channel, plan of restored jobs, then generation, KV tokens …
local replica, now = ARGV[1], tonumber(ARGV[4])
local known = redis.call('HEXISTS', KEYS[1], replica) == 1
redis.call('HSET', KEYS[1], replica, cjson.encode({k = tonumber(ARGV[2]), h = now, d = ARGV[3] == '1'}))
local held = {}
for place = 7, #ARGV, 2 do held[ARGV[place]] = tonumber(ARGV[place + 1]) end
if not known then
  local booked = 0
  for generation, tokens in pairs(held) do
    booked = booked + tokens
    if redis.call('HEXISTS', KEYS[3], generation) == 0 then
      local job = {u = '', c = '', p = ARGV[6], k = tokens, t = now, o = 0, s = 'd', a = 1, r = replica, d = now}
      redis.call('HSET', KEYS[3], generation, cjson.encode(job))
    end
    redis.call('SADD', KEYS[4], generation)
  end
  redis.call('HSET', KEYS[2], replica, booked)
  redis.call('SPUBLISH', ARGV[5], 'joined')
  return 1
end
-- An assignment that was taken from the inbox by a call that died is given again.
for _, generation in ipairs(redis.call('SMEMBERS', KEYS[4])) do
  if not held[generation] then
    local raw = redis.call('HGET', KEYS[3], generation)
    if not raw then
      redis.call('SREM', KEYS[4], generation)
    else
      local job = cjson.decode(raw)
      local assignment = generation .. ' ' .. job.a
      if now - job.d > 3000 and not redis.call('LPOS', KEYS[5], assignment) then
        job.d = now
        redis.call('HSET', KEYS[3], generation, cjson.encode(job))
        redis.call('RPUSH', KEYS[5], assignment)
      end
    end
  end
end
return 0
