-- Asked: the columns of a batch, `ids` one of them, and `horizons`: [[consumer, horizon or false],
-- ...]. Answered: a digit for each row: 1 where it was written, because no record was there and the
-- horizon is as believed.
local moved = {}
for _, pair in ipairs(asked.horizons) do
  local consumer, believed = unpack(pair)
  local horizon = horizon_of(consumer)
  moved[consumer] = (horizon and tonumber(horizon)) ~= believed
end
local written = {}
for n, id in ipairs(asked.ids) do
  local consumer = consumer_of(n)
  written[n] = '0'
  if not moved[consumer] and redis.call('EXISTS', record_key(consumer, id)) == 0 then
    written[n] = '1'
    write(consumer, id, change_of(n), version_of(n), now_text)
  end
end
update_indexes()
return table.concat(written)
