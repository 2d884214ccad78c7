# Stores how items ended, those that end together in one transaction. The write is repeated until Postgres confirms it:
# it is idempotent.

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import structlog

from billing.core.store_errors import POSTGRES_AWAY, is_about_a_value
from gateway.batch.finishing import ItemResult, finish_items
from gateway.core.clock import Clock
from gateway.storage.database import Database
from protocol.errors import ServiceError

GATHER = 0.005  # seconds to wait for more that ends
MOST = 200  # items in one transaction
MOST_BYTES = 8 * 1024 * 1024  # of answers in one transaction; the last of them may go beyond
LONGEST_PAUSE = 2.0  # seconds between tries while Postgres is away
STORE_GRACE = 5.0  # seconds that an item which is being stored outlasts its worker's end


log = structlog.get_logger(__name__)


class Finisher:
    """Writes one worker's answers to the store. ``keep`` says for how many seconds they are kept."""

    def __init__(self, database: Database, clock: Clock, owner: str, keep: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self._keep = keep
        self._owner = owner
        self._ended: list[tuple[ItemResult, asyncio.Future[bool]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def store(self, ended: ItemResult) -> bool:
        """Store how an item ended; False when another worker has it now. While Postgres is away, this waits.

        The caller closes the call's accounting without an await: nothing is flushed and no counter rebuilt in between.
        Raises ServiceError for what can never be stored.
        """
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._ended.append((ended, answer))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_all())
        give_up = math.inf
        while True:
            try:
                return await asyncio.shield(answer)
            except asyncio.CancelledError:  # the worker ends; whether it was stored decides how the accounting closes
                give_up = min(give_up, time.monotonic() + STORE_GRACE)
                if time.monotonic() >= give_up:
                    answer.cancel()
                    raise

    async def _write_all(self) -> None:
        while self._ended:
            await asyncio.sleep(GATHER)
            count = _count_fitting([len(ended.response or b"") for ended, _ in self._ended[:MOST]])
            group, self._ended = self._ended[:count], self._ended[count:]
            await self._finish([(ended, answer) for ended, answer in group if not answer.done()])

    async def _finish(self, group: list[tuple[ItemResult, asyncio.Future[bool]]]) -> None:
        pause = 0.1
        while group:
            try:
                stored = await self._write([ended for ended, _ in group])
            except Exception as exc:
                if not isinstance(exc, POSTGRES_AWAY) or is_about_a_value(exc):
                    # Whatever is wrong with one of them: callers that wait for the others would wait for ever.
                    await self._isolate_faulty(group, exc)
                    return
                log.warning("batch_items_not_stored_yet", items=len(group), error=repr(exc))
                await asyncio.sleep(pause)
                pause = min(LONGEST_PAUSE, 2 * pause)
                continue
            for ended, answer in group:
                if not answer.done():
                    answer.set_result(ended.claim.name in stored)
            return

    async def _write(self, ends: list[ItemResult]) -> set[str]:
        async with self._database.begin() as connection:
            return await finish_items(connection, self._clock, self._owner, ends, self._keep())

    async def _isolate_faulty(self, group: list[tuple[ItemResult, asyncio.Future[bool]]], exc: Exception) -> None:
        if len(group) > 1:
            half = len(group) // 2
            await self._finish(group[:half])
            await self._finish(group[half:])
            return
        ended, answer = group[0]
        log.error("batch_item_rejected", batch_id=ended.claim.batch_id, position=ended.claim.position, error=repr(exc))
        if not answer.done():
            answer.set_exception(ServiceError("The answer cannot be stored.", headers={"x-should-retry": "false"}))


def _count_fitting(sizes: Sequence[int]) -> int:
    """Return how many of these go together: until they have ``MOST_BYTES``, and at least one."""
    return next((place for place, size in enumerate(accumulate(sizes), 1) if size >= MOST_BYTES), len(sizes))
