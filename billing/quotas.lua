-- Every limit of every scope of one team, checked and held in one atomic step. One script, several verbs.
--
-- KEYS[1]  the team's prefix; it carries the hash tag {team}, and every key below starts with it, so that all of them
--          live in one slot of a cluster
-- ARGV[1]  verb; ARGV[2] the time in unix seconds, or "" for the server's own
-- ARGV[3]  the epoch that the caller counts in; "*" for whatever is there, or a first one
-- ARGV[4]  request id; the rest belongs to the verb
--
--   PREFIX:epoch        string  the marker: the epoch whose books are true
--   BASE                PREFIX:EPOCH; a new epoch begins with empty books, whatever an old one left behind
--   BASE:holds          hash    request id -> packed {tokens, cost, second, day, month, scopes, used tokens, used cost}
--   BASE:leases         zset    request id by the moment its lease ends, unix seconds
--   BASE:live           hash    scope -> calls that hold something, without those that are aside
--   BASE:w:SCOPE        hash    the last 60 seconds: at (last second seen), r, t and h (sums), rS, tS and hS (second S):
--                               requests, tokens, and those of the tokens that running calls hold
--   BASE:d:SCOPE:DAY    hash    t, c settled tokens and nano-dollars; ht, hc held ones
--   BASE:m:SCOPE:MON    hash    c settled, hc held nano-dollars
--   BASE:s:HOUR         hash    MINUTE:DAY:MON:t and …:c, what the team settled, by the minute inside the request ids
--   BASE:t:ID           string  tombstone: "settled", "freed" by its owner, or "reaped:SECOND"
--   BASE:reaped         zset    request id by the moment it was reaped: its row may still come from a journal
--   BASE:back           set     ids of closed calls that were put back, until the sums are loaded
--   BASE:loaded         string  the sums of the statements are in
--
-- A hold that is aside counts in days and months alone; its second is ASIDE.
--
-- SCOPE is "team" or "key:ID", DAY days since 1970, MON year * 12 + month. Numbers stay exact up to 2^53.
--
-- What comes with every call stands first and returns from there: to make all the functions below takes a third of the
-- time of a hold.

local WINDOW = 60           -- seconds
local KEEP_WINDOW = 120     -- seconds
local KEEP_DAY = 8 * 86400
local KEEP_MONTH = 70 * 86400
local OLDEST = 61           -- days; what the first of last month is old at the most: July 1 on August 31
local KEEP_TOMBSTONE = 3600
local KEEP_REAPED = 3600    -- seconds; a journal that does not come back by then is lost
local KEEP_MINUTES = 3 * 3600
local KEEP_UNLOADED = 3600  -- seconds; an epoch that is given up leaves nothing behind
local ASIDE = -1
local UNKNOWN, STALE = -2, -3  -- this team has no books; its books are of another epoch than the caller's

local prefix, verb, believed, id = KEYS[1], ARGV[1], ARGV[3], ARGV[4]
local now = tonumber(ARGV[2])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) + tonumber(time[2]) / 1000000
end
local marker = redis.pcall('GET', prefix .. ':epoch')
if type(marker) == 'table' then -- somebody else wrote there: what it says is lost, and no rebuild may hang on it
  redis.call('DEL', prefix .. ':epoch')
  marker = false
end
if believed == '*' then
  if not marker then
    marker = '0'
    redis.call('SET', prefix .. ':epoch', marker)
  end
  believed = marker
end
local base = prefix .. ':' .. ((verb == 'put_back' or verb == 'load') and believed or marker or '')
local holds, leases, live, tombstone = base .. ':holds', base .. ':leases', base .. ':live', base .. ':t:'
local reaped = base .. ':reaped'

local function numbers(key, ...)
  local found = redis.call('HMGET', key, ...)
  for i = 1, #found do found[i] = tonumber(found[i]) or 0 end
  return found
end

-- The last 60 seconds of a scope: leave out what is older, return {requests, tokens, second, of these in that second:
-- requests, tokens; tokens held, of these in that second}.
local function window(scope)
  local key, second = base .. ':w:' .. scope, math.floor(now)
  local at, r, t, h, r_now, t_now, h_now =
    unpack(numbers(key, 'at', 'r', 't', 'h', 'r' .. second, 't' .. second, 'h' .. second))
  if second < at and at - second < WINDOW then
    second = at
    r_now, t_now, h_now = unpack(numbers(key, 'r' .. second, 't' .. second, 'h' .. second))
  end
  if at == 0 or second - at >= WINDOW or second < at then
    redis.call('DEL', key)
    return {0, 0, second, 0, 0, 0, 0}
  end
  if second > at then
    local old = {}
    for s = at - WINDOW + 1, second - WINDOW do
      old[#old + 1] = 'r' .. s
      old[#old + 1] = 't' .. s
      old[#old + 1] = 'h' .. s
    end
    local gone = numbers(key, unpack(old))
    for i = 1, #gone, 3 do
      r = r - gone[i]
      t = t - gone[i + 1]
      h = h - gone[i + 2]
    end
    redis.call('HDEL', key, unpack(old))
    redis.call('HSET', key, 'at', second, 'r', r, 't', t, 'h', h)
  end
  return {r, t, second, r_now, t_now, h, h_now}
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

-- What is used and held in a scope: {requests/min, tokens/min, live, day tokens, held, day cost, held, month cost, held,
-- of the tokens/min: held}
local function state(scope, day, month, is_windowed)
  local w = is_windowed and window(scope) or {0, 0, nil, 0, 0, 0, 0}
  local d = numbers(day_key(scope, day), 't', 'ht', 'c', 'hc')
  local m = numbers(month_key(scope, month), 'c', 'hc')
  local n = tonumber(redis.call('HGET', live, scope)) or 0
  return {w[1], w[2], n, d[1], d[2], d[3], d[4], m[1], m[2], w[6]}, w
end

-- What a state comes to with one more call. A correction may leave less than nothing settled: that is no headroom.
local function with(s, tokens, cost)
  local most = math.max
  return {
    s[1] + 1, s[2] + tokens, s[3] + 1,
    most(0, s[4]) + s[5] + tokens, most(0, s[6]) + s[7] + cost, most(0, s[8]) + s[9] + cost,
  }
end

-- ARGV: valid until, lease (seconds), tokens, cost, day, month, 1 if it is aside, then for each scope: name and six
-- limits ("" for none).
-- Returns {1 held | 0 refused | -1 too late | UNKNOWN | STALE, time in ms, states, refusals}; a refusal is
-- {scope, limit, wait in ms or -1}.
local function open()
  local time = math.floor(now * 1000)
  if believed ~= marker then return {marker and STALE or UNKNOWN, time, {}, {}} end
  local valid_until, lease = tonumber(ARGV[5]), tonumber(ARGV[6])
  local tokens, cost, day, month = tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9], ARGV[10]
  local is_aside = ARGV[11] == '1'
  if redis.call('EXISTS', tombstone .. id) == 1 or now > valid_until then return {-1, time, {}, {}} end
  local known = hold_of(id) -- the caller asks again because it did not hear our answer
  local names, states, windows, refusals = {}, {}, {}, {}
  for i = 12, #ARGV, 7 do
    local scope, caps, n = ARGV[i], {}, #names + 1
    for limit = is_aside and 4 or 1, 6 do caps[limit] = tonumber(ARGV[i + limit]) end
    names[n] = scope
    states[n], windows[n] = state(scope, day, month, caps[1] or caps[2])
    local after = with(states[n], tokens, cost)
    for limit = 1, 6 do
      if caps[limit] and after[limit] > caps[limit] and not known then
        local pause = -1 -- running calls are in its way, or a whole day
        if limit == 1 or limit == 2 and after[2] - states[n][10] > caps[2] then
          local kind = limit == 1 and 'r' or 't'
          pause = math.ceil(1000 * wait(scope, kind, after[limit] - caps[limit], windows[n][3]))
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
  local second = is_aside and ASIDE or math.floor(now)
  for n, scope in ipairs(names) do -- what was just read is written with the call in it: every command takes its time
    local s, w = states[n], windows[n]
    states[n] = {
      s[1] + 1, s[2] + tokens, s[3] + (is_aside and 0 or 1),
      s[4], s[5] + tokens, s[6], s[7] + cost, s[8], s[9] + cost, s[10] + tokens,
    }
    if w[3] then
      local key = base .. ':w:' .. scope
      second = w[3]
      redis.call('HSET', key, 'at', second, 'r', w[1] + 1, 't', w[2] + tokens, 'h', w[6] + tokens,
        'r' .. second, w[4] + 1, 't' .. second, w[5] + tokens, 'h' .. second, w[7] + tokens)
      if w[4] == 0 then redis.call('EXPIRE', key, KEEP_WINDOW) end
    end
    if not is_aside then redis.call('HINCRBY', live, scope, 1) end
    if tokens ~= 0 or cost ~= 0 then
      local of_day, of_month = day_key(scope, day), month_key(scope, month)
      redis.call('HSET', of_day, 'ht', s[5] + tokens, 'hc', s[7] + cost)
      redis.call('HSET', of_month, 'hc', s[9] + cost)
      -- Those may be new; of others, whoever ends the hold says again how long they stay.
      if s[4] + s[5] == 0 then redis.call('EXPIRE', of_day, KEEP_DAY) end
      if s[8] + s[9] == 0 then redis.call('EXPIRE', of_month, KEEP_MONTH) end
    end
  end
  put(id, {tokens, cost, second, day, month, names, 0, 0}, now + lease)
  return {1, time, states, {}}
end

if verb == 'open' then return open() end

local function add_to_window(scope, second, requests, tokens)
  local key = base .. ':w:' .. scope
  for kind, change in pairs({r = requests, t = tokens}) do
    if change ~= 0 then
      redis.call('HINCRBY', key, kind, change)
      redis.call('HINCRBY', key, kind .. second, change)
    end
  end
end

-- A refund goes to the bucket it was held in, if that is still counted.
local function correct_window(scope, second, requests, tokens)
  local at = tonumber(redis.call('HGET', base .. ':w:' .. scope, 'at'))
  if at and second > at - WINDOW and second > now - WINDOW and (requests ~= 0 or tokens ~= 0)
    and redis.call('HEXISTS', base .. ':w:' .. scope, 'r' .. second) == 1 then
    add_to_window(scope, second, requests, tokens)
  end
end

-- Count more or fewer of a second's tokens as held by running calls, if that second is still counted.
local function hold_in_window(scope, second, tokens)
  local key = base .. ':w:' .. scope
  if tokens == 0 or second <= now - WINDOW or redis.call('HEXISTS', key, 'r' .. second) == 0 then return end
  local change = math.max(tokens, -numbers(key, 'h' .. second)[1])
  redis.call('HINCRBY', key, 'h', change)
  redis.call('HINCRBY', key, 'h' .. second, change)
end

-- Count a call that another Redis, or none, had counted: in the second in which it began.
local function restore_window(scope, second, requests, tokens)
  if second <= now - WINDOW then return end
  local last = window(scope)[3]
  add_to_window(scope, math.min(second, last), requests, tokens)
  redis.call('HSET', base .. ':w:' .. scope, 'at', last)
  redis.call('EXPIRE', base .. ':w:' .. scope, KEEP_WINDOW)
end

local function add(key, keep, ...)
  local changes = {...}
  for i = 1, #changes, 2 do
    if changes[i + 1] ~= 0 then redis.call('HINCRBY', key, changes[i], changes[i + 1]) end
  end
  redis.call('EXPIRE', key, keep)
end

-- Unix milliseconds inside a UUIDv7.
local function time_of(which) return tonumber(which:sub(1, 8) .. which:sub(10, 13), 16) end

-- Add to what is settled. Periods that have left the books, such as days before those that an epoch began with, stay out.
local function book(which, scopes, day, month, tokens, cost)
  local age = math.floor(now / 86400) - tonumber(day)
  for _, scope in ipairs(scopes) do
    local of_day, of_month = day_key(scope, day), month_key(scope, month)
    if age <= 1 or redis.call('EXISTS', of_day) == 1 then add(of_day, KEEP_DAY, 't', tokens, 'c', cost) end
    if age <= OLDEST or redis.call('EXISTS', of_month) == 1 then add(of_month, KEEP_MONTH, 'c', cost) end
  end
  local minute = math.floor(time_of(which) / 60000)
  if minute * 60 > now - KEEP_MINUTES then
    local field = string.format('%d:%s:%s', minute, day, month)
    add(base .. ':s:' .. math.floor(minute / 60), KEEP_MINUTES, field .. ':t', tokens, field .. ':c', cost)
  end
end

local function drop(which, hold)
  local tokens, cost, second, day, month, scopes = unpack(hold)
  redis.call('HDEL', holds, which)
  redis.call('ZREM', leases, which)
  for _, scope in ipairs(scopes) do
    if second ~= ASIDE and redis.call('HINCRBY', live, scope, -1) <= 0 then redis.call('HDEL', live, scope) end
    hold_in_window(scope, second, -tokens)
    add(day_key(scope, day), KEEP_DAY, 'ht', -tokens, 'hc', -cost)
    add(month_key(scope, month), KEEP_MONTH, 'hc', -cost)
  end
end

local function bury(which, how) redis.call('SET', tombstone .. which, how, 'EX', KEEP_TOMBSTONE) end

-- ARGV: used tokens, used cost, day, month, scopes…
-- Returns 1 in place of its hold, 2 settled before, 3 without a hold, UNKNOWN, STALE.
--
-- A call that was closed in an older epoch is in the sums that this one began with, or was put back into it. Only its
-- hold can tell that it was still running then.
local function settle()
  if not marker then return UNKNOWN end
  local hold = hold_of(id)
  if believed ~= marker and not hold then return STALE end
  local tokens, cost, day, month = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], ARGV[8]
  local grave = redis.call('GET', tombstone .. id)
  if grave == 'settled' then return 2 end
  local scopes = hold and hold[6] or {unpack(ARGV, 9)}
  if hold then
    drop(id, hold)
    day, month = hold[4], hold[5]
    for _, scope in ipairs(scopes) do correct_window(scope, hold[3], 0, tokens - hold[1]) end
  elseif not grave then
    for _, scope in ipairs(scopes) do restore_window(scope, math.floor(time_of(id) / 1000), 1, tokens) end
  end
  book(id, scopes, day, month, tokens, cost)
  bury(id, 'settled')
  redis.call('ZREM', reaped, id)
  return hold and 1 or 3
end

if verb == 'settle' then return settle() end

local function take_in(which, hold, lease)
  local tokens, cost, second, day, month, scopes = unpack(hold)
  put(which, hold, lease)
  for _, scope in ipairs(scopes) do
    if second ~= ASIDE then redis.call('HINCRBY', live, scope, 1) end
    hold_in_window(scope, second, tokens)
    add(day_key(scope, day), KEEP_DAY, 'ht', tokens, 'hc', cost)
    add(month_key(scope, month), KEEP_MONTH, 'hc', cost)
  end
end

-- Free holds whose lease has ended: their owners are dead, or have forgotten them. Returns their ids.
local function reap(most)
  local expired = redis.call('ZRANGEBYSCORE', leases, '-inf', string.format('%.3f', now), 'LIMIT', 0, most)
  for _, which in ipairs(expired) do
    local hold = hold_of(which)
    if hold then drop(which, hold) else redis.call('ZREM', leases, which) end
    bury(which, 'reaped:' .. (hold and hold[3] or 0))
    redis.call('ZADD', reaped, now, which)
  end
  if #expired > 0 then redis.call('EXPIRE', reaped, 2 * KEEP_REAPED) end
  return expired
end

-- ARGV: lease, used tokens, used cost, tokens, cost, day, month, then scopes and limits; from "tokens" on as it was
-- opened. Returns 1 renewed, 2 taken in again although its lease had ended, 0 over or no room any more, UNKNOWN, STALE.
--
-- A hold that was reaped while its owner slept takes its room again only where every limit still has it. Its place in
-- the last minute was never given up.
local function renew()
  if believed ~= marker then return marker and STALE or UNKNOWN end
  local lease, used_tokens, used_cost = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
  local hold = hold_of(id)
  if hold then
    hold[7], hold[8] = used_tokens, used_cost
    put(id, hold, now + lease)
    return 1
  end
  local grave = redis.call('GET', tombstone .. id) or 'reaped:0'
  local second = tonumber(grave:match('^reaped:(%-?%d+)'))
  if not second then return 0 end
  local tokens, cost, day, month, scopes = tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10], ARGV[11], {}
  for i = 12, #ARGV, 7 do
    scopes[#scopes + 1] = ARGV[i]
    local after = with(state(ARGV[i], day, month, false), tokens, cost)
    for limit = second == ASIDE and 4 or 3, 6 do
      local cap = tonumber(ARGV[i + limit])
      if cap and after[limit] > cap then return 0 end
    end
  end
  take_in(id, {tokens, cost, second, day, month, scopes, used_tokens, used_cost}, now + lease)
  redis.call('DEL', tombstone .. id)
  redis.call('ZREM', reaped, id)
  return 2
end

-- Take in a hold that is a fact, whether there is room or not. Returns 1 it was there, 2 taken in, 0 it is over.
local function force(which, hold, lease)
  if hold_of(which) then
    redis.call('ZADD', leases, lease, which)
    return 1
  end
  local grave = redis.call('GET', tombstone .. which)
  if grave == 'settled' or grave == 'freed' then return 0 end
  local second = grave and tonumber(grave:match('^reaped:(%-?%d+)'))
  if second then
    redis.call('DEL', tombstone .. which)
    redis.call('ZREM', reaped, which)
  else
    second = math.floor(time_of(which) / 1000)
    for _, scope in ipairs(hold[6]) do restore_window(scope, second, 1, hold[1]) end
  end
  hold[3] = second
  take_in(which, hold, lease)
  return 2
end

-- ARGV: lease, tokens, cost, day, month, scopes…: a hold that was opened while we were away. Returns as force does.
local function enter()
  if believed ~= marker then return marker and STALE or UNKNOWN end
  return force(id, {tonumber(ARGV[6]), tonumber(ARGV[7]), 0, ARGV[8], ARGV[9], {unpack(ARGV, 10)}, 0, 0}, now + ARGV[5])
end

-- Returns 1 when there was a hold to give back, 0 when there was none, UNKNOWN.
local function release()
  if not marker then return UNKNOWN end
  local hold = hold_of(id)
  if believed ~= marker and not hold then return STALE end
  if redis.call('GET', tombstone .. id) == 'settled' then return 0 end
  bury(id, 'freed')
  redis.call('ZREM', reaped, id)
  if not hold then return 0 end
  drop(id, hold)
  for _, scope in ipairs(hold[6]) do correct_window(scope, hold[3], -1, -hold[1]) end
  return 1
end

-- ARGV: tokens, cost (both signed), day, month, scopes…: what a person booked. Returns 1, 2 booked before, UNKNOWN, STALE.
local function correct()
  if believed ~= marker then return marker and STALE or UNKNOWN end
  if redis.call('EXISTS', tombstone .. id) == 1 then return 2 end
  book(id, {unpack(ARGV, 9)}, ARGV[7], ARGV[8], tonumber(ARGV[5]), tonumber(ARGV[6]))
  bury(id, 'settled')
  return 1
end

-- ARGV: lease, packed closed calls {id, tokens, cost, day, month, scopes}, packed live ones, alike. Part of a rebuild:
-- what an owner knows and the statements do not. Saying it twice changes nothing.
local function put_back()
  local ids = {}
  for _, call in ipairs(cmsgpack.unpack(ARGV[6])) do
    local which, tokens, cost, day, month, scopes = unpack(call)
    if redis.call('EXISTS', tombstone .. which) == 0 then
      local second = math.floor(time_of(which) / 1000)
      for _, scope in ipairs(scopes) do restore_window(scope, second, 1, tokens) end
      book(which, scopes, day, month, tokens, cost)
      bury(which, 'settled')
      redis.call('SADD', base .. ':back', which)
    end
  end
  for _, call in ipairs(cmsgpack.unpack(ARGV[7])) do
    local which, tokens, cost, day, month, scopes = unpack(call)
    force(which, {tokens, cost, 0, day, month, scopes, 0, 0}, now + ARGV[5])
  end
  for _, name in ipairs({':holds', ':leases', ':live', ':back'}) do redis.call('EXPIRE', base .. name, KEEP_UNLOADED) end
  return 1
end

-- ARGV: packed {days {scope, day, tokens, cost}, months {scope, month, cost}, seconds {scope, second, requests, tokens}},
-- valid until. The end of a rebuild: adds what the statements say and lets the epoch count. Returns 1, 0 when it was
-- loaded before, -1 when it comes too late: another epoch may have begun.
local function load()
  if now > tonumber(ARGV[6]) then return -1 end
  if redis.call('SET', base .. ':loaded', '1', 'NX', 'EX', KEEP_MONTH) then
    local days, months, seconds = unpack(cmsgpack.unpack(ARGV[5]))
    for _, sums in ipairs(days) do add(day_key(sums[1], sums[2]), KEEP_DAY, 't', sums[3], 'c', sums[4]) end
    for _, sums in ipairs(months) do add(month_key(sums[1], sums[2]), KEEP_MONTH, 'c', sums[3]) end
    for _, sums in ipairs(seconds) do restore_window(sums[1], sums[2], sums[3], sums[4]) end
  elseif marker == believed then
    return 0
  end
  for _, name in ipairs({':holds', ':leases', ':live'}) do redis.call('PERSIST', base .. name) end
  redis.call('DEL', base .. ':back')
  if marker and marker ~= believed then
    for _, name in ipairs({':holds', ':leases', ':live', ':reaped', ':loaded'}) do
      redis.call('UNLINK', prefix .. ':' .. marker .. name)
    end
  end
  redis.call('SET', prefix .. ':epoch', believed)
  return 1
end

-- ARGV: scope, day, month. Returns the scope's state, and whether there is a counter of that day.
local function usage()
  local found = state(ARGV[5], ARGV[6], ARGV[7], true)
  found[11] = redis.call('EXISTS', day_key(ARGV[5], ARGV[6]))
  return found
end

-- ARGV: day, month, minute. Returns {epoch, tokens of the day, cost of the day, cost of the month}: what the team has
-- settled, without calls whose ids are of that minute or later.
local function settled_before()
  local day, month, from = ARGV[5], ARGV[6], tonumber(ARGV[7])
  local d, m = numbers(day_key('team', day), 't', 'c'), numbers(month_key('team', month), 'c')
  local sums = {d[1], d[2], m[1]}
  for hour = math.floor(from / 60), math.floor(now / 3600) + 1 do
    local fields = redis.call('HGETALL', base .. ':s:' .. hour)
    for i = 1, #fields, 2 do
      local minute, of_day, of_month, kind = fields[i]:match('^(%d+):(%d+):(%d+):(%a)$')
      if tonumber(minute) >= from then
        local later = tonumber(fields[i + 1])
        if of_day == day then
          local place = kind == 't' and 1 or 2
          sums[place] = sums[place] - later
        end
        if of_month == month and kind == 'c' then sums[3] = sums[3] - later end
      end
    end
  end
  return {marker or '', unpack(sums)}
end

-- ARGV: the most to free. Returns {those freed now, those freed within the last hour whose calls are still unsettled},
-- UNKNOWN, STALE.
local function sweep()
  if believed ~= marker then return marker and STALE or UNKNOWN end
  redis.call('ZREMRANGEBYSCORE', reaped, '-inf', now - KEEP_REAPED)
  local expired = reap(tonumber(ARGV[5]))
  return {expired, redis.call('ZRANGE', reaped, 0, tonumber(ARGV[5]))}
end

if verb == 'renew' then return renew() end
if verb == 'enter' then return enter() end
if verb == 'release' then return release() end
if verb == 'correct' then return correct() end
if verb == 'sweep' then return sweep() end
if verb == 'put_back' then return put_back() end
if verb == 'backs' then return redis.call('SMEMBERS', prefix .. ':' .. believed .. ':back') end
if verb == 'load' then return load() end
if verb == 'settled_before' then return settled_before() end
if verb == 'ping' then return math.floor(now * 1000) end
return usage()
