# `tollgate work`: batches, and the deployment's background chores, done by any number of workers side by side. Beside
# every process's part in the accounting (open_process), what is past its time is erased, budgets are watched and
# callbacks delivered.

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import structlog

from billing.core.store_errors import told_if_away
from gateway.accounts.provider_keys import reseal_provider_keys
from gateway.accounts.team_secrets import PURPOSE, reseal_secrets
from gateway.batch.running.provider_runner import PACE, Pace
from gateway.batch.running.runner import BatchRunner
from gateway.cache.store import CacheStore
from gateway.config.file import load_settings
from gateway.core.background import stop_all
from gateway.core.clock import Clock
from gateway.core.draining import HURRIED, Drain
from gateway.core.parts import Parts
from gateway.core.settings import Settings
from gateway.egress.destinations import Guard
from gateway.inference.edition import Edition, Editions
from gateway.inference.recalibrations import Recalibrations
from gateway.moderation.abuse import AbuseWatch
from gateway.run.heartbeat import show_life
from gateway.run.process import open_process
from gateway.run.purger import Purger
from gateway.run.reload import Read, Reloader
from gateway.run.tuning import spare_what_stays
from gateway.run.work_metrics import WorkMetrics
from gateway.shadow.comparer import Comparer
from gateway.storage.books import Books
from gateway.storage.database import Database
from gateway.storage.encryption import Sealer
from gateway.telemetry.logging import configure_logging
from gateway.telemetry.metrics import Metrics
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.registry import PURPOSE as OF_PROVIDER_KEYS
from gateway.webhooks.budget_alerts import BudgetAlerts
from gateway.webhooks.deliverer import Deliverer
from gateway.webhooks.sender import Sender
from gateway.webhooks.unusual_use import UnusualUse
from protocol.serving.listening import raise_descriptor_limit
from router.complexity.classifier import Complexity

FINAL_FLUSH = 5.0  # seconds for what is closed but not yet in Postgres when the worker ends

log = structlog.get_logger()


def run_worker(path: Path, settings: Settings, concurrency: int, metrics_at: tuple[str, int] | None = None) -> int:
    """Work until SIGTERM or SIGINT, and let what runs end; asked twice, break it off: others run it again.

    SIGHUP has the file at ``path`` read again. Return the exit status.

    ``concurrency`` is for batch requests; ``metrics_at``: host and port for Prometheus. Raises OSError when they cannot
    be had.
    """
    configure_logging()
    raise_descriptor_limit()
    spare_what_stays()
    return asyncio.run(_work(lambda: load_settings(path), settings, Clock(), concurrency, metrics_at))


class _Signals:
    """What the process is asked to do from outside."""

    def __init__(self, drain: Drain) -> None:
        self.stop, self.hurry, self.reload = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._drain = drain
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._ask_to_stop)
        loop.add_signal_handler(signal.SIGHUP, self.reload.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # held since before the file was read

    def _ask_to_stop(self) -> None:
        if self.stop.is_set():
            self._drain.settle_within = HURRIED
            self.hurry.set()
        self.stop.set()


async def _work(
    read: Read, settings: Settings, clock: Clock, concurrency: int, metrics_at: tuple[str, int] | None
) -> int:
    drain = Drain()
    signals = _Signals(drain)
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(open_process(settings, clock, drain))
        editions, database = parts.get(Editions), parts.get(Database)
        books, metrics = parts.get(Books), parts.get(Metrics)
        batches, budgets = batch_runner_of(parts, concurrency), BudgetAlerts(database, clock)
        deliverer = _deliverer_of(parts, settings)
        stack.push_async_callback(deliverer.finish)
        shown = WorkMetrics(metrics, database, lambda: batches.running, lambda: budgets.used)
        await stack.enter_async_context(shown.served_at(metrics_at))
        log.info("worker_started", owner=books.owner.id)
        if settings.other_key_peppers:
            await _reseal(database, settings)
        reloader = Reloader(read)
        reloader.begin(editions, metrics, clock)
        chores = {
            "reload": _reload_for_ever(signals.reload, reloader),
            "purge": Purger(editions, database, clock, parts.get(CacheStore)).run(),
            "heartbeat": show_life(settings),
            "budgets": budgets.run(),
            "unusual use": _unusual_use_of(parts).run(),
            "callbacks": deliverer.run(),
            "batches": batches.run(),
            "shadow": comparer_of(parts).run(),
        }
        status = await _until_stopped(
            signals.stop, {name: asyncio.create_task(chore) for name, chore in chores.items()}
        )
        await batches.finish(settings.drain, signals.hurry)
        with suppress(Exception):  # what cannot be flushed now stays in the journal for the process that adopts it
            async with asyncio.timeout(FINAL_FLUSH):
                while await books.flusher.flush_once():
                    pass
    return status


def _deliverer_of(parts: Parts, settings: Settings) -> Deliverer:
    """Return a process's part in callbacks, which go where the current configuration allows."""
    guard = Guard(settings.callbacks_allow)

    def follow(edition: Edition) -> None:
        guard.allow = edition.settings.callbacks_allow

    parts.get(Editions).follow(follow)
    sealer = Sealer(settings.key_pepper, PURPOSE, *settings.other_key_peppers)
    return Deliverer(parts.get(Database), parts.get(Clock), Sender(guard), sealer)


def _unusual_use_of(parts: Parts) -> UnusualUse:
    """Return what tells of keys that are used as they never were, and pauses them where the policy says so."""
    editions, abuse = parts.get(Editions), parts.get(AbuseWatch)

    async def pause(key_id: str, team_id: str) -> None:
        if seconds := editions.current.settings.safety.abuse.pause_unusual:
            await abuse.pause(key_id, team_id, seconds)

    return UnusualUse(parts.get(Database), parts.get(Clock), pause)


def batch_runner_of(parts: Parts, concurrency: int, database: Database | None = None, pace: Pace = PACE) -> BatchRunner:
    """Return a process's part in batches; ``concurrency`` is for their requests, ``pace`` for batches at providers."""
    return BatchRunner(
        parts.get(Editions),
        database or parts.get(Database),
        parts.get(Recalibrations),
        parts.get(Clock),
        token=parts.get(Books).journal.token,
        concurrency=concurrency,
        reservations=parts.get(Books).reservations,
        client=parts.get(UpstreamClient),
        pace=pace,
    )


def comparer_of(parts: Parts) -> Comparer:
    """Return a process's part in shadow traffic."""
    return Comparer(parts.get(Editions), parts.get(Database), parts.get(Clock), parts.get(Complexity).version)


async def _reseal(database: Database, settings: Settings) -> None:
    """Leave nothing of lasting worth under a pepper that may go."""
    sealers = [Sealer(settings.key_pepper, one, *settings.other_key_peppers) for one in (PURPOSE, OF_PROVIDER_KEYS)]
    with told_if_away(log, "secrets_not_resealed"):
        async with database.begin() as connection:
            log.info("webhook_secrets_resealed", count=await reseal_secrets(connection, sealers[0]))
            log.info("provider_keys_resealed", count=await reseal_provider_keys(connection, sealers[1]))


async def _until_stopped(asked_to_stop: asyncio.Event, chores: dict[str, asyncio.Task[None]]) -> int:
    """Wait for the signal and cancel the chores. A chore that ends by itself is a fault: the worker ends with it."""
    stop = asyncio.create_task(asked_to_stop.wait())
    await asyncio.wait([stop, *chores.values()], return_when=asyncio.FIRST_COMPLETED)
    ended = {name: task for name, task in chores.items() if task.done()}
    for name, task in ended.items():
        log.error("chore_ended", chore=name, error=repr(task.exception()), exc_info=task.exception())
    await stop_all((stop, *chores.values()))
    return 1 if ended else 0


async def _reload_for_ever(hung_up: asyncio.Event, reloader: Reloader) -> None:
    """Read the configuration again whenever SIGHUP came, and have everything follow it that may."""
    while True:
        await hung_up.wait()
        hung_up.clear()
        await reloader.reload()
