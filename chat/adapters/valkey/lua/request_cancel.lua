-- Leave a durable mark that no claim can miss.
-- KEYS: state.  Answers 0 unknown, else 1
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'cancel', 1)
return 1
