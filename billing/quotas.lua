-- Every limit of every scope of one team, checked and held in one atomic step. One script, several verbs.
--
-- KEYS[1]  the team's prefix; it carries the hash tag {team}, and every key below starts with it, so that all of them
--          live in one slot of a cluster
-- ARGV[1]  verb; ARGV[2] the time in unix seconds, or "" for the server's own
-- ARGV[3]  request id; the rest belongs to the verb
--
--   PREFIX:holds        hash    request id -> packed {tokens, cost, second, day, month, scopes, used tokens, used cost}
--   PREFIX:leases       zset    request id by the moment its lease ends, unix seconds
--   PREFIX:live         hash    scope -> calls that hold something
--   PREFIX:w:SCOPE      hash    the last 60 seconds: at (last second seen), r and t (sums), rS and tS (second S)
--   PREFIX:d:SCOPE:DAY  hash    t, c settled tokens and nano-dollars; ht, hc held ones
--   PREFIX:m:SCOPE:MON  hash    c settled, hc held nano-dollars
--   PREFIX:t:ID         string  tombstone: "settled" or "freed"
--
-- SCOPE is "team" or "key:ID", DAY days since 1970, MON year * 12 + month. Numbers stay exact up to 2^53.

local WINDOW = 60           -- seconds
local KEEP_WINDOW = 120     -- seconds
local KEEP_DAY = 8 * 86400
local KEEP_MONTH = 70 * 86400
local KEEP_TOMBSTONE = 3600

local base, verb, id = KEYS[1], ARGV[1], ARGV[3]
local now = tonumber(ARGV[2])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) + tonumber(time[2]) / 1000000
end
local holds, leases, live, tombstone = base .. ':holds', base .. ':leases', base .. ':live', base .. ':t:'

local function numbers(key, ...)
  local found = redis.call('HMGET', key, ...)
  for i = 1, #found do found[i] = tonumber(found[i]) or 0 end
  return found
end

-- The last 60 seconds of a scope: leave out what is older, return {requests, tokens, second}.
local function window(scope)
  local key, second = base .. ':w:' .. scope, math.floor(now)
  local at, r, t = unpack(numbers(key, 'at', 'r', 't'))
  if second < at and at - second < WINDOW then second = at end
  if at == 0 or second - at >= WINDOW or second < at then
    redis.call('DEL', key)
    return {0, 0, second}
  end
  if second > at then
    local old = {}
    for s = at - WINDOW + 1, second - WINDOW do
      old[#old + 1] = 'r' .. s
      old[#old + 1] = 't' .. s
    end
    local gone = numbers(key, unpack(old))
    for i = 1, #gone, 2 do
      r = r - gone[i]
      t = t - gone[i + 1]
    end
    redis.call('HDEL', key, unpack(old))
    redis.call('HSET', key, 'at', second, 'r', r, 't', t)
  end
  return {r, t, second}
end

-- Seconds until the window has room again: when enough of its oldest buckets have left it.
local function wait(scope, kind, surplus, second)
  local names = {}
  for s = second - WINDOW + 1, second do names[#names + 1] = kind .. s end
  local buckets = numbers(base .. ':w:' .. scope, unpack(names))
  for i = 1, WINDOW do
    surplus = surplus - buckets[i]
    if surplus <= 0 then return second + i - now end
  end
  return WINDOW
end

local function add_to_window(scope, second, requests, tokens)
  local key = base .. ':w:' .. scope
  redis.call('HINCRBY', key, 'r', requests)
  redis.call('HINCRBY', key, 't', tokens)
  redis.call('HINCRBY', key, 'r' .. second, requests)
  redis.call('HINCRBY', key, 't' .. second, tokens)
end

-- A refund goes to the bucket it was held in, if that is still counted.
local function correct_window(scope, second, requests, tokens)
  local at = tonumber(redis.call('HGET', base .. ':w:' .. scope, 'at'))
  if at and second > at - WINDOW and second > now - WINDOW and (requests ~= 0 or tokens ~= 0)
    and redis.call('HEXISTS', base .. ':w:' .. scope, 'r' .. second) == 1 then
    add_to_window(scope, second, requests, tokens)
  end
end

local function add(key, keep, ...)
  local changes = {...}
  for i = 1, #changes, 2 do
    if changes[i + 1] ~= 0 then redis.call('HINCRBY', key, changes[i], changes[i + 1]) end
  end
  redis.call('EXPIRE', key, keep)
end

local function day_key(scope, day) return base .. ':d:' .. scope .. ':' .. day end
local function month_key(scope, month) return base .. ':m:' .. scope .. ':' .. month end

local function hold_of(which)
  local packed = redis.call('HGET', holds, which)
  return packed and cmsgpack.unpack(packed)
end

local function put(which, hold, lease)
  redis.call('HSET', holds, which, cmsgpack.pack(hold))
  redis.call('ZADD', leases, lease, which)
end

local function take_in(which, hold, lease)
  local tokens, cost, _, day, month, scopes = unpack(hold)
  put(which, hold, lease)
  for _, scope in ipairs(scopes) do
    redis.call('HINCRBY', live, scope, 1)
    add(day_key(scope, day), KEEP_DAY, 'ht', tokens, 'hc', cost)
    add(month_key(scope, month), KEEP_MONTH, 'hc', cost)
  end
end

local function drop(which, hold)
  local tokens, cost, _, day, month, scopes = unpack(hold)
  redis.call('HDEL', holds, which)
  redis.call('ZREM', leases, which)
  for _, scope in ipairs(scopes) do
    if redis.call('HINCRBY', live, scope, -1) <= 0 then redis.call('HDEL', live, scope) end
    add(day_key(scope, day), KEEP_DAY, 'ht', -tokens, 'hc', -cost)
    add(month_key(scope, month), KEEP_MONTH, 'hc', -cost)
  end
end

local function bury(which, how) redis.call('SET', tombstone .. which, how, 'EX', KEEP_TOMBSTONE) end

-- Free holds whose lease has ended: their owners are dead, or have forgotten them. Returns their ids.
local function reap(most)
  local expired = redis.call('ZRANGEBYSCORE', leases, '-inf', string.format('%.3f', now), 'LIMIT', 0, most)
  for _, which in ipairs(expired) do
    local hold = hold_of(which)
    if hold then drop(which, hold) else redis.call('ZREM', leases, which) end
    bury(which, 'freed')
  end
  return expired
end

-- What is used and held in a scope: {requests/min, tokens/min, live, day tokens, held, day cost, held, month cost, held}
local function state(scope, day, month, is_windowed)
  local w = is_windowed and window(scope) or {0, 0, math.floor(now)}
  local d = numbers(day_key(scope, day), 't', 'ht', 'c', 'hc')
  local m = numbers(month_key(scope, month), 'c', 'hc')
  local n = tonumber(redis.call('HGET', live, scope)) or 0
  return {w[1], w[2], n, d[1], d[2], d[3], d[4], m[1], m[2]}, w[3]
end

-- ARGV: valid until, lease (seconds), tokens, cost, day, month, then for each scope: name and six limits ("" for none).
-- Returns {1 held | 0 refused | -1 too late, time in ms, states, refusals}; a refusal is {scope, limit, wait in ms or -1}.
local function open()
  local valid_until, lease = tonumber(ARGV[4]), tonumber(ARGV[5])
  local tokens, cost, day, month = tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8], ARGV[9]
  local time = math.floor(now * 1000)
  if redis.call('EXISTS', tombstone .. id) == 1 or now > valid_until then return {-1, time, {}, {}} end
  local known = hold_of(id) -- the caller asks again because it did not hear our answer
  local names, states, seconds, windowed, refusals = {}, {}, {}, {}, {}
  for i = 10, #ARGV, 7 do
    local scope, caps, n = ARGV[i], {}, #names + 1
    for limit = 1, 6 do caps[limit] = tonumber(ARGV[i + limit]) end
    windowed[n] = caps[1] ~= nil or caps[2] ~= nil
    names[n] = scope
    states[n], seconds[n] = state(scope, day, month, windowed[n])
    local s = states[n]
    local after = {s[1] + 1, s[2] + tokens, s[3] + 1, s[4] + s[5] + tokens, s[6] + s[7] + cost, s[8] + s[9] + cost}
    for limit = 1, 6 do
      if caps[limit] and after[limit] > caps[limit] and not known then
        local pause = -1
        if limit <= 2 then
          local kind = limit == 1 and 'r' or 't'
          pause = math.ceil(1000 * wait(scope, kind, after[limit] - caps[limit], seconds[n]))
        end
        refusals[#refusals + 1] = {n, limit, pause}
      end
    end
  end
  if #refusals > 0 then return {0, time, states, refusals} end
  if known then
    redis.call('ZADD', leases, now + lease, id)
    return {1, time, states, {}}
  end
  local second = math.floor(now)
  for n, scope in ipairs(names) do
    if windowed[n] then
      second = seconds[n]
      add_to_window(scope, second, 1, tokens)
      redis.call('HSET', base .. ':w:' .. scope, 'at', second)
      redis.call('EXPIRE', base .. ':w:' .. scope, KEEP_WINDOW)
    end
    local s = states[n]
    states[n] = {s[1] + 1, s[2] + tokens, s[3] + 1, s[4], s[5] + tokens, s[6], s[7] + cost, s[8], s[9] + cost}
  end
  take_in(id, {tokens, cost, second, day, month, names, 0, 0}, now + lease)
  return {1, time, states, {}}
end

-- ARGV: lease, used tokens, used cost, tokens, cost, day, month, scopes…; from "tokens" on as it was opened.
-- Returns 1 renewed, 2 put back into a Redis that had forgotten it, 0 freed meanwhile or over.
local function renew()
  local lease, used_tokens, used_cost = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
  local hold = hold_of(id)
  if hold then
    hold[7], hold[8] = used_tokens, used_cost
    put(id, hold, now + lease)
    return 1
  end
  if redis.call('EXISTS', tombstone .. id) == 1 then return 0 end
  local scopes = {unpack(ARGV, 11)}
  hold = {tonumber(ARGV[7]), tonumber(ARGV[8]), 0, ARGV[9], ARGV[10], scopes, used_tokens, used_cost}
  take_in(id, hold, now + lease)
  return 2
end

-- ARGV: used tokens, used cost, day, month, scopes…. Returns 1 in place of its hold, 2 settled before, 3 without a hold.
local function settle()
  local tokens, cost, day, month = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6], ARGV[7]
  if redis.call('GET', tombstone .. id) == 'settled' then return 2 end
  local hold = hold_of(id)
  local scopes = hold and hold[6] or {unpack(ARGV, 8)}
  if hold then
    drop(id, hold)
    day, month = hold[4], hold[5]
  end
  for _, scope in ipairs(scopes) do
    if hold then correct_window(scope, hold[3], 0, tokens - hold[1]) end
    add(day_key(scope, day), KEEP_DAY, 't', tokens, 'c', cost)
    add(month_key(scope, month), KEEP_MONTH, 'c', cost)
  end
  bury(id, 'settled')
  return hold and 1 or 3
end

-- Returns 1 when there was a hold to give back.
local function release()
  if redis.call('GET', tombstone .. id) == 'settled' then return 0 end
  local hold = hold_of(id)
  bury(id, 'freed')
  if not hold then return 0 end
  drop(id, hold)
  for _, scope in ipairs(hold[6]) do correct_window(scope, hold[3], -1, -hold[1]) end
  return 1
end

-- ARGV: scope, day, month. Returns the scope's state, and whether there is a counter of that day.
local function usage()
  local found = state(ARGV[4], ARGV[5], ARGV[6], true)
  found[10] = redis.call('EXISTS', day_key(ARGV[4], ARGV[5]))
  return found
end

if verb == 'open' then return open() end
if verb == 'renew' then return renew() end
if verb == 'settle' then return settle() end
if verb == 'release' then return release() end
if verb == 'sweep' then return reap(tonumber(ARGV[4])) end
return usage()
