-- For scripts that read or raise horizons.
local horizons_key = prefix .. 'horizons'

-- Numbers are stored as text with all their digits, so that they can be compared.
local function number_text(number)
  return string.format('%.17g', number)
end

-- The horizon of a consumer as text; false where it has none.
local function horizon_of(consumer)
  return redis.call('HGET', horizons_key, consumer)
end

local function forget_until(consumer, horizon)
  local former = horizon_of(consumer)
  if not former or tonumber(former) < horizon then
    redis.call('HSET', horizons_key, consumer, number_text(horizon))
  end
end
