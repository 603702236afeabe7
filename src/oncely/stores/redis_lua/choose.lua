-- For scripts that choose records of one group. Asked: an object with `consumer` and `state`; the
-- most records to choose, `limit`; the place to continue after, `after`; how the ids begin, `begins`;
-- and `older_than_s`, `text`, `lease_over`, `exhausted` and `waits_for_sender` as in a Query. Fields
-- that are not set are absent.

-- How many records one call looks at, so that it does not block the server for long.
local STEP = 1000

local group = group_of(asked.state, asked.consumer)

local function is_too_new(seen_at)
  return asked.older_than_s and tonumber(seen_at) >= now - asked.older_than_s
end

local function fits(id)
  if asked.text and not string.find(id, asked.text, 1, true) then
    return false
  end
  if asked.begins and string.sub(id, 1, #asked.begins) ~= asked.begins then
    return false
  end
  if asked.exhausted and not redis.call('HGET', record_key(asked.consumer, id), 'exhausted') then
    return false
  end
  if asked.waits_for_sender and not waits_for_sender(asked.consumer, id) then
    return false
  end
  if asked.lease_over then
    local lease_until = redis.call('ZSCORE', leases_key(group), id)
    return lease_until and tonumber(lease_until) <= now
  end
  return true
end

local function first_rank(index)
  if not asked.after then
    return 0
  end
  local seen_at, id = unpack(asked.after)
  if redis.call('ZSCORE', index, id) == seen_at then
    return redis.call('ZRANK', index, id) + 1
  end
  -- That record has moved or is gone: look once more at those seen at the same moment.
  return redis.call('ZCOUNT', index, '-inf', '(' .. seen_at)
end

-- The ids that fit, least recently seen first; the place to continue after, false at the end; and how
-- many records were looked at.
local function choose()
  local index = seen_key(group)
  local start = first_rank(index)
  local looked_at = redis.call('ZRANGE', index, start, start + STEP - 1, 'WITHSCORES')
  local chosen = {}
  for n = 1, #looked_at, 2 do
    local id, seen_at = looked_at[n], looked_at[n + 1]
    if is_too_new(seen_at) then
      return chosen, false, (n - 1) / 2
    end
    if fits(id) then
      chosen[#chosen + 1] = id
    end
    if #chosen == asked.limit or n == 2 * STEP - 1 then
      return chosen, {seen_at, id}, (n + 1) / 2
    end
  end
  return chosen, false, #looked_at / 2
end
