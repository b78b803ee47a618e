-- Append contiguous events to a generation's token buffer and publish them.
-- KEYS: state, events, request
-- ARGV: attempt, ttl seconds, channel, user, conversation, pool, request, first seq, then frame and token ids of each event
-- Answers {last seq} or {-1} when a later attempt owns the generation or it is sealed.
local attempt = tonumber(ARGV[1])
local first = tonumber(ARGV[8])
local state = redis.call('HMGET', KEYS[1], 'attempt', 'last', 'sealed')
local last = tonumber(state[2] or 0)
if not state[1] then
  -- Lost by a failover or a flush: the writer brings everything again, from the first event on.
  if first ~= 1 or ARGV[4] == '' then return {0} end
  redis.call('HSET', KEYS[1], 'user', ARGV[4], 'conversation', ARGV[5], 'pool', ARGV[6], 'attempt', attempt, 'last', 0)
  redis.call('SET', KEYS[3], ARGV[7], 'EX', ARGV[2])
  redis.call('DEL', KEYS[2])
elseif tonumber(state[1]) > attempt or state[3] then
  return {-1}
elseif tonumber(state[1]) < attempt then
  -- An earlier attempt made a lost generation anew; it has to stop.
  redis.call('HSET', KEYS[1], 'attempt', attempt)
end
if first > last + 1 then return {last} end
for place = 9, #ARGV, 2 do
  local seq = first + (place - 9) / 2
  if seq == last + 1 then
    if ARGV[place + 1] == '' then
      redis.call('XADD', KEYS[2], seq .. '-0', 'f', ARGV[place])
    else
      redis.call('XADD', KEYS[2], seq .. '-0', 'f', ARGV[place], 't', ARGV[place + 1])
    end
    redis.call('SPUBLISH', ARGV[3], ARGV[place])
    last = seq
  end
end
redis.call('HSET', KEYS[1], 'last', last)
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('EXPIRE', KEYS[2], ARGV[2])
redis.call('EXPIRE', KEYS[3], ARGV[2])
return {last}
