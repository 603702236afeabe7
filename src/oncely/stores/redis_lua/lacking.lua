-- Which of the commands in ARGV[2] the user may not run on the keys of the ledger with the prefix
-- ARGV[1]. Redis tells that from 7.0 on. EVAL and EVALSHA, by which this runs, are not asked about.
local lacking = {}
for command in ARGV[2]:gmatch('%S+') do
  local words = {}
  for word in command:gmatch('[^|]+') do
    words[#words + 1] = word
  end
  -- As many as any of them needs: Redis 7.0 looks for keys beyond the last one, and crashes.
  for _ = 1, 3 do
    words[#words + 1] = ARGV[1] .. ':1'
  end
  if redis.acl_check_cmd and not redis.acl_check_cmd(unpack(words)) then
    lacking[#lacking + 1] = '+' .. command
  end
end
return table.concat(lacking, ' ')
