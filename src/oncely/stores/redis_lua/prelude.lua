-- The beginning of every script. ARGV holds the prefix of the ledger's keys, a test's clock ('' for
-- the server's own), and the input, as JSON.
--
-- The keys, each after the prefix and a colon. The words for states have no colon, and a length in
-- bytes says where a consumer's name ends, so that no two keys are alike.
--
--   7:billing:abc-123     hash        the record of message abc-123; most fields at their default
--                                     are left out
--   groups                set         <state>:<consumer>, for each that has records
--   seen:sent:billing     sorted set  the ids of a group, by last_processed_at
--   leases:sent:billing   sorted set  those of them that have a lease, by lease_until
--   duplicates            hash        the total of the duplicates of a group
--   horizons              hash        up to when records of a consumer may have been forgotten
--   retentions            hash        how long the records of a consumer are kept

local prefix = ARGV[1] .. ':'
local asked = cjson.decode(ARGV[3])

local function store_clock()
  if ARGV[2] ~= '' then
    return tonumber(ARGV[2])
  end
  local time = redis.call('TIME')
  return time[1] + time[2] / 1000000
end

local function time_text(seconds)
  return string.format('%.6f', seconds)
end

local now = store_clock()
local now_text = time_text(now)

local function group_of(state, consumer)
  return state .. ':' .. consumer
end

-- Made once for each consumer: to turn a number into text is slow.
local record_prefixes = {}

local function record_key(consumer, id)
  local record_prefix = record_prefixes[consumer]
  if not record_prefix then
    record_prefix = prefix .. #consumer .. ':' .. consumer .. ':'
    record_prefixes[consumer] = record_prefix
  end
  return record_prefix .. id
end

-- Whether a record waits for its sender, as Record in core/record.py says.
local function waits_for_sender(consumer, id)
  local state, attempts, exhausted, lease_until = unpack(redis.call('HMGET',
    record_key(consumer, id), 'status', 'attempts', 'exhausted', 'lease_until'))
  return state == 'failed' and tonumber(attempts) == 0 and not exhausted and not lease_until
end

local function seen_key(group)
  return prefix .. 'seen:' .. group
end

local function leases_key(group)
  return prefix .. 'leases:' .. group
end
