-- Asked: {rows, believed}: [[consumer, id, record], ...] and [[consumer, horizon or false], ...].
-- Answered: a digit for each row, 1 where none was there, and the horizon is as it is believed.
local moved = {}
for _, pair in ipairs(asked[2]) do
  local consumer, believed = unpack(pair)
  local horizon = horizon_of(consumer)
  moved[consumer] = (horizon and tonumber(horizon)) ~= believed
end
local written = {}
for n, row in ipairs(asked[1]) do
  local consumer, id, record = unpack(row)
  written[n] = '0'
  if not moved[consumer] and redis.call('EXISTS', record_key(consumer, id)) == 0 then
    written[n] = '1'
    write(consumer, id, record, now_text)
  end
end
update_indexes()
return table.concat(written)
