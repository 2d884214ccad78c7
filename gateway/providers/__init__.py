# One file per wire format, and the one module that calls upstreams.
