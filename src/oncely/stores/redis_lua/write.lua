-- For scripts that write. Changes of the indexes are collected, and made at the end with one
-- command for each group: such a script ends with `update_indexes`.

local unseen, ended, seen, leased, duplicates = {}, {}, {}, {}, {}
local lease_ends = {}

local function list_of(lists, group)
  local list = lists[group]
  if not list then
    list = {}
    lists[group] = list
  end
  return list
end

local function append(list, first, second)
  local length = #list
  list[length + 1] = first
  list[length + 2] = second
end

-- Most leases of a batch are equally long.
local function lease_end(lease_s)
  local text = lease_ends[lease_s]
  if not text then
    text = time_text(now + lease_s)
    lease_ends[lease_s] = text
  end
  return text
end

-- Note that a record is not where it was in the indexes; the arguments are its stored values.
local function leave(consumer, id, state, count, lease_until)
  local group = group_of(state, consumer)
  append(list_of(unseen, group), id)
  if count then
    duplicates[group] = (duplicates[group] or 0) - count
  end
  if lease_until then
    append(list_of(ended, group), id)
  end
end

local function remove(consumer, id, ...)
  redis.call('DEL', record_key(consumer, id))
  leave(consumer, id, ...)
end

-- Write a change: `state`, `count` of duplicates and `lease_s` (false: none) stay as they were where
-- they are not in it, `fields` are names and values, `cleared` are names. The last arguments are the
-- stored values.
local function write(consumer, id, change, version, first_processed_at, state, count, lease_until)
  local key = record_key(consumer, id)
  state, count = change.state or state, change.count or count or 0
  if change.lease_s ~= nil then
    lease_until = change.lease_s and lease_end(change.lease_s)
  end
  local group = group_of(state, consumer)
  local fields = {'status', state, 'version', version, 'last_processed_at', now_text,
    'first_processed_at', first_processed_at, unpack(change.fields)}
  append(list_of(seen, group), now_text, id)
  if lease_until then
    append(fields, 'lease_until', lease_until)
    append(list_of(leased, group), lease_until, id)
  end
  if tonumber(count) ~= 0 then
    append(fields, 'duplicates', count)
    duplicates[group] = (duplicates[group] or 0) + count
  end
  redis.call('HSET', key, unpack(fields))
end

local function update_indexes()
  for group, ids in pairs(unseen) do
    redis.call('ZREM', seen_key(group), unpack(ids))
  end
  for group, ids in pairs(ended) do
    redis.call('ZREM', leases_key(group), unpack(ids))
  end
  for group, scored in pairs(seen) do
    redis.call('ZADD', seen_key(group), unpack(scored))
    redis.call('SADD', prefix .. 'groups', group)
  end
  for group, scored in pairs(leased) do
    redis.call('ZADD', leases_key(group), unpack(scored))
  end
  for group, count in pairs(duplicates) do
    redis.call('HINCRBY', prefix .. 'duplicates', group, count)
  end
  for group in pairs(unseen) do
    if redis.call('EXISTS', seen_key(group)) == 0 then
      redis.call('SREM', prefix .. 'groups', group)
      redis.call('HDEL', prefix .. 'duplicates', group)
    end
  end
end
