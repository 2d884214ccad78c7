-- What gateways tell each other of upstreams: reports of what they counted, conditions of breakers, what is in
-- cooldown, and how many probes are out. The rules are breaker.py's; here things are only kept, and the newer one wins.
--
-- KEYS[1]  the prefix; every key below starts with it, so that all of them live in one slot of a cluster
-- ARGV[1]  verb
-- ARGV[2]  JSON
--
--   PREFIX:conditions   hash    target -> JSON {g generation, open, forced, by_hand, opened_at, retry_at, reason};
--                               unix seconds of this server
--   PREFIX:r:TARGET     hash    gateway -> JSON {at, report}: what it counted lately; the report is not read here
--   PREFIX:failing      zset    targets with failures at any gateway, by when that was last said
--   PREFIX:aside        hash    name -> JSON {until, why}
--   PREFIX:p:TARGET     zset    tokens of the probes that are out, by when their lease ends
--   PREFIX:good:TARGET:GENERATION  string  how many probes were answered
--
-- sync   {gateway, fresh, reports: [[target, has failures, report]], conditions: {target: {g, open, forced, by_hand,
--        opened_ago, retry_in, reason}}, asides: [[name, seconds, why]]} -> {conditions, reports: {target: [[gateway,
--        report]]}, asides}; moments come back as seconds from now
-- probe  {target, g, most, lease, token} -> 1 or 0
-- probed {target, g, token, good} -> how many were answered

local prefix, verb, said = KEYS[1], ARGV[1], cjson.decode(ARGV[2])
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local KEEP_REPORTS = 60     -- seconds
local KEEP_GOOD = 3600      -- seconds

local function condition_of(target)
  local kept = redis.call('HGET', prefix .. ':conditions', target)
  return kept and cjson.decode(kept)
end

if verb == 'probe' then
  local kept = condition_of(said.target)
  if not kept or kept.g ~= said.g or not kept.open then return 0 end
  local key = prefix .. ':p:' .. said.target
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  if not redis.call('ZSCORE', key, said.token) and redis.call('ZCARD', key) >= said.most then return 0 end
  redis.call('ZADD', key, now + said.lease, said.token)
  redis.call('EXPIRE', key, math.ceil(said.lease) + 60)
  return 1
end

if verb == 'probed' then
  local was_out = redis.call('ZREM', prefix .. ':p:' .. said.target, said.token)
  local key = prefix .. ':good:' .. said.target .. ':' .. said.g
  if said.good and was_out == 1 then
    redis.call('INCR', key)
    redis.call('EXPIRE', key, KEEP_GOOD)
  end
  return tonumber(redis.call('GET', key) or 0)
end

-- sync

for _, one in ipairs(said.reports) do
  local target, has_failures, report = one[1], one[2], one[3]
  local key = prefix .. ':r:' .. target
  redis.call('HSET', key, said.gateway, cjson.encode({at = now, report = report}))
  redis.call('EXPIRE', key, KEEP_REPORTS)
  if has_failures then redis.call('ZADD', prefix .. ':failing', now, target) end
end

for target, offered in pairs(said.conditions) do
  local kept = condition_of(target)
  local generation = offered.g
  if kept and offered.by_hand and generation <= kept.g then generation = kept.g + 1 end
  if not kept or (generation > kept.g and (offered.by_hand or not kept.forced)) then
    redis.call('HSET', prefix .. ':conditions', target, cjson.encode({
      g = generation, open = offered.open, forced = offered.forced, by_hand = offered.by_hand,
      opened_at = now - offered.opened_ago, retry_at = now + offered.retry_in, reason = offered.reason,
    }))
    redis.call('DEL', prefix .. ':r:' .. target, prefix .. ':p:' .. target)
    redis.call('ZREM', prefix .. ':failing', target)
  end
end

for _, one in ipairs(said.asides) do
  local name, seconds, why = one[1], one[2], one[3]
  if seconds > 0 then
    redis.call('HSET', prefix .. ':aside', name, cjson.encode({['until'] = now + seconds, why = why}))
  else
    redis.call('HDEL', prefix .. ':aside', name)
  end
end

local conditions, reports, asides = {}, {}, {}

local kept = redis.call('HGETALL', prefix .. ':conditions')
for i = 1, #kept, 2 do
  local one = cjson.decode(kept[i + 1])
  one.opened_ago, one.retry_in = now - one.opened_at, one.retry_at - now
  one.opened_at, one.retry_at = nil, nil
  conditions[#conditions + 1] = {kept[i], one}
end

redis.call('ZREMRANGEBYSCORE', prefix .. ':failing', '-inf', now - said.fresh)
for _, target in ipairs(redis.call('ZRANGE', prefix .. ':failing', 0, -1)) do
  local from = {}
  local all = redis.call('HGETALL', prefix .. ':r:' .. target)
  for i = 1, #all, 2 do
    local one = cjson.decode(all[i + 1])
    if one.at <= now - said.fresh then
      redis.call('HDEL', prefix .. ':r:' .. target, all[i])
    elseif all[i] ~= said.gateway then
      from[#from + 1] = one.report
    end
  end
  reports[#reports + 1] = {target, from}
end

local all = redis.call('HGETALL', prefix .. ':aside')
for i = 1, #all, 2 do
  local one = cjson.decode(all[i + 1])
  if one['until'] > now then
    asides[#asides + 1] = {all[i], one['until'] - now, one.why}
  else
    redis.call('HDEL', prefix .. ':aside', all[i])
  end
end

-- cjson writes an empty table as an object; a list that may be empty is told by how many it has.
local function list(of) return #of > 0 and cjson.encode(of) or '[]' end
for _, one in ipairs(reports) do if #one[2] == 0 then one[2] = cjson.null end end
return '[' .. list(conditions) .. ',' .. list(reports) .. ',' .. list(asides) .. ']'
