-- A pool at one moment.
-- KEYS: replicas, booked, jobs, then the lanes.  Answers {replicas, booked, jobs, length of each lane …}
local answer = {redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2]), redis.call('HLEN', KEYS[3])}
for place = 4, #KEYS do answer[place] = redis.call('ZCARD', KEYS[place]) end
return answer
