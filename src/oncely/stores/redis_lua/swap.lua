-- Asked: [[consumer, id, version, record or false], ...]. Answered: a digit for each, 1 where the
-- stored version was that. Versions are text: they have more bits than a number has here.
local written = {}
for n, row in ipairs(asked) do
  local consumer, id, version, record = unpack(row)
  local stored, state, count, lease_until, first_processed_at = unpack(redis.call('HMGET',
    record_key(consumer, id), 'version', 'status', 'duplicates', 'lease_until',
    'first_processed_at'))
  written[n] = '0'
  if stored == version then
    written[n] = '1'
    -- Where memory is full, Redis refuses a first write that may take more, and none after it.
    -- This removal comes first, so that what was claimed can always be completed.
    remove(consumer, id, state, count, lease_until)
    if record then
      write(consumer, id, record, first_processed_at)
    end
  end
end
update_indexes()
return table.concat(written)
