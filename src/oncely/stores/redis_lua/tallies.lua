-- Answered: [group, count, leases that are over, the earliest last seen, duplicates, how many wait for
-- their sender, when the first of those leases ended, the earliest last seen of those that wait for
-- their sender], ... Where there is no such time, it is ''.

-- Of so many that failed, the last seen, it is counted which of them wait for their sender.
local MOST = 10000

local function for_sender(group)
  local state, consumer = string.match(group, '^([^:]*):(.*)$')
  local count, since = 0, ''
  local found = state == 'failed' and redis.call('ZRANGE', seen_key(group), 0, MOST, 'REV', 'WITHSCORES') or {}
  for n = 1, #found, 2 do
    if waits_for_sender(consumer, found[n]) then
      count, since = count + 1, found[n + 1]
    end
  end
  return count, since
end

local tallies = {}
for _, group in ipairs(redis.call('SMEMBERS', prefix .. 'groups')) do
  local longest_unseen = redis.call('ZRANGE', seen_key(group), 0, 0, 'WITHSCORES')
  local first_over = redis.call('ZRANGE', leases_key(group), '-inf', now_text, 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')
  local waiting, since = for_sender(group)
  tallies[#tallies + 1] = {
    group,
    redis.call('ZCARD', seen_key(group)),
    redis.call('ZCOUNT', leases_key(group), '-inf', now_text),
    longest_unseen[2],
    redis.call('HGET', prefix .. 'duplicates', group) or '0',
    waiting,
    first_over[2] or '',
    since,
  }
end
return cjson.encode(tallies)
