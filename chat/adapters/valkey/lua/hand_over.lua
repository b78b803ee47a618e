-- Put running jobs of a replica back at the head of their lanes: one (a drain) or all (the replica is gone).
-- KEYS: jobs, booked, replicas.  ARGV: replica, generation or '' for all, tag, work channel
local running, inbox = ARGV[3] .. ':running:' .. ARGV[1], ARGV[3] .. ':inbox:' .. ARGV[1]
local generations = {ARGV[2]}
if ARGV[2] == '' then generations = redis.call('SMEMBERS', running) end
local moved = 0
for _, generation in ipairs(generations) do
  local raw = redis.call('HGET', KEYS[1], generation)
  local job = raw and cjson.decode(raw)
  if job and job.s == 'd' and job.r == ARGV[1] then
    redis.call('SREM', running, generation)
    redis.call('LREM', inbox, 0, generation .. ' ' .. job.a)
    if redis.call('HINCRBY', KEYS[2], ARGV[1], -job.k) < 0 then redis.call('HSET', KEYS[2], ARGV[1], 0) end
    job.s, job.r, job.d, job.z = 'q', nil, nil, nil
    redis.call('HSET', KEYS[1], generation, cjson.encode(job))
    redis.call('ZADD', ARGV[3] .. ':lane:' .. job.p, job.o, generation)
    moved = moved + 1
  end
end
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[3], ARGV[1])
  redis.call('HDEL', KEYS[2], ARGV[1])
  redis.call('DEL', running, inbox)
end
if moved > 0 then redis.call('SPUBLISH', ARGV[4], 'requeued') end
return moved
