-- Asked: [[consumer, id, record], ...]. Answered: a digit for each, 1 where none was there.
local written = {}
for n, row in ipairs(asked) do
  local consumer, id, record = unpack(row)
  written[n] = 1 - redis.call('EXISTS', record_key(consumer, id))
  if written[n] == 1 then
    write(consumer, id, record, now_text)
  end
end
update_indexes()
return table.concat(written)
