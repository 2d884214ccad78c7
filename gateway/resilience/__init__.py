# How calls live with upstreams that fail: breakers, what is set aside, retries and deadlines.
