-- Note that a replica lives, and count its books anew: what is dispatched to it and what it still has in hand.
-- KEYS: replicas, booked, jobs, running, inbox, followed, exhausted
-- ARGV: replica, KV capacity, draining (0 or 1), now (ms), tag, work channel, plan of restored jobs, lost after (ms),
-- most attempts, then generation, KV tokens, attempt of everything in hand
local replica, now = ARGV[1], tonumber(ARGV[4])
local known = redis.call('HEXISTS', KEYS[1], replica) == 1
local before = tonumber(redis.call('HGET', KEYS[2], replica) or 0)
local booked, news = 0, not known and 'joined'
redis.call('HSET', KEYS[1], replica, cjson.encode({k = tonumber(ARGV[2]), h = now, d = ARGV[3] == '1'}))
local held = {}
for place = 10, #ARGV, 3 do
  local generation, tokens, attempt = ARGV[place], tonumber(ARGV[place + 1]), tonumber(ARGV[place + 2])
  held[generation] = tokens
  if not known and redis.call('HEXISTS', KEYS[3], generation) == 0 then
    -- Valkey lost it, or another replica finished it: z marks that only this replica vouches for it.
    local job = {u = '', c = '', p = ARGV[7], k = tokens, t = now, o = 0, s = 'd', a = attempt, r = replica, d = now, z = true}
    redis.call('HSET', KEYS[3], generation, cjson.encode(job))
    redis.call('SADD', KEYS[4], generation)
    redis.call('ZADD', KEYS[6], now, generation)
  end
end

local running = redis.call('SMEMBERS', KEYS[4])
for _, generation in ipairs(running) do
  local raw = redis.call('HGET', KEYS[3], generation)
  local valid, job = pcall(cjson.decode, raw or '')
  if not valid or job.s ~= 'd' or job.r ~= replica then
    redis.call('SREM', KEYS[4], generation)
  elseif held[generation] or now - job.d <= tonumber(ARGV[8]) or redis.call('LPOS', KEYS[5], generation .. ' ' .. job.a) then
    booked, held[generation] = booked + job.k, nil
  else
    -- It was taken from the inbox by a call that died, or dropped by a replica that was fenced off.
    redis.call('SREM', KEYS[4], generation)
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
        news = news or 'requeued'
      end
      redis.call('HSET', KEYS[3], generation, cjson.encode(job))
    end
  end
end
-- What is left runs on it although it is another's by now, or over: it takes room until it is fenced off.
for _, tokens in pairs(held) do booked = booked + tokens end
redis.call('HSET', KEYS[2], replica, booked)
if booked < before then news = news or 'freed' end
if news then redis.call('SPUBLISH', ARGV[6], news) end
return booked
