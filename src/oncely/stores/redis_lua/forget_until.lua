-- Asked: [[consumer, horizon], ...].
for _, pair in ipairs(asked) do
  forget_until(unpack(pair))
end
return 'OK'
