-- Answered: the place to continue after, and how many records were removed.
local ids, after = choose()
if #ids > 0 then
  forget_until(asked.consumer, now - (asked.older_than_s or 0))
end
for _, id in ipairs(ids) do
  local state, count, lease_until = unpack(redis.call('HMGET', record_key(asked.consumer, id),
    'status', 'duplicates', 'lease_until'))
  if state == asked.state then
    remove(asked.consumer, id, state, count, lease_until)
  else
    -- An operator removed the record by hand, and a new one is in another group: these index
    -- entries are left over.
    append(list_of(unseen, group), id)
    append(list_of(ended, group), id)
  end
end
update_indexes()
return cjson.encode({after, #ids})
