# Blocks of the KV cache: which sequence holds which, prefix hashes, eviction, the copy in host memory.
