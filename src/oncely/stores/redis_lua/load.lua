-- Asked: [[consumer, id], ...]. Answered: the clock, and the values of each record.
local found = {}
for n, key in ipairs(asked) do
  found[n] = read(unpack(key))
end
return cjson.encode({now_text, found})
