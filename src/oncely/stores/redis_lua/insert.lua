-- Asked: [[consumer, id, record], ...]. Answered: a digit for each, 1 where none was there.
local written = {}
for n, row in ipairs(asked) do
  local consumer, id, record = unpack(row)
  written[n] = '0'
  if redis.call('EXISTS', record_key(consumer, id)) == 0 then
    written[n] = '1'
    write(consumer, id, record, now_text)
  end
end
update_indexes()
return table.concat(written)
