# Blocks of the KV cache on their way from one engine to another: leases, descriptions, and the wire.
