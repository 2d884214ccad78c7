# How calls live with upstreams that fail: breakers, cooldowns, retries, deadlines.
