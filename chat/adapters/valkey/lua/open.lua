-- Make a generation known, with its request; nothing changes when it is.
-- KEYS: state, request.  ARGV: ttl seconds, user, conversation, pool, request
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('HSET', KEYS[1], 'user', ARGV[2], 'conversation', ARGV[3], 'pool', ARGV[4], 'attempt', 0, 'last', 0)
  redis.call('EXPIRE', KEYS[1], ARGV[1])
end
if redis.call('EXISTS', KEYS[2]) == 0 then
  redis.call('SET', KEYS[2], ARGV[5], 'EX', ARGV[1])
end
return 1
