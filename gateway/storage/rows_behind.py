# Rows that are written behind the calls that they tell of: gathered, many a statement. What Postgres does not take
# waits; of more than a process can hold the oldest is dropped and counted. No call waits for any of it.

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import structlog
from sqlalchemy import Table
from sqlalchemy.dialects.postgresql import insert

from billing.core.store_errors import POSTGRES_AWAY
from gateway.storage.database import Database

TOGETHER = 0.2  # seconds that the first waits for others
AGAIN = 1.0  # seconds until Postgres is tried again
MOST = 10_000  # rows of one table that wait

T = TypeVar("T")

log = structlog.get_logger()


class WrittenBehind(Generic[T]):
    """What this process has not written yet. ``what`` it is, for the log and the metrics."""

    most = MOST  # of what waits, as ``_weight_of`` counts it
    at_once = 500  # that one statement writes

    def __init__(self, database: Database, what: str) -> None:
        self.lost = 0  # what found no room
        self.what = what
        self._database = database
        self._waiting: deque[T] = deque()
        self._weight = 0  # of these, and of what is being written
        self._one_at_a_time = asyncio.Lock()  # the process may end, and flush too
        self._news = asyncio.Event()

    def add(self, one: T) -> None:
        """Write it soon."""
        self._waiting.append(one)
        self._weight += self._weight_of(one)
        while self._weight > self.most:
            self._weight -= self._weight_of(self._waiting.popleft())
            self.lost += 1
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
        async with self._one_at_a_time:
            while self._waiting:
                some = [self._waiting.popleft() for _ in range(min(self.at_once, len(self._waiting)))]
                try:
                    await self._write(some)
                except BaseException:
                    self._waiting.extendleft(reversed(some))
                    raise
                self._weight -= sum(map(self._weight_of, some))
            self._news.clear()

    def _weight_of(self, one: T) -> int:
        return 1

    async def _write(self, some: Sequence[T]) -> None:
        raise NotImplementedError


class RowsBehind(WrittenBehind[dict[str, Any]]):
    """The rows of one table. All have the same columns."""

    def __init__(self, database: Database, table: Table, what: str) -> None:
        super().__init__(database, what)
        self._insert = insert(table).on_conflict_do_nothing()

    async def _write(self, some: Sequence[dict[str, Any]]) -> None:
        async with self._database.begin() as connection:
            await connection.execute(self._insert, some)
