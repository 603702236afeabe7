-- For scripts that choose records of one group. Asked: an object with `consumer` and `state`; how
-- many at most, `limit`; where to go on, `after`; and `older_than_s`, `text` and `lease_over` as in
-- a Query. What is not set is not there.

-- How many are looked at in one call, so that none keeps the server for long.
local STEP = 1000

local group = group_of(asked.state, asked.consumer)

local function is_too_new(seen_at)
  return asked.older_than_s and tonumber(seen_at) >= now - asked.older_than_s
end

local function fits(id)
  if asked.text and not string.find(id, asked.text, 1, true) then
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
  -- It is not there any more: those seen at the same moment are looked at once more.
  return redis.call('ZCOUNT', index, '-inf', '(' .. seen_at)
end

-- The ids that fit, longest unseen first, and where to go on: false where nothing is left.
local function choose()
  local index = seen_key(group)
  local start = first_rank(index)
  local looked_at = redis.call('ZRANGE', index, start, start + STEP - 1, 'WITHSCORES')
  local chosen = {}
  for n = 1, #looked_at, 2 do
    local id, seen_at = looked_at[n], looked_at[n + 1]
    if is_too_new(seen_at) then
      return chosen, false
    end
    if fits(id) then
      chosen[#chosen + 1] = id
    end
    if #chosen == asked.limit or n == 2 * STEP - 1 then
      return chosen, {seen_at, id}
    end
  end
  return chosen, false
end
