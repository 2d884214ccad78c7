# Rows that are written behind the calls that they tell of: gathered, many a statement. What Postgres does not take
# waits; of more than a process can hold the oldest is dropped and counted. No call waits for any of it.

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import structlog
from sqlalchemy import Table
from sqlalchemy.dialects.postgresql import insert

from billing.core.store_errors import POSTGRES_AWAY
from gateway.storage.database import Database

MOST = 10_000  # rows that wait
AT_ONCE = 500  # that one statement writes
TOGETHER = 0.2  # seconds that the first waits for others
AGAIN = 1.0  # seconds until Postgres is tried again

log = structlog.get_logger()


class RowsBehind:
    """The rows of one table that this process has not written yet. ``what`` they are, for the log and the metrics."""

    def __init__(self, database: Database, table: Table, what: str) -> None:
        self.lost = 0  # rows that found no room
        self._database = database
        self._insert = insert(table).on_conflict_do_nothing()
        self.what = what
        self._waiting: deque[dict[str, Any]] = deque()
        self._news = asyncio.Event()

    def add(self, row: dict[str, Any]) -> None:
        """Write a row soon. All rows of a table have the same columns."""
        if len(self._waiting) >= MOST:
            self._waiting.popleft()
            self.lost += 1
        self._waiting.append(row)
        self._news.set()

    async def run(self) -> None:
        """Write what comes, for ever."""
        while True:
            await self._news.wait()
            await asyncio.sleep(TOGETHER)
            try:
                await self.flush()
            except POSTGRES_AWAY as exc:
                log.warning(f"{self.what}_wait", waiting=len(self._waiting), error=repr(exc))
                await asyncio.sleep(AGAIN)

    async def flush(self) -> None:
        """Write everything that waits. Raises one of POSTGRES_AWAY; what was not written waits on."""
        while self._waiting:
            rows = [self._waiting[place] for place in range(min(AT_ONCE, len(self._waiting)))]
            async with self._database.begin() as connection:
                await connection.execute(self._insert, rows)
            for row in rows:
                if self._waiting and self._waiting[0] is row:
                    self._waiting.popleft()
        self._news.clear()
