-- Asked: the columns of a batch, `ids` one of them, `believed` another. Answered: a digit for each row,
-- 1 where the stored version was the believed one, so that the record is removed.
local believed_of = column(asked.believed, asked.believeds)
local removed = {}
for n, id in ipairs(asked.ids) do
  local consumer = consumer_of(n)
  local stored, state, count, lease_until = unpack(redis.call('HMGET', record_key(consumer, id),
    'version', 'status', 'duplicates', 'lease_until'))
  removed[n] = '0'
  if stored == believed_of(n) then
    removed[n] = '1'
    remove(consumer, id, state, count, lease_until)
  end
end
update_indexes()
return table.concat(removed)
