-- For scripts that write. Changes of the indexes are collected, and made at the end with one
-- command for each group: such a script ends with `update_indexes`.

local unseen, ended, seen, leased, duplicates = {}, {}, {}, {}, {}
local lease_ends, written_records = {}, {}

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

-- What is written of a record whatever its key, made once for rows that share one record.
local function written_of(record)
  local written = written_records[record]
  if not written then
    local version, state, count, lease_s, fields = unpack(record)
    append(fields, 'status', state)
    append(fields, 'version', version)
    append(fields, 'last_processed_at', now_text)
    written = {state = state, count = count, fields = fields}
    if lease_s then
      written.lease_until = lease_end(lease_s)
      append(fields, 'lease_until', written.lease_until)
    end
    if count ~= 0 then
      append(fields, 'duplicates', count)
    end
    written_records[record] = written
  end
  return written
end

-- Write a record where there is none.
local function write(consumer, id, record, first_processed_at)
  local written = written_of(record)
  local group = group_of(written.state, consumer)
  redis.call('HSET', record_key(consumer, id), 'first_processed_at', first_processed_at,
    unpack(written.fields))
  append(list_of(seen, group), now_text, id)
  if written.lease_until then
    append(list_of(leased, group), written.lease_until, id)
  end
  if written.count ~= 0 then
    duplicates[group] = (duplicates[group] or 0) + written.count
  end
end

-- Remove a record; the arguments are its stored values.
local function remove(consumer, id, state, count, lease_until)
  local group = group_of(state, consumer)
  redis.call('DEL', record_key(consumer, id))
  append(list_of(unseen, group), id)
  if count then
    duplicates[group] = (duplicates[group] or 0) - count
  end
  if lease_until then
    append(list_of(ended, group), id)
  end
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
