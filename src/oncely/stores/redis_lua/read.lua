-- For scripts that read: the values of a record, in the order in which they are answered; false
-- for each that is not there.
local function read(consumer, id)
  return redis.call('HMGET', record_key(consumer, id), 'status', 'attempts', 'fence',
    'first_processed_at', 'last_processed_at', 'lease_until', 'metadata', 'result', 'fingerprint',
    'exhausted', 'duplicates', 'version')
end
