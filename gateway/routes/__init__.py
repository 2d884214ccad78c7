# Decode, call one use case, encode: one file per resource.
