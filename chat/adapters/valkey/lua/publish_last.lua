-- Append the last event of a sealed generation unless it is there, and start the resume window.
-- KEYS: state, events, request.  ARGV: channel, seq, frame, ttl seconds
-- Answers 1 when the last event is in the buffer, 0 unknown, -1 when it is not sealed or `seq` does not follow the last one
local state = redis.call('HMGET', KEYS[1], 'last', 'ended', 'sealed')
if not state[1] then return 0 end
if state[2] then return 1 end
if not state[3] or tonumber(ARGV[2]) ~= tonumber(state[1]) + 1 then return -1 end
redis.call('XADD', KEYS[2], ARGV[2] .. '-0', 'f', ARGV[3])
redis.call('HSET', KEYS[1], 'last', ARGV[2], 'ended', 1)
redis.call('SPUBLISH', ARGV[1], ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[4])
redis.call('EXPIRE', KEYS[3], ARGV[4])
return 1
