-- Leave a durable mark that no claim can miss.
-- KEYS: state.  ARGV: the state's fields.  Answers their values, all nil for an unknown generation
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'cancel', 1) end
return redis.call('HMGET', KEYS[1], unpack(ARGV))
