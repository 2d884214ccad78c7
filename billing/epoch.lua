-- Which epoch the counters belong to, and who rebuilds them. One hash that all owners (gateways and workers) share.
--
-- KEYS[1]  tollgate:epoch, a hash:
--            id        the epoch; a new one begins whenever Redis may have lost something
--            state     "gathering" while owners put back what they know, then "ready"
--            who       the owner who rebuilds; until: when its turn ends, unix seconds
--            since     when the books were lost, as far as known; ready_at: when it became ready, unix seconds by this clock
--            read_at   when the statements were read, unix seconds by Postgres's clock
--            run_id    the Redis server that this epoch was built in
--            wanted    why somebody asks for a new epoch
--            owner:ID  "PUTTING until" or "PUT until": an owner puts back, or has done so, and will flush nothing before
--                      that moment, unix seconds
-- ARGV[1]  verb; ARGV[2] the time in unix seconds, or "" for the server's own; the rest belongs to the verb
--
-- Times are written as text: a script's numbers would come back as whole seconds.

local key, verb = KEYS[1], ARGV[1]
local now = tonumber(ARGV[2])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) + tonumber(time[2]) / 1000000
end
local kind = redis.call('TYPE', key).ok
if kind ~= 'hash' and kind ~= 'none' then redis.call('DEL', key) end -- somebody else wrote there: the epoch is lost
local function text(seconds) return string.format('%.6f', seconds) end

-- Returns the time and every field.
local function look() return {text(now), redis.call('HGETALL', key)} end

-- ARGV: new id, the id that it follows ("" for none), who, turn in seconds. Returns 1 when it is our turn to rebuild.
local function start()
  local id, state, who, late, since = unpack(redis.call('HMGET', key, 'id', 'state', 'who', 'until', 'since'))
  if id == ARGV[3] and state == 'gathering' and who == ARGV[5] then return 1 end -- said twice
  if (id or '') ~= ARGV[4] then return 0 end
  if state == 'gathering' and who ~= ARGV[5] and now < tonumber(late) then return 0 end
  redis.call('DEL', key)
  redis.call('HSET', key, 'id', ARGV[3], 'state', 'gathering', 'who', ARGV[5], 'until', text(now + ARGV[6]),
    'since', state == 'gathering' and since or text(now))
  return 1
end

-- ARGV: id, who, turn in seconds. Returns 1 when it is still our turn, and prolongs it.
local function keep()
  local id, state, who = unpack(redis.call('HMGET', key, 'id', 'state', 'who'))
  if id ~= ARGV[3] or state ~= 'gathering' or who ~= ARGV[4] then return 0 end
  redis.call('HSET', key, 'until', text(now + ARGV[5]))
  return 1
end

-- ARGV: id, owner, until. Said before the first call is put back; an owner begins once in an epoch. Returns 1 if it may.
local function begin()
  local id, state, known = unpack(redis.call('HMGET', key, 'id', 'state', 'owner:' .. ARGV[4]))
  if known == 'PUTTING ' .. ARGV[5] then return 1 end -- said twice
  if id ~= ARGV[3] or state ~= 'gathering' or known or now >= tonumber(ARGV[5]) then return 0 end
  redis.call('HSET', key, 'owner:' .. ARGV[4], 'PUTTING ' .. ARGV[5])
  return 1
end

-- ARGV: id, owner. Everything that the owner knows is put back. Returns 1 if that is of use.
local function done()
  local id, state, known = unpack(redis.call('HMGET', key, 'id', 'state', 'owner:' .. ARGV[4]))
  if id ~= ARGV[3] or state ~= 'gathering' or not known then return 0 end
  redis.call('HSET', key, 'owner:' .. ARGV[4], (known:gsub('^PUTTING', 'PUT')))
  return 1
end

-- ARGV: id, who, read_at, run_id. The statements are read and loaded. Returns 1 when the epoch counts from now on; 0 when
-- an owner may have flushed before they were read, or somebody else rebuilds.
local function finish()
  local id, state, who = unpack(redis.call('HMGET', key, 'id', 'state', 'who'))
  if id ~= ARGV[3] or state ~= 'gathering' or who ~= ARGV[4] then return 0 end
  local fields = redis.call('HGETALL', key)
  for i = 1, #fields, 2 do
    if fields[i]:sub(1, 6) == 'owner:' then
      local moment = fields[i + 1]:match('^PUT (.+)$')
      if not moment or now >= tonumber(moment) then return 0 end
    end
  end
  redis.call('HSET', key, 'state', 'ready', 'ready_at', text(now), 'read_at', ARGV[5], 'run_id', ARGV[6])
  return 1
end

-- ARGV: id, why. Asks for a new epoch after this one.
local function want()
  if redis.call('HGET', key, 'id') ~= ARGV[3] then return 0 end
  redis.call('HSET', key, 'wanted', ARGV[4])
  return 1
end

if verb == 'look' then return look() end
if verb == 'start' then return start() end
if verb == 'keep' then return keep() end
if verb == 'begin' then return begin() end
if verb == 'done' then return done() end
if verb == 'finish' then return finish() end
return want()
