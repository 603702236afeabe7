-- Answered: where to go on, and the id and values of each record.
local ids, after = choose()
local rows = {}
for _, id in ipairs(ids) do
  local values = read(asked.consumer, id)
  -- Another status: an operator removed the record by hand, and the message came again.
  if values[1] == asked.state then
    rows[#rows + 1] = {id, values}
  end
end
return cjson.encode({after, rows})
