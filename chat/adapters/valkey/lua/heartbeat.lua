-- Note that a replica lives, and what it has in hand.
-- KEYS: replicas, booked, jobs, running, inbox, followed, exhausted
-- ARGV: replica, KV capacity, draining (0 or 1), now (ms), tag, work channel, plan of restored jobs, lost after (ms),
-- most attempts, then generation, KV tokens, attempt of everything in hand
-- Replica fields: k KV capacity, h heard ms, d draining, x room taken by what runs on it but is booked elsewhere or over
local replica, now = ARGV[1], tonumber(ARGV[4])
local raw = redis.call('HGET', KEYS[1], replica)
local before = raw and cjson.decode(raw).x or 0
local news = not raw and 'joined'
local held, others = {}, 0
for place = 10, #ARGV, 3 do
  local generation, tokens = ARGV[place], tonumber(ARGV[place + 1])
  held[generation] = true
  if not raw and redis.call('HEXISTS', KEYS[3], generation) == 0 then
    -- Valkey lost it, or another replica finished it: z marks that only this replica vouches for it.
    local job = {u = '', c = '', p = ARGV[7], k = tokens, t = now, o = 0, s = 'd', r = replica, d = now, z = true}
    job.a = tonumber(ARGV[place + 2])
    redis.call('HSET', KEYS[3], generation, cjson.encode(job))
    redis.call('SADD', KEYS[4], generation)
    redis.call('HINCRBY', KEYS[2], replica, tokens)
    redis.call('ZADD', KEYS[6], now, generation)
  elseif redis.call('SISMEMBER', KEYS[4], generation) == 0 then
    others = others + tokens
  end
end
redis.call('HSET', KEYS[1], replica, cjson.encode({k = tonumber(ARGV[2]), h = now, d = ARGV[3] == '1', x = others}))

-- Booked, but not in hand: on its way; or taken from the inbox by a call that died; or dropped, fenced off.
for _, generation in ipairs(redis.call('SMEMBERS', KEYS[4])) do
  local job = not held[generation] and cjson.decode(redis.call('HGET', KEYS[3], generation))
  if job and now - job.d > tonumber(ARGV[8]) and not redis.call('LPOS', KEYS[5], generation .. ' ' .. job.a) then
    redis.call('SREM', KEYS[4], generation)
    redis.call('HINCRBY', KEYS[2], replica, -job.k)
    news = news or 'requeued'
    if job.z then
      redis.call('HDEL', KEYS[3], generation)
      redis.call('ZREM', KEYS[6], generation)
    else
      job.r, job.d = nil, nil
      if job.a >= tonumber(ARGV[9]) then
        job.s = 'x'
        redis.call('SADD', KEYS[7], generation)
      else
        job.s = 'q'
        redis.call('ZADD', ARGV[5] .. ':lane:' .. job.p, job.o, generation)
      end
      redis.call('HSET', KEYS[3], generation, cjson.encode(job))
    end
  end
end
redis.call('HSETNX', KEYS[2], replica, 0)
if others < before then news = news or 'freed' end
if news then redis.call('SPUBLISH', ARGV[6], news) end
return others
