-- The lease of the one controller: taken where it is free, prolonged by its owner. Returns who has it now.
-- KEYS[1]: the lease. ARGV[1]: who asks. ARGV[2]: milliseconds for which it is then theirs.
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then
    return owner
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
