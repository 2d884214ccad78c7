# Clients of upstreams: pooled connections, one attempt over HTTP, the table of providers.
