# `tollgate work`: the chores of the house, done by any number of workers side by side. Journals of dead processes are
# adopted and carried to the ledger, holds that nobody closes are swept, partitions are made ahead and dropped when
# their time is over, and the books are audited.

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta

import structlog
from redis.asyncio import Redis

from billing.flusher import Flusher
from billing.journal import Journal
from billing.partitions import drop_partitions, ensure_partitions
from gateway.clock import Clock
from gateway.database import Database
from gateway.settings import Settings
from gateway.telemetry.logging import configure_logging

PARTITIONS_EVERY = 3600.0  # seconds
FINAL_FLUSH = 5.0  # seconds for what is closed but not yet in Postgres when the worker ends

log = structlog.get_logger()


@dataclass(frozen=True)
class Chore:
    """Something done again and again. A failure is logged and the chore tried again at its next turn."""

    name: str
    every: float  # seconds
    do: Callable[[], Awaitable[object]]

    async def run(self) -> None:
        """Do it now and then every so often, until cancelled."""
        while True:
            try:
                await self.do()
            except Exception as exc:  # whatever it was, the other chores and the next turn go on
                log.warning("chore_failed", chore=self.name, error=repr(exc))
            await asyncio.sleep(self.every)


def run_worker(settings: Settings, concurrency: int) -> int:
    """Work until SIGTERM or SIGINT; return the exit status. ``concurrency`` is for batch requests."""
    configure_logging()
    asyncio.run(_work(settings, Clock()))
    return 0


async def _work(settings: Settings, clock: Clock) -> None:
    asked_to_stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked_to_stop.set)
    async with AsyncExitStack() as stack:
        database = Database(settings.database_url, pool_size=2, application_name="tollgate worker")
        stack.push_async_callback(database.close)
        redis = Redis.from_url(settings.redis_url, socket_timeout=1.0, socket_connect_timeout=1.0)
        stack.push_async_callback(redis.aclose)
        journal = Journal.open(settings.data_dir / "journal", fsync=settings.journal_fsync, clock=clock)
        stack.callback(journal.close)
        flusher = Flusher(journal, database, clock)
        chores = chores_of(settings, database, redis, clock)
        tasks = [asyncio.create_task(flusher.run()), *(asyncio.create_task(chore.run()) for chore in chores)]
        log.info("worker_started", chores=[chore.name for chore in chores])
        await asked_to_stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(Exception):  # what cannot be flushed now stays in the journal for whoever adopts it
            async with asyncio.timeout(FINAL_FLUSH):
                while await flusher.flush_once():
                    pass


def chores_of(settings: Settings, database: Database, redis: Redis, clock: Clock) -> list[Chore]:
    """Return everything a worker does beside carrying journals."""

    async def keep_partitions() -> None:
        async with database.begin() as connection:
            await ensure_partitions(connection, clock.today())
        async with database.begin() as connection:
            oldest = clock.today() - timedelta(seconds=settings.retention.usage)
            for name in await drop_partitions(connection, oldest):
                log.info("partition_dropped", partition=name)

    return [Chore("partitions", PARTITIONS_EVERY, keep_partitions)]
