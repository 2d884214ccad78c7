-- The rates of one team: requests and tokens of the last minute, and slots of running calls, drawn by owners (processes).
-- One command of one owner: it states what has changed, asks for what its waiting calls need, each all or nothing, and
-- for slices above that, from which it will admit calls by itself. All in one atomic step.
--
-- KEYS[1]   what this owner was last answered, packed; its first element is the command's number
-- KEYS[2i]  hash, the minute of scope i. A bucket is a quarter of a second of unix time. rB, tB: requests and tokens of
--           bucket B; hB: those of tB that running calls or slices hold; r, t, h: sums of the buckets that count;
--           at: the last bucket that was seen
-- KEYS[2i + 1]  hash, the slots of scope i: owner -> "slots until", until in unix ms
-- ARGV[1]   packed (rate_words.py, Command): number, unix seconds or -1 for the server's, living owners, owner,
--           scopes: each {cap of requests, of tokens, of slots (-1: none), slots kept, wanted above the needs: requests,
--           tokens, slots, changes: each {bucket, requests, tokens, held}},
--           needs: each {tokens, scopes…}
-- Returns   packed (Answer): number, unix seconds, bucket in which the needs count, 1 if the owner was known,
--           scopes: each {requests, tokens, held, slots; drawn above the needs: requests, tokens, slots},
--           refusals, one for each need, empty if it was granted: each {scope, limit, used, seconds or -1}
--
-- A command may be said twice: the second time it is answered as the first. One that is older than the last does
-- nothing. What is drawn above the needs counts in the next bucket: it must be used, or given back, before that ends.

local BUCKETS = 4            -- in a second
local WINDOW = 60 * BUCKETS  -- a bucket counts while so many later ones have begun, and one more: it has lasted itself
local KEEP = 120             -- seconds; more than anything counts
local SLOTS = 30000          -- ms that slots stay without being stated again

-- What somebody else has written to a key of ours is gone, and the key begins anew.
local function read(none, verb, key, ...)
  local found = redis.pcall(verb, key, ...)
  if type(found) ~= 'table' or not found.err then return found end
  redis.call('DEL', key)
  return none
end

local number, now, owners, owner, scopes, needs = unpack(cmsgpack.unpack(ARGV[1]))
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

local function read_cells(s, names)
  if #names == 0 then return end
  local found = redis.call('HMGET', s.minute, unpack(names))
  for i, name in ipairs(names) do s.cells[name] = tonumber(found[i]) or 0 end
end

local function add(s, kind, where, change)
  local name, before = kind .. where, s.cells[kind .. where]
  s.cells[name] = math.max(0, before + change)
  s[kind] = s[kind] + s.cells[name] - before
end

-- The last minute of a scope, with what its owner says has changed in it.
local function read_minute(s, changes)
  local found = read({}, 'HMGET', s.minute, 'at', 'r', 't', 'h')
  s.at, s.r, s.t, s.h = tonumber(found[1]) or bucket, tonumber(found[2]) or 0, tonumber(found[3]) or 0, tonumber(found[4]) or 0
  if s.at - bucket >= WINDOW or bucket - s.at > WINDOW + 1 then -- another clock, or none of its buckets counts
    redis.call('DEL', s.minute)
    s.at, s.r, s.t, s.h = bucket, 0, 0, 0
  end
  local gone = {}
  for b = s.at - WINDOW, bucket - WINDOW - 1 do
    for _, kind in ipairs({'r', 't', 'h'}) do gone[#gone + 1] = kind .. b end
  end
  read_cells(s, gone)
  for _, name in ipairs(gone) do add(s, name:sub(1, 1), name:sub(2), -s.cells[name]) end
  s.at = math.max(s.at, bucket)
  local names = {}
  for _, change in ipairs(changes) do
    change[1] = math.min(change[1], s.at + 1)
    for _, kind in ipairs({'r', 't', 'h'}) do names[#names + 1] = kind .. change[1] end
  end
  for b = bucket, bucket + 1 do
    for _, kind in ipairs({'r', 't', 'h'}) do names[#names + 1] = kind .. b end
  end
  read_cells(s, names)
  for _, change in ipairs(changes) do
    if change[1] >= s.at - WINDOW then
      for i, kind in ipairs({'r', 't', 'h'}) do add(s, kind, change[1], change[i + 1]) end
    end
  end
end

local function read_slots(s)
  local entries = read({}, 'HGETALL', s.slots)
  for i = 1, #entries, 2 do
    local count, till = entries[i + 1]:match('^(%d+) (%d+)$')
    if entries[i] == owner then
      s.was_known = true
    elseif not till or tonumber(till) <= now * 1000 then
      redis.call('HDEL', s.slots, entries[i])
    else
      s.n = s.n + tonumber(count)
    end
  end
end

-- Seconds until enough of the oldest buckets have left the minute.
local function wait(s, kind, surplus)
  local names = {}
  for b = s.at - WINDOW, s.at + 1 do
    if not s.cells[kind .. b] then names[#names + 1] = kind .. b end
  end
  read_cells(s, names)
  for b = s.at - WINDOW, s.at + 1 do
    surplus = surplus - s.cells[kind .. b]
    if surplus <= 0 then return (b + WINDOW + 1) / BUCKETS - now end
  end
  return WINDOW / BUCKETS
end

local function refusals_of(need, states)
  local refusals = {}
  for i = 2, #need do
    local s, tokens = states[need[i]], need[1]
    if s.caps[1] >= 0 and s.r + 1 > s.caps[1] then
      refusals[#refusals + 1] = {need[i], 1, s.r, wait(s, 'r', s.r + 1 - s.caps[1])}
    end
    if s.caps[2] >= 0 and s.t + tokens > s.caps[2] then -- running calls are in its way, or what was used
      local is_held = s.t - s.h + tokens <= s.caps[2]
      refusals[#refusals + 1] = {need[i], 2, s.t, is_held and -1 or wait(s, 't', s.t + tokens - s.caps[2])}
    end
    if s.caps[3] >= 0 and s.n + 1 > s.caps[3] then refusals[#refusals + 1] = {need[i], 3, s.n, -1} end
  end
  return refusals
end

local function take(s, where, requests, tokens, slots)
  if s.is_counted then
    add(s, 'r', where, requests)
    add(s, 't', where, tokens)
    add(s, 'h', where, tokens)
  end
  s.n, s.mine = s.n + slots, s.mine + slots
end

-- Of what a slice asks for: so much that all owners could draw as much, and half would still be left.
local function spare(s, limit, used, wanted)
  if s.is_full or s.caps[limit] < 0 then return 0 end
  return math.max(0, math.min(wanted, math.floor((s.caps[limit] - used) / (2 * owners))))
end

local function write(s)
  if s.is_counted then
    local kept, gone = {'at', s.at, 'r', s.r, 't', s.t, 'h', s.h}, {}
    for name, count in pairs(s.cells) do
      if count == 0 then
        gone[#gone + 1] = name
      else
        kept[#kept + 1] = name
        kept[#kept + 1] = count
      end
    end
    redis.call('HSET', s.minute, unpack(kept))
    if #gone > 0 then redis.call('HDEL', s.minute, unpack(gone)) end
    redis.call('EXPIRE', s.minute, KEEP)
  end
  if s.mine > 0 then
    redis.call('HSET', s.slots, owner, string.format('%d %d', s.mine, now * 1000 + SLOTS))
    redis.call('EXPIRE', s.slots, KEEP)
  elseif s.was_known then
    redis.call('HDEL', s.slots, owner)
  end
end

local states, refused, told = {}, {}, {}
for i, of in ipairs(scopes) do
  local caps = {of[1], of[2], of[3]}
  local s = {minute = KEYS[2 * i], slots = KEYS[2 * i + 1], caps = caps, cells = {}, r = 0, t = 0, h = 0}
  s.n, s.mine, s.is_counted = of[4], of[4], of[1] >= 0 or of[2] >= 0
  if s.is_counted then read_minute(s, of[8]) end
  if of[3] >= 0 then read_slots(s) end
  states[i] = s
end
for i, need in ipairs(needs) do
  refused[i] = refusals_of(need, states)
  for _, refusal in ipairs(refused[i]) do states[refusal[1]].is_full = true end
  for j = 2, #refused[i] == 0 and #need or 1 do
    local s = states[need[j]]
    take(s, bucket, 1, need[1], s.caps[3] >= 0 and 1 or 0)
  end
end
for i, of in ipairs(scopes) do
  local s = states[i]
  local r, t, n = spare(s, 1, s.r, of[5]), spare(s, 2, s.t, of[6]), spare(s, 3, s.n, of[7])
  take(s, bucket + 1, r, t, n)
  write(s)
  told[i] = {s.r, s.t, s.h, s.n, r, t, n}
end
local answer = cmsgpack.pack({number, now, bucket, last and 1 or 0, told, refused})
redis.call('SET', KEYS[1], answer, 'EX', KEEP)
return answer
