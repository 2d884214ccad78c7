-- The rates of one team: requests and tokens of the last minute, and slots of running calls, drawn by owners (processes).
-- One command of one owner: it states what has changed, asks for what its waiting calls need, each all or nothing, and
-- for slices above that, from which it will admit calls by itself. All in one atomic step.
--
-- KEYS[1]   what this owner was last answered, packed; its first element is the command's number
-- KEYS[2i]  hash, the minute of scope i. A bucket is a quarter of a second of unix time.
--           bucket -> "requests tokens held": held are those of the tokens that running calls or slices hold
--           sums -> "last bucket seen, requests, tokens, held" of all buckets that count
-- KEYS[2i + 1]  hash, the slots of scope i: owner -> "slots until", until in unix ms
-- ARGV[1]   packed: number, unix seconds or -1 for the server's, living owners, owner,
--           scopes: each {{cap of requests, of tokens, of slots; -1: none}, slots of running calls,
--           tokens of each and number of the calls wanted above the needs, changes: each {bucket, requests, tokens, held}},
--           needs: each {tokens, scopes…}
-- Returns   packed (Answer): number, unix seconds, bucket in which the needs count, 1 if the owner was known,
--           scopes: each {requests, tokens, held, slots, slots of this owner; drawn above the needs: calls, their tokens},
--           refusals: for each need {scope, limit, seconds} of the limit that keeps it waiting longest, or zeros
--
-- A command may be said twice: the second time it is answered as the first. One that is older than the last does
-- nothing. What is drawn above the needs counts in the next bucket: it must be used, or given back, before that ends.

local BUCKETS = 4            -- in a second
local WINDOW = 60 * BUCKETS  -- a bucket counts while so many later ones have begun, and one more: it has lasted itself
local KEEP = 120             -- seconds; more than anything counts
local SLOTS = 30000          -- ms that slots stay without being stated again
local SOON = 1               -- seconds until another try, where running calls are in the way
local NEVER = 1e9

local number, now, owners, owner, scopes, needs = unpack(cmsgpack.unpack(ARGV[1]))

-- A key of ours that another program has written is deleted, and begins anew.
local function read(none, verb, key, ...)
  local found = redis.pcall(verb, key, ...)
  if type(found) ~= 'table' or not found.err then return found end
  redis.call('DEL', key)
  return none
end

local last = read(false, 'GET', KEYS[1])
if last then
  local is_ours, answer = pcall(cmsgpack.unpack, last)
  local heard = is_ours and type(answer) == 'table' and tonumber(answer[1]) or 0
  if heard == number then return last end
  if heard > number then return false end
end
if now < 0 then
  local time = redis.call('TIME')
  now = tonumber(time[1]) + tonumber(time[2]) / 1000000
end
local bucket = math.floor(now * BUCKETS)

local function fetch(s, from, to)
  local wanted = {}
  for b = from, to do
    if not s.cells[b] then wanted[#wanted + 1] = b end
  end
  if #wanted == 0 then return end
  for i, text in ipairs(redis.call('HMGET', s.minute, unpack(wanted))) do
    local r, t, h = (text or ''):match('^(%d+) (%d+) (%d+)$')
    s.cells[wanted[i]] = {tonumber(r) or 0, tonumber(t) or 0, tonumber(h) or 0}
  end
end

local function add(s, b, ...)
  if not s.cells[b] then fetch(s, b, b) end
  local cell = s.cells[b]
  for i = 1, 3 do
    local after = math.max(0, cell[i] + select(i, ...))
    s.sums[i], cell[i] = s.sums[i] + after - cell[i], after
  end
end

-- The last minute of a scope, with what its owner says has changed in it.
local function read_minute(s, changes)
  local sums = read({}, 'HMGET', s.minute, 'sums')[1] or ''
  local at, r, t, h = sums:match('^(%d+) (%d+) (%d+) (%d+)$')
  s.at, s.sums = tonumber(at) or 0, {tonumber(r), tonumber(t), tonumber(h)}
  if s.at - bucket >= WINDOW or bucket - s.at > WINDOW + 1 then -- another clock, or none of its buckets counts
    redis.call('DEL', s.minute)
    s.at, s.sums = bucket, {0, 0, 0}
  end
  local oldest = s.at - WINDOW
  s.at = math.max(s.at, bucket)
  fetch(s, oldest, s.at - WINDOW - 1)
  for b = oldest, s.at - WINDOW - 1 do add(s, b, -s.cells[b][1], -s.cells[b][2], -s.cells[b][3]) end
  for _, change in ipairs(changes) do
    local b = math.min(change[1], s.at + 1)
    if b >= s.at - WINDOW then add(s, b, change[2], change[3], change[4]) end
  end
end

local function read_slots(s)
  local entries = read({}, 'HGETALL', s.slots)
  for i = 1, #entries, 2 do
    local count, till = entries[i + 1]:match('^(%d+) (%d+)$')
    if not till or tonumber(till) <= now * 1000 then
      redis.call('HDEL', s.slots, entries[i])
    elseif entries[i] ~= owner then
      s.n = s.n + tonumber(count)
    end
  end
end

-- Seconds until so much of the oldest buckets has left the minute: of requests (1) or tokens (2).
local function wait(s, kind, surplus)
  fetch(s, s.at - WINDOW, s.at + 1)
  for b = s.at - WINDOW, s.at + 1 do
    surplus = surplus - s.cells[b][kind]
    if surplus <= 0 then return (b + WINDOW + 1) / BUCKETS - now end
  end
  return WINDOW / BUCKETS
end

-- Seconds for which a limit refuses so much more; nil where it fits.
local function refuses(s, limit, wanted)
  local cap, used = s.caps[limit], limit == 3 and s.n or s.sums[limit]
  if cap < 0 or used + wanted <= cap then return nil end
  if wanted > cap then return NEVER end
  if limit == 3 or limit == 2 and used - s.sums[3] + wanted <= cap then return SOON end
  return wait(s, limit, used + wanted - cap)
end

local function take(s, where, calls, tokens)
  if s.is_counted then add(s, where, calls, tokens, tokens) end
  if s.caps[3] >= 0 then s.n, s.mine = s.n + calls, s.mine + calls end
end

-- Of the calls that a slice is asked for: so many that all owners could draw as many, and half would still be left.
local function spare(s, calls, tokens)
  local each, used = {1, tokens, 1}, {s.sums[1], s.sums[2], s.n}
  for limit = 1, 3 do
    if s.caps[limit] >= 0 and each[limit] > 0 then
      calls = math.min(calls, math.floor((s.caps[limit] - used[limit]) / (2 * owners * each[limit])))
    end
  end
  return s.is_full and 0 or math.max(0, calls)
end

local function write(s)
  if s.is_counted then
    local kept, gone = {'sums', table.concat({s.at, unpack(s.sums)}, ' ')}, {}
    for b, cell in pairs(s.cells) do
      if cell[1] == 0 and cell[2] == 0 then
        gone[#gone + 1] = b
      else
        kept[#kept + 1] = b
        kept[#kept + 1] = table.concat(cell, ' ')
      end
    end
    redis.call('HSET', s.minute, unpack(kept))
    if #gone > 0 then redis.call('HDEL', s.minute, unpack(gone)) end
    redis.call('EXPIRE', s.minute, KEEP)
  end
  if s.mine > 0 then
    redis.call('HSET', s.slots, owner, string.format('%d %d', s.mine, now * 1000 + SLOTS))
    redis.call('EXPIRE', s.slots, KEEP)
  elseif s.caps[3] >= 0 then
    redis.call('HDEL', s.slots, owner)
  end
end

local states, refusals, told = {}, {}, {}
for i, said in ipairs(scopes) do
  local s = {minute = KEYS[2 * i], slots = KEYS[2 * i + 1], caps = said[1], cells = {}, sums = {0, 0, 0}}
  s.n, s.mine, s.is_counted = said[2], said[2], said[1][1] >= 0 or said[1][2] >= 0
  if s.is_counted then read_minute(s, said[5]) end
  if s.caps[3] >= 0 then read_slots(s) end
  states[i] = s
end
for i, need in ipairs(needs) do
  refusals[i] = {0, 0, 0}
  for j = 2, #need do
    local s = states[need[j]]
    for limit = 1, 3 do
      local seconds = refuses(s, limit, limit == 2 and need[1] or 1)
      s.is_full = s.is_full or seconds ~= nil
      if seconds and seconds > refusals[i][3] then refusals[i] = {need[j], limit, seconds} end
    end
  end
  for j = 2, refusals[i][3] == 0 and #need or 1 do take(states[need[j]], bucket, 1, need[1]) end
end
for i, said in ipairs(scopes) do
  local s = states[i]
  local calls = spare(s, said[4], said[3])
  take(s, bucket + 1, calls, calls * said[3])
  write(s)
  told[i] = {s.sums[1], s.sums[2], s.sums[3], s.n, s.mine, calls, calls * said[3]}
end
local answer = cmsgpack.pack({number, now, bucket, last and 1 or 0, told, refusals})
redis.call('SET', KEYS[1], answer, 'EX', KEEP)
return answer
