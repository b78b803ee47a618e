-- Take a queued job out of its lane, or tell its replica.
-- KEYS: jobs, followed.  ARGV: generation, tag.  Answers 'queued', 'dispatched' or 'unknown'
local raw = redis.call('HGET', KEYS[1], ARGV[1])
if not raw then return 'unknown' end
local job = cjson.decode(raw)
if job.s == 'd' then
  redis.call('SPUBLISH', ARGV[2] .. ':control:' .. job.r, 'cancel ' .. ARGV[1])
  return 'dispatched'
end
redis.call('ZREM', ARGV[2] .. ':lane:' .. job.p, ARGV[1])
redis.call('SREM', ARGV[2] .. ':exhausted', ARGV[1])
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return 'queued'
