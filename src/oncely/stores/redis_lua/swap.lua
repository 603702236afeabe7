-- Asked: the columns of a batch, `ids` one of them; a record that is to be removed is false.
-- Answered: a digit for each row, 1 where the stored version was the one in its column. Versions are
-- text: they have more bits than a number in Lua.
local version_of = column(asked.version, asked.versions)
local written = {}
for n, id in ipairs(asked.ids) do
  local consumer, version, record = consumer_of(n), version_of(n), record_of(n)
  local stored, state, count, lease_until, first_processed_at = unpack(redis.call('HMGET',
    record_key(consumer, id), 'version', 'status', 'duplicates', 'lease_until',
    'first_processed_at'))
  written[n] = '0'
  if stored == version then
    written[n] = '1'
    -- Where memory is full, Redis refuses a script whose first write may need memory, and checks
    -- no later write. This removal comes first, so that a claimed message can always be completed.
    remove(consumer, id, state, count, lease_until)
    if record then
      write(consumer, id, record, first_processed_at)
    end
  end
end
update_indexes()
return table.concat(written)
