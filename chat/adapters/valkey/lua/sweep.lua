-- Find silent replicas, jobs out of attempts and jobs without followers.
-- KEYS: jobs, booked, replicas, followed, exhausted
-- ARGV: now (ms), silent after (ms), abandoned after (ms), most attempts, tag, work channel
-- Answers {requeued, exhausted, abandoned}
local now, tag = tonumber(ARGV[1]), ARGV[5]
local requeued = {}
local rows = redis.call('HGETALL', KEYS[3])
for place = 1, #rows, 2 do
  local id = rows[place]
  local valid, replica = pcall(cjson.decode, rows[place + 1])
  if not valid or now - replica.h > tonumber(ARGV[2]) then
    for _, generation in ipairs(redis.call('SMEMBERS', tag .. ':running:' .. id)) do
      local raw = redis.call('HGET', KEYS[1], generation)
      local job = raw and cjson.decode(raw)
      if job and job.s == 'd' and job.r == id then
        job.r, job.d, job.z = nil, nil, nil
        if job.a >= tonumber(ARGV[4]) then
          job.s = 'x'
          redis.call('SADD', KEYS[5], generation)
        else
          job.s = 'q'
          redis.call('ZADD', tag .. ':lane:' .. job.p, job.o, generation)
          requeued[#requeued + 1] = generation
        end
        redis.call('HSET', KEYS[1], generation, cjson.encode(job))
      end
    end
    redis.call('DEL', tag .. ':running:' .. id, tag .. ':inbox:' .. id)
    redis.call('HDEL', KEYS[3], id)
    redis.call('HDEL', KEYS[2], id)
  end
end
local abandoned = redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', now - tonumber(ARGV[3]), 'LIMIT', 0, 200)
for _, generation in ipairs(abandoned) do
  if redis.call('HEXISTS', KEYS[1], generation) == 1 then
    -- Said again in 5 s, should the one who hears it now die.
    redis.call('ZADD', KEYS[4], now - tonumber(ARGV[3]) + 5000, generation)
  else
    redis.call('ZREM', KEYS[4], generation)
  end
end
if #requeued > 0 then redis.call('SPUBLISH', ARGV[6], 'requeued') end
return {requeued, redis.call('SRANDMEMBER', KEYS[5], 200), abandoned}
