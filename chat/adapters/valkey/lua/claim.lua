-- Raise the fence to this attempt, and read everything that a worker needs.
-- KEYS: state, events, request.  ARGV: attempt, ttl seconds, most entries
-- Answers 0 unknown, -1 a later attempt exists, else {request, state fields as buffer.py lists them, entries}
local state = redis.call('HMGET', KEYS[1], 'user', 'conversation', 'pool', 'attempt', 'last', 'cancel', 'sealed', 'ended')
local request = redis.call('GET', KEYS[3])
if not state[4] or not request then return 0 end
-- A sealed generation only has to be saved and published, which whoever finds it may do.
if not state[7] then
  if tonumber(state[4]) > tonumber(ARGV[1]) then return -1 end
  redis.call('HSET', KEYS[1], 'attempt', ARGV[1])
  state[4] = ARGV[1]
end
for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, ARGV[2]) end
return {request, state, redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', ARGV[3])}
