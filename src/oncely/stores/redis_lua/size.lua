-- Answered: the bytes of all records and indexes. Those of the records are estimated from a sample
-- of each group, evenly chosen.
local SAMPLE = 20

local function memory(key)
  return redis.call('MEMORY', 'USAGE', key) or 0
end

local bytes = 0
for _, group in ipairs(redis.call('SMEMBERS', prefix .. 'groups')) do
  local consumer = string.sub(group, string.find(group, ':', 1, true) + 1)
  local count = redis.call('ZCARD', seen_key(group))
  local sampled = math.min(count, SAMPLE)
  for n = 0, sampled - 1 do
    local rank = math.floor(n * count / sampled)
    local id = redis.call('ZRANGE', seen_key(group), rank, rank)[1]
    bytes = bytes + memory(record_key(consumer, id)) * count / sampled
  end
  bytes = bytes + memory(seen_key(group)) + memory(leases_key(group))
end
return math.floor(bytes)
