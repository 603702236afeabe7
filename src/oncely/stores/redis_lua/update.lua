-- Asked: the columns of a batch, `ids` one of them, `believed` another. Answered: a digit for each row,
-- 1 where the stored version was the believed one. Versions are text: they have more bits than a
-- number in Lua.
local believed_of = column(asked.believed, asked.believeds)
local written = {}
for n, id in ipairs(asked.ids) do
  local consumer, change = consumer_of(n), change_of(n)
  local key = record_key(consumer, id)
  local stored, state, count, lease_until, first_processed_at = unpack(redis.call('HMGET', key,
    'version', 'status', 'duplicates', 'lease_until', 'first_processed_at'))
  written[n] = '0'
  if stored == believed_of(n) then
    written[n] = '1'
    leave(consumer, id, state, count, lease_until)
    -- Where memory is full, Redis refuses a script whose first write may need memory, and checks
    -- no later write. This removal comes first, so that a claimed message can always be completed.
    redis.call('HDEL', key, 'lease_until', 'duplicates', unpack(change.cleared))
    write(consumer, id, change, version_of(n), first_processed_at, state, count, lease_until)
  end
end
update_indexes()
return table.concat(written)
