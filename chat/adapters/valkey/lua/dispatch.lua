-- Take jobs in order, pick a replica for each, book its KV room and put it into the replica's inbox.
-- KEYS: jobs, replicas, booked, rate, exhausted, then the lanes in the order in which they are served
-- ARGV: now (ms), limit, silent after (ms), tag, window of the drain rate (ms)
-- Answers generation, attempt, generation, attempt …
local now, limit, silent = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local replicas, booked, largest = {}, {}, 0
local books = redis.call('HGETALL', KEYS[3])
for place = 1, #books, 2 do booked[books[place]] = tonumber(books[place + 1]) end
local rows = redis.call('HGETALL', KEYS[2])
for place = 1, #rows, 2 do
  local known, replica = pcall(cjson.decode, rows[place + 1])
  if known and now - replica.h <= silent and replica.k > 0 then
    if replica.k > largest then largest = replica.k end
    if not replica.d then
      replicas[#replicas + 1] = {id = rows[place], capacity = replica.k, booked = (booked[rows[place]] or 0) + replica.x}
    end
  end
end
local given = {}
if #replicas == 0 then return given end

-- The policy: least booked share first, among those that have the room.
local function pick(tokens)
  local best, share = nil, 2
  for _, replica in ipairs(replicas) do
    if replica.booked + tokens <= replica.capacity and replica.booked / replica.capacity < share then
      best, share = replica, replica.booked / replica.capacity
    end
  end
  return best
end

for lane = 6, #KEYS do
  while #given / 2 < limit do
    local generation = redis.call('ZRANGE', KEYS[lane], 0, 0)[1]
    if not generation then break end
    local raw = redis.call('HGET', KEYS[1], generation)
    local valid, job = pcall(cjson.decode, raw or '')
    valid = valid and type(job) == 'table' and tonumber(job.k) ~= nil
    if not valid or job.k > largest then
      -- Malformed, orphaned, or larger than any replica: set aside, so that it never blocks its lane.
      redis.call('ZREM', KEYS[lane], generation)
      redis.call('SADD', KEYS[5], generation)
      if valid then
        job.s = 'x'
        redis.call('HSET', KEYS[1], generation, cjson.encode(job))
      end
    else
      local replica = pick(job.k)
      if not replica then limit = 0 break end
      replica.booked = replica.booked + job.k
      job.s, job.r, job.a, job.d = 'd', replica.id, job.a + 1, now
      redis.call('ZREM', KEYS[lane], generation)
      redis.call('HSET', KEYS[1], generation, cjson.encode(job))
      redis.call('HINCRBY', KEYS[3], replica.id, job.k)
      redis.call('SADD', ARGV[4] .. ':running:' .. replica.id, generation)
      redis.call('RPUSH', ARGV[4] .. ':inbox:' .. replica.id, generation .. ' ' .. job.a)
      given[#given + 1] = generation
      given[#given + 1] = tostring(job.a)
    end
  end
end
if #given > 0 then
  -- An exponentially decayed count of dispatches since `since`; lanes.py makes the drain rate of it.
  local rate = redis.call('HMGET', KEYS[4], 'count', 'at', 'since')
  local age = math.max(now - tonumber(rate[2] or now), 0)
  local count, since = tonumber(rate[1] or 0) * math.exp(-age / tonumber(ARGV[5])), rate[3] or now
  if count < 0.5 then count, since = 0, now end
  count = string.format('%.4f', count + #given / 2)
  redis.call('HSET', KEYS[4], 'count', count, 'at', now, 'since', since)
end
return given
