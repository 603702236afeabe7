-- Answered: [group, count, leases that are over, the earliest last seen, duplicates, how many wait for
-- their sender], ...

-- Of so many that failed, the last seen, it is counted which of them wait for their sender.
local MOST = 10000

local function for_sender(group)
  local state, consumer = string.match(group, '^([^:]*):(.*)$')
  local count = 0
  for _, id in ipairs(state == 'failed' and redis.call('ZREVRANGE', seen_key(group), 0, MOST) or {}) do
    count = count + (waits_for_sender(consumer, id) and 1 or 0)
  end
  return count
end

local tallies = {}
for _, group in ipairs(redis.call('SMEMBERS', prefix .. 'groups')) do
  local longest_unseen = redis.call('ZRANGE', seen_key(group), 0, 0, 'WITHSCORES')
  tallies[#tallies + 1] = {
    group,
    redis.call('ZCARD', seen_key(group)),
    redis.call('ZCOUNT', leases_key(group), '-inf', now_text),
    longest_unseen[2],
    redis.call('HGET', prefix .. 'duplicates', group) or '0',
    for_sender(group),
  }
end
return cjson.encode(tallies)
