-- For scripts that write a batch. A column holds one value for all rows, or one for each.
local function column(one, each)
  return function(n)
    if each then
      return each[n]
    end
    return one
  end
end

local consumer_of = column(asked.consumer, asked.consumers)
local change_of = column(asked.change, asked.changes)
local version_of = column(asked.version, asked.versions)
