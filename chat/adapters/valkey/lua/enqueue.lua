-- Enter a job in its lane; a job that the pool knows stays where it is.
-- KEYS: jobs, order, followed, lane
-- ARGV: work channel, generation, user, conversation, plan, kv tokens, enqueued at (ms)
-- Job fields: u user, c conversation, p plan, k KV tokens, t enqueued ms, o order, s state (q, d or x), a attempt,
-- r replica, d dispatched ms, z restored by its replica (see heartbeat.lua)
if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 1 then return 0 end
local order = redis.call('INCR', KEYS[2])
local job = {u = ARGV[3], c = ARGV[4], p = ARGV[5], k = tonumber(ARGV[6]), t = tonumber(ARGV[7]), o = order, s = 'q', a = 0}
redis.call('HSET', KEYS[1], ARGV[2], cjson.encode(job))
redis.call('ZADD', KEYS[4], order, ARGV[2])
redis.call('ZADD', KEYS[3], ARGV[7], ARGV[2])
redis.call('SPUBLISH', ARGV[1], 'queued')
return 1
