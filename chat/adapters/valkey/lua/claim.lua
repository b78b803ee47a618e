-- Raise the fence to this attempt.
-- KEYS: state, events, request.  ARGV: attempt, ttl seconds
-- Answers 0 unknown, -1 a later attempt exists, else 1
local fence = redis.call('HGET', KEYS[1], 'attempt')
if not fence or redis.call('EXISTS', KEYS[3]) == 0 then return 0 end
if tonumber(fence) > tonumber(ARGV[1]) then return -1 end
redis.call('HSET', KEYS[1], 'attempt', ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('EXPIRE', KEYS[2], ARGV[2])
redis.call('EXPIRE', KEYS[3], ARGV[2])
return 1
