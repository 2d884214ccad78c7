-- Keeps one sealed answer of a scope (a team, or the teams that share) within a bound of bytes over all scopes.
--
-- KEYS[1]   what all keys begin with, and their hash tag: the answers of a deployment lie on one node of a cluster
-- ARGV      scope, name, sealed answer, ms to keep it, most bytes of all answers
-- Returns   1 if it is kept, 0 if it is there already or larger than all that may be kept
--
-- PREFIX:answer:SCOPE:NAME  string, one answer; it ends by itself
-- PREFIX:of:SCOPE           sorted set, "bytes:name" by the unix ms when it ends: what the scope has
-- PREFIX:bytes              sorted set, scope by its bytes
-- PREFIX:all                bytes of all scopes
--
-- An answer counts with what Redis needs beside it. One that has ended counts until its scope keeps another, or until it
-- would be next to make room: the bound is never passed, it may be kept too well. The scope with most makes room, its
-- soonest to end first, so that no team drives another's answers out by asking much.

local prefix, scope, name, sealed = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local ttl, most = tonumber(ARGV[4]), tonumber(ARGV[5])

local BESIDE = 400  -- bytes: two keys, an entry of a sorted set
local MOST_OUT = 1000  -- answers that make room for one

local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)

local function drop(whose, entry)
  local bytes, which = entry:match('^(%d+):(.*)$')
  redis.call('ZREM', prefix .. ':of:' .. whose, entry)
  redis.call('DEL', prefix .. ':answer:' .. whose .. ':' .. which)
  redis.call('ZINCRBY', prefix .. ':bytes', -bytes, whose)
  redis.call('DECRBY', prefix .. ':all', bytes)
end

for _, entry in ipairs(redis.call('ZRANGEBYSCORE', prefix .. ':of:' .. scope, '-inf', now, 'LIMIT', 0, MOST_OUT)) do
  drop(scope, entry)
end

local answer, bytes = prefix .. ':answer:' .. scope .. ':' .. name, #sealed + BESIDE
if bytes > most or redis.call('EXISTS', answer) == 1 then return 0 end

for _ = 1, MOST_OUT do
  if tonumber(redis.call('GET', prefix .. ':all') or 0) + bytes <= most then break end
  local largest = redis.call('ZREVRANGE', prefix .. ':bytes', 0, 0, 'WITHSCORES')
  if not largest[1] then  -- Redis has lost what it counted
    redis.call('DEL', prefix .. ':all')
    break
  end
  local oldest = redis.call('ZRANGE', prefix .. ':of:' .. largest[1], 0, 0)
  if oldest[1] then
    drop(largest[1], oldest[1])
  else  -- all of its answers have ended
    redis.call('ZREM', prefix .. ':bytes', largest[1])
    redis.call('DECRBY', prefix .. ':all', largest[2])
  end
end
if tonumber(redis.call('GET', prefix .. ':all') or 0) + bytes > most then return 0 end

local entry = bytes .. ':' .. name
redis.call('SET', answer, sealed, 'PX', ttl)
redis.call('ZADD', prefix .. ':of:' .. scope, now + ttl, entry)
redis.call('ZINCRBY', prefix .. ':bytes', bytes, scope)
redis.call('INCRBY', prefix .. ':all', bytes)
if redis.call('PTTL', prefix .. ':of:' .. scope) < ttl then redis.call('PEXPIRE', prefix .. ':of:' .. scope, ttl + 1000) end
return 1
