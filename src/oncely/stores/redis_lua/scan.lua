-- Answered: the place to continue after, the id and values of each record, and how many records were
-- looked at.
local ids, after, looked_at = choose()
local rows = {}
for _, id in ipairs(ids) do
  local values = read(asked.consumer, id)
  -- Another status: an operator removed the record by hand, and the message was redelivered.
  if values[1] == asked.state then
    rows[#rows + 1] = {id, values}
  end
end
return cjson.encode({after, rows, looked_at})
