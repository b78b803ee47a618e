-- Forget a finished job and free what it booked.
-- KEYS: jobs, booked, followed, exhausted.  ARGV: generation, tag, work channel
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('SREM', KEYS[4], ARGV[1])
local raw = redis.call('HGET', KEYS[1], ARGV[1])
if not raw then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
local valid, job = pcall(cjson.decode, raw)
if not valid then return 0 end
if job.s == 'd' then
  redis.call('SREM', ARGV[2] .. ':running:' .. job.r, ARGV[1])
  redis.call('LREM', ARGV[2] .. ':inbox:' .. job.r, 0, ARGV[1] .. ' ' .. job.a)
  if redis.call('HEXISTS', KEYS[2], job.r) == 1 and redis.call('HINCRBY', KEYS[2], job.r, -job.k) < 0 then
    redis.call('HSET', KEYS[2], job.r, 0)
  end
  redis.call('SPUBLISH', ARGV[3], 'freed')
else
  redis.call('ZREM', ARGV[2] .. ':lane:' .. job.p, ARGV[1])
end
return 1
