-- Decide the outcome once and for all; the first one stays.
-- KEYS: state.  ARGV: attempt or '' to take over, outcome
-- Answers 0 unknown, -1 fenced, else the sealed outcome
local state = redis.call('HMGET', KEYS[1], 'attempt', 'sealed')
if not state[1] then return 0 end
if state[2] then return state[2] end
if ARGV[1] == '' then
  redis.call('HINCRBY', KEYS[1], 'attempt', 1)
elseif tonumber(state[1]) > tonumber(ARGV[1]) then
  return -1
end
redis.call('HSET', KEYS[1], 'sealed', ARGV[2])
return ARGV[2]
