-- Answered: [group, count, leases that are over, the earliest last seen, duplicates], ...
local tallies = {}
for _, group in ipairs(redis.call('SMEMBERS', prefix .. 'groups')) do
  local longest_unseen = redis.call('ZRANGE', seen_key(group), 0, 0, 'WITHSCORES')
  tallies[#tallies + 1] = {
    group,
    redis.call('ZCARD', seen_key(group)),
    redis.call('ZCOUNT', leases_key(group), '-inf', now_text),
    longest_unseen[2],
    redis.call('HGET', prefix .. 'duplicates', group) or '0',
  }
end
return cjson.encode(tallies)
