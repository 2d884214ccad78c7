# Databases of a test's own, without making one for each: where a test leaves nothing but rows behind, the next one gets
# its database, emptied. Copying the template and making a ledger's first partitions takes 200 ms of CPU, emptying 5.

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import asyncpg

from billing.ledger.partitions import ensure_partitions
from gateway.core.clock import Clock
from gateway.storage.database import Database
from tests.support.clock import SetClock
from tests.support.servers import database_of_its_own

WORN = 1000  # rows that were deleted, after which a database is given up: where they lay would change plans
GONE_WITHIN = 0.2  # seconds after a test in which its connections end

# What differs as soon as something was made, changed or dropped but rows, and that of every copy of the template.
SCHEMA = """
    SELECT ARRAY[(SELECT sum(oid::bigint) FROM pg_class WHERE oid >= 16384),
                 (SELECT sum(oid::bigint) FROM pg_constraint WHERE oid >= 16384),
                 (SELECT sum(oid::bigint) FROM pg_trigger WHERE oid >= 16384),
                 (SELECT sum(oid::bigint) FROM pg_proc WHERE oid >= 16384),
                 (SELECT count(*) FROM pg_attribute WHERE attrelid >= 16384 AND NOT attisdropped)]
"""
TABLES = """
    SELECT oid::regclass::text FROM pg_class
    WHERE relkind IN ('r', 'p') AND NOT relispartition AND oid >= 16384 AND relname <> 'alembic_version'
"""
OTHERS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
FROM_THE_START = "SELECT setval(seqrelid, seqstart, false) FROM pg_sequence"


class Databases:
    """Lends databases, each to one test at a time: on the newest schema, without a row, and with the partitions that a
    ledger has after its first one, for today and for the day of ``SetClock``."""

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._runner = asyncio.Runner()
        self._free: list[_Kept] = []

    @contextmanager
    def lend(self) -> Iterator[str]:
        """Give the URL of one. Nobody else gets it after a test that left a connection, a change of the schema or
        many rows: it is gone."""
        kept = self._free.pop() if self._free else self._make()
        try:
            yield kept.url
        finally:
            if self._runner.run(kept.empty()):
                self._free.append(kept)
            else:
                self._drop(kept)

    def close(self) -> None:
        """Drop what is there."""
        for kept in self._free:
            self._drop(kept)
        self._runner.close()

    def _make(self) -> _Kept:
        stack = ExitStack()
        url = stack.enter_context(database_of_its_own(self._server_url))
        return self._runner.run(_open(url, stack))

    def _drop(self, kept: _Kept) -> None:
        kept.connection.terminate()
        kept.dropping.close()


@dataclass
class _Kept:
    """A database, and a way into it that stays open."""

    url: str
    dropping: ExitStack
    connection: asyncpg.Connection
    schema: list[int]
    emptying: str
    deleted: int = field(default=0, init=False)

    async def empty(self) -> bool:
        """Delete all rows; return whether the database is as new."""
        try:
            for _ in range(round(GONE_WITHIN / 0.01)):
                if not await self.connection.fetchval(OTHERS):
                    break
                await asyncio.sleep(0.01)
            else:
                return False
            if await self.connection.fetchval(SCHEMA) != self.schema:
                return False
            self.deleted += await self.connection.fetchval(self.emptying)
            await self.connection.execute(FROM_THE_START)
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):  # a test ended our connection, too
            return False
        return self.deleted <= WORN


async def _open(url: str, dropping: ExitStack) -> _Kept:
    database = Database(url, pool_size=1)
    async with database.begin() as opened:
        for clock in (Clock(), SetClock()):
            await ensure_partitions(opened, clock.today())
    await database.close()
    connection = await asyncpg.connect(url)
    tables = [row[0] for row in await connection.fetch(TABLES)]
    parts = ", ".join(f"part_{i} AS (DELETE FROM {name} RETURNING 1)" for i, name in enumerate(tables))
    counts = " + ".join(f"(SELECT count(*) FROM part_{i})" for i in range(len(tables)))
    await connection.execute("SET session_replication_role = replica")  # in whatever order, foreign keys or not
    schema = await connection.fetchval(SCHEMA)
    return _Kept(url, dropping, connection, schema, f"WITH {parts} SELECT {counts}")
