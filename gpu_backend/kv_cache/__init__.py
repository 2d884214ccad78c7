# Blocks of the KV cache: who holds which, prefix hashes, eviction, the copy in host memory.
