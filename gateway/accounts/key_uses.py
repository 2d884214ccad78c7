# When each key was last used, written behind the calls: of a key in use, one row is updated about once a minute by all
# processes together. It is for people who clean up; no decision rests on it, and a crash may lose a minute.

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import structlog
from sqlalchemy import text

from billing.core.store_errors import POSTGRES_AWAY
from gateway.core.clock import Clock
from gateway.storage.database import Database

EVERY = 60.0  # seconds between writes; what is newer than the row by less is not written
MOST = 50_000  # keys that wait while Postgres is away

log = structlog.get_logger(__name__)


class KeyUses:
    """The keys that were used here and are not written yet."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._used: dict[str, float] = {}  # unix seconds

    def note(self, key_id: str) -> None:
        """Note that a key is used now."""
        if len(self._used) < MOST or key_id in self._used:
            self._used[key_id] = self._clock.now()

    async def run(self) -> None:
        """Write what was used, for ever."""
        while True:
            await asyncio.sleep(EVERY)
            try:
                await self.flush()
            except POSTGRES_AWAY as exc:
                log.warning("key_uses_wait", waiting=len(self._used), error=repr(exc))

    async def flush(self) -> None:
        """Write what was used. Raises one of POSTGRES_AWAY; it waits on."""
        used, self._used = self._used, {}
        if not used:
            return
        moments = [datetime.fromtimestamp(moment, UTC) for moment in used.values()]
        try:
            values = {"ids": list(used), "moments": moments, "every": EVERY}
            async with self._database.at_once() as connection:
                for query in WRITE:
                    await connection.execute(query, values)
        except POSTGRES_AWAY:
            self._used = {**used, **self._used}
            raise


# A row that another process writes at this moment is passed by.
WRITE = [
    text(f"""
        UPDATE {table} SET last_used_at = used.at
        FROM (
            SELECT id, used.at FROM {table}
            JOIN unnest(CAST(:ids AS text[]), CAST(:moments AS timestamptz[])) AS used (id, at) USING (id)
            WHERE coalesce(last_used_at, '-infinity') < used.at - make_interval(secs => :every)
            FOR NO KEY UPDATE OF {table} SKIP LOCKED
        ) AS used
        WHERE {table}.id = used.id
    """)  # noqa: S608  (the names are ours)
    for table in ("api_keys", "admin_keys")
]
