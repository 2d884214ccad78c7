# What alembic runs for every command: one transaction for the whole move, under a lock that lets one process through.

from __future__ import annotations

from alembic import context
from sqlalchemy import text

import gateway.storage.tables  # noqa: F401  (registers its tables)
from billing.ledger.tables import metadata

LOCK = 0x746F6C6C  # "toll": an advisory lock's number, ours by custom
# While a change waits for its table, all others wait behind it: it gives up soon, and `tollgate migrate` tries again.
PATIENCE = "1s"

connection = context.config.attributes["connection"]
connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
connection.execute(text(f"SET LOCAL lock_timeout = '{PATIENCE}'"))
context.configure(connection=connection, target_metadata=metadata, compare_server_default=True)
with context.begin_transaction():
    context.run_migrations()
