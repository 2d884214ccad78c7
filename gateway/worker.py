# `tollgate work`: the chores of the house, done by any number of workers side by side. Journals of dead processes are
# adopted and carried to the ledger, holds that nobody closes are swept, days are closed, partitions made ahead and
# dropped when their time is over, stored answers deleted when theirs is, the books are audited, budgets watched and
# callbacks delivered.

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import structlog
from redis.asyncio import Redis

from billing.auditor import Auditor
from billing.flusher import Flusher
from billing.journal import Journal
from billing.quotas import Quotas
from billing.rebuild_store import PostgresStore
from billing.restore import Restorer
from billing.sweep import Sweeper
from gateway.background import stop_all
from gateway.budget_alerts import BudgetAlerts
from gateway.callbacks.deliverer import Deliverer
from gateway.callbacks.guard import Guard
from gateway.callbacks.sender import Sender
from gateway.callbacks.team_secrets import PURPOSE
from gateway.clock import Clock
from gateway.config_file import load_settings
from gateway.database import Database
from gateway.idempotency_store import purge_for_ever
from gateway.reload import Read, read_again
from gateway.sealing import Sealer
from gateway.settings import Settings
from gateway.telemetry.logging import configure_logging

HEARTBEAT_EVERY = 5.0  # seconds
HEARTBEAT_LASTS = 30.0  # seconds after which a worker counts as stuck
FINAL_FLUSH = 5.0  # seconds for what is closed but not yet in Postgres when the worker ends

log = structlog.get_logger()


def run_worker(path: Path, settings: Settings, concurrency: int) -> int:
    """Work until SIGTERM or SIGINT; SIGHUP has the file at ``path`` read again. Return the exit status.

    ``concurrency`` is for batch requests.
    """
    configure_logging()
    return asyncio.run(_work(lambda: load_settings(path), settings, Clock()))


def is_working(settings: Settings) -> bool:
    """Return whether a worker of this machine has shown lately that it is not stuck: for health checks."""
    try:
        return time.time() - _heartbeat_file(settings).stat().st_mtime < HEARTBEAT_LASTS
    except OSError:
        return False


async def _work(read: Read, settings: Settings, clock: Clock) -> int:
    asked_to_stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked_to_stop.set)
    hung_up = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hung_up.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # blocked by a parent until now
    async with AsyncExitStack() as stack:
        database = Database(settings.database_url, pool_size=2, application_name="tollgate worker")
        stack.push_async_callback(database.close)
        redis = Redis.from_url(settings.redis_url, socket_timeout=1.0, socket_connect_timeout=1.0)
        stack.push_async_callback(redis.aclose)
        quotas = Quotas(redis, clock, standalone_share=settings.quotas.standalone_share)
        journal = Journal.open(settings.data_dir / "journal", fsync=settings.journal_fsync, clock=clock)
        stack.callback(journal.close)
        flusher = Flusher(journal, database, clock, book_adopted=quotas.book_adopted)
        restorer = Restorer(quotas, journal, flusher, PostgresStore(database, clock), redis, clock)
        stack.push_async_callback(restorer.stop)
        log.info("worker_started", owner=flusher.id)
        await restorer.start()  # before anything is adopted, flushed or held
        sweeper = Sweeper(quotas, database, clock, keep_rows=settings.retention.usage)
        sealer = Sealer(settings.key_pepper, PURPOSE)
        guard = Guard(settings.callbacks_allow)
        deliverer = Deliverer(database, clock, Sender(guard), sealer)
        stack.push_async_callback(deliverer.finish)

        def follow(found: Settings) -> None:
            quotas.follow(found.quotas.standalone_share)
            sweeper.keep_rows = found.retention.usage
            guard.allow = found.callbacks_allow

        chores = {
            "reload": asyncio.create_task(_reload_for_ever(hung_up, read, settings, follow)),
            "flush": asyncio.create_task(flusher.run()),
            "purge": asyncio.create_task(purge_for_ever(database, clock)),
            "sweep": asyncio.create_task(sweeper.run()),
            "heartbeat": asyncio.create_task(_show_life(settings)),
            "budgets": asyncio.create_task(BudgetAlerts(database, clock).run()),
            "callbacks": asyncio.create_task(deliverer.run()),
            "audit": asyncio.create_task(Auditor(database, redis, quotas, clock).run()),
        }
        status = await _until_stopped(asked_to_stop, chores)
        with suppress(Exception):  # what cannot be flushed now stays in the journal for whoever adopts it
            async with asyncio.timeout(FINAL_FLUSH):
                while await flusher.flush_once():
                    pass
    return status


async def _until_stopped(asked_to_stop: asyncio.Event, chores: dict[str, asyncio.Task[None]]) -> int:
    """Wait for the signal and cancel the chores. A chore that ends by itself is a fault: the worker ends with it."""
    stop = asyncio.create_task(asked_to_stop.wait())
    await asyncio.wait([stop, *chores.values()], return_when=asyncio.FIRST_COMPLETED)
    ended = {name: task for name, task in chores.items() if task.done()}
    for name, task in ended.items():
        log.error("chore_ended", chore=name, error=repr(task.exception()), exc_info=task.exception())
    await stop_all((stop, *chores.values()))
    return 1 if ended else 0


async def _reload_for_ever(
    hung_up: asyncio.Event, read: Read, settings: Settings, follow: Callable[[Settings], None]
) -> None:
    """Read the configuration again whenever SIGHUP came, and have everything follow it that may."""
    while True:
        await hung_up.wait()
        hung_up.clear()
        if (found := await read_again(read, settings)) is not None:
            settings = found
            follow(settings)
            log.info("config_reloaded")


async def _show_life(settings: Settings) -> None:
    """Touch a file as long as the loop turns."""
    while True:
        _heartbeat_file(settings).touch()
        await asyncio.sleep(HEARTBEAT_EVERY)


def _heartbeat_file(settings: Settings) -> Path:
    return settings.data_dir / f"worker-{socket.gethostname()}.alive"
