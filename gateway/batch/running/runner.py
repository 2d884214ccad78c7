# A worker's part in all batches: checks their input, claims items in fair turns, runs as many at once as succeed, and
# stores how they ended, many in one transaction.

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import structlog

from billing.core.store_errors import POSTGRES_AWAY
from billing.quotas.reservations import Reservations
from gateway.batch.at_providers.lines import lines_of
from gateway.batch.at_providers.sender import LineSender
from gateway.batch.checking import check_next_input
from gateway.batch.claims import (
    LEASE,
    ClaimedItem,
    claim_items,
    claim_suspect,
    has_suspects,
    renew_leases,
    requeue,
    use_due_index,
    waiting_batches,
)
from gateway.batch.estimate import read_backlog, with_raised_priorities
from gateway.batch.fair_schedule import FairSchedule, RunnableBatch
from gateway.batch.finishing import ItemResult, expire_batches, failed_result, finish_cancelled
from gateway.batch.running.adaptive_concurrency import ConcurrencyLimits
from gateway.batch.running.backpressure import Backpressure
from gateway.batch.running.finisher import Finisher
from gateway.batch.running.item import ItemRunner, RetryLater, Senders, result_if_given_up
from gateway.batch.running.provider_runner import PACE, Pace, ProviderBatchRunner
from gateway.core.background import stop_all
from gateway.core.clock import Clock
from gateway.inference.edition import Editions
from gateway.inference.recalibrations import Recalibrations
from gateway.storage.database import Database
from gateway.upstreams.client import UpstreamClient
from protocol.errors import ServiceError
from protocol.serving.deadlines import running_timeout

POLL = 0.3  # seconds between looks for something to run, while there is nothing
CLAIM_AT_ONCE = 16  # items of one batch in a turn
MOST_BYTES = 8 * 1024 * 1024  # of bodies that run at once; the last of them may go beyond
RENEW_EVERY = LEASE / 4  # seconds
CHORES_EVERY = 1.0  # seconds between looks for batches that are late or cancelled
LOOK_EVERY = 5.0  # seconds between looks at the batch rate, and at whether interactive calls wait
LOOKERS = 3  # of which so many are looked after at once
CHECK_EVERY = 0.5  # seconds between looks for input to check
REQUEUE_WITHIN = 2.0  # seconds, at the end


log = structlog.get_logger(__name__)


class BatchRunner:
    """Runs batches until it is cancelled; then ``finish`` waits for what runs. ``token`` names this process among those
    of its host, and ``concurrency`` is how many items run at once at the most."""

    def __init__(
        self,
        editions: Editions,
        database: Database,
        recalibrations: Recalibrations,
        clock: Clock,
        *,
        token: str,
        concurrency: int,
        reservations: Reservations,
        client: UpstreamClient,
        pace: Pace = PACE,
    ) -> None:
        self.owner = f"{socket.gethostname()}:{token}"
        self.limits = ConcurrencyLimits(concurrency, clock)
        self._editions = editions
        self._database = database
        self._recalibrations = recalibrations
        self._clock = clock
        self._finisher = Finisher(database, clock, self.owner, self._keep)
        self._senders = Senders(database, clock)
        self._client = client
        self._sender = LineSender(database, reservations, clock, self.owner)
        self._pace = pace
        self._at_providers = ProviderBatchRunner(
            editions, database, reservations, recalibrations, client, clock, self.owner, self._keep, pace
        )
        self._schedule = FairSchedule()
        self._backpressure = Backpressure(self.limits, clock)
        self._running: dict[str, ClaimedItem] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._claiming: asyncio.Task[int] | None = None
        self._room = asyncio.Event()
        self._has_suspects = False  # whether one waits: as soon as nothing else runs here, it does
        self._not_before: dict[str, float] = {}  # monotonic seconds; batches whose team has no room now
        self._renewed = 0.0  # monotonic seconds
        self._rate: float | None = None  # requests that end in a second, in the whole deployment

    @property
    def running(self) -> int:
        """Items that run here now."""
        return len(self._running)

    async def run(self) -> None:
        """Run batches for ever."""
        loops = [
            asyncio.create_task(self._keep_going(self._claim, 0.0)),
            asyncio.create_task(self._keep_going(self._renew, RENEW_EVERY)),
            asyncio.create_task(self._keep_going(self._end_batches, CHORES_EVERY)),
            asyncio.create_task(self._keep_going(self._look_around, LOOK_EVERY)),
            asyncio.create_task(self._keep_going(self._check_inputs, CHECK_EVERY)),
        ]
        for _ in range(LOOKERS):
            loops.append(asyncio.create_task(self._keep_going(self._at_providers.look, self._pace.every)))
        try:
            await asyncio.gather(*loops)
        finally:
            await stop_all(loops)

    async def finish(self, seconds: float, hurried: asyncio.Event) -> None:
        """Wait for what runs, no longer than ``seconds`` or until ``hurried``; the rest is requeued for others."""
        if self._claiming is not None:
            await asyncio.wait([self._claiming], timeout=REQUEUE_WITHIN)
        renewing = asyncio.create_task(self._keep_going(self._renew, RENEW_EVERY))
        hurry = asyncio.create_task(hurried.wait())
        ends = asyncio.create_task(_all_of(self._tasks))
        await asyncio.wait([hurry, ends], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        left = list(self._running.values())
        await stop_all([renewing, hurry, ends, *self._tasks])
        if left:
            log.warning("drain_over", requeued=len(left), asked_twice=hurried.is_set())
            with suppress(*POSTGRES_AWAY):  # else their leases end by themselves
                async with running_timeout(REQUEUE_WITHIN), self._database.begin() as connection:
                    for claim in left:
                        await requeue(connection, self.owner, claim, 0.0, is_try=False)

    async def _keep_going(self, work: Callable[[], Awaitable[None]], pause: float) -> None:
        while True:
            try:
                await work()
                await asyncio.sleep(pause)
            except POSTGRES_AWAY as exc:
                log.warning("batches_wait", error=repr(exc))
                await asyncio.sleep(max(1.0, pause))

    async def _claim(self) -> None:
        """Fill the room there is, then wait for more of it, or for something to run."""
        if self._has_suspects and not self._running:
            await self._whole(self._claim_suspect())
            return
        free = self.limits.most - len(self._running)
        room = MOST_BYTES - sum(len(claim.body) for claim in self._running.values())
        if self._has_suspects or free <= 0 or room <= 0 or self._is_doubtful():
            await self._until_room()
            return
        if await self._whole(self._claim_in_schedule(free, room)) < free:
            await self._until_room(POLL)

    async def _whole(self, claiming: Coroutine[Any, Any, int]) -> int:
        """Claim and begin, shielded from cancellation: Postgres may have committed, and an item that is claimed and
        not begun would wait for its lease to end."""
        self._claiming = asyncio.create_task(claiming)
        return await asyncio.shield(self._claiming)

    async def _claim_in_schedule(self, free: int, room: int) -> int:
        """Claim up to ``free`` items of ``room`` bytes, begin them, and return how many there were."""
        claims: list[tuple[ClaimedItem, RunnableBatch]] = []
        now = self._clock.monotonic()
        self._not_before = {name: until for name, until in self._not_before.items() if until > now}
        async with self._database.begin() as connection:
            await use_due_index(connection)
            found = [each for each in await waiting_batches(connection) if each.batch_id not in self._not_before]
            waiting = with_raised_priorities(found, self._rate, self._clock.now())
            in_group = Counter(claim.concurrency_group for claim in self._running.values())
            while waiting and len(claims) < free and room > 0:
                batch = self._schedule.next(waiting)
                left = self.limits.of(batch.concurrency_group).current - in_group[batch.concurrency_group]
                if (wanted := min(CLAIM_AT_ONCE, free - len(claims), left)) <= 0:
                    waiting.remove(batch)
                    continue
                claimed = await claim_items(connection, batch.batch_id, self.owner, wanted, room)
                room -= sum(len(claim.body) for claim in claimed)
                self._schedule.charge(batch, len(claimed))
                claims += [(claim, batch) for claim in claimed]
                in_group[batch.concurrency_group] += len(claimed)
                if len(claimed) < wanted:
                    waiting.remove(batch)
        if not self._running:
            self._renewed = self._clock.monotonic()
        for claim, batch in claims:
            self._begin(claim, batch)
        return len(claims)

    async def _claim_suspect(self) -> int:
        """Run a suspect, and nothing beside it; when none is left, the others go on."""
        async with self._database.begin() as connection:
            claim = await claim_suspect(connection, self.owner)
        if claim is None:
            self._has_suspects = False
            return 0
        log.warning("batch_item_runs_alone", batch_id=claim.batch_id, position=claim.position, losses=claim.losses)
        self._renewed = self._clock.monotonic()
        self._begin(claim)
        return 1

    def _begin(self, claim: ClaimedItem, batch: RunnableBatch | None = None) -> None:
        self._running[claim.name] = claim
        task = asyncio.create_task(self._run(claim, batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until_room(self, seconds: float = 1.0) -> None:
        self._room.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._room.wait()
        except TimeoutError:
            pass

    def _is_doubtful(self) -> bool:
        """Whether our claims may have passed to others, because the last renewal is too old."""
        return bool(self._running) and self._clock.monotonic() - self._renewed > LEASE / 2

    async def _run(self, claim: ClaimedItem, batch: RunnableBatch | None) -> None:
        limit = self.limits.of(claim.concurrency_group)
        try:
            result = await self._result_of(claim)
            if isinstance(result, RetryLater):
                if batch is not None:
                    self._schedule.refund(batch)
                await self._requeue(claim, result)
                return
            if result is not None:
                await self._finisher.store(result)
            if result is not None and result.is_upstreams_fault:
                limit.failed()
                limit.retried()
            else:
                limit.succeeded()
        except POSTGRES_AWAY as exc:  # the lease ends by itself
            log.warning("batch_item_left", batch_id=claim.batch_id, position=claim.position, error=repr(exc))
        finally:
            if self._running.get(claim.name) is claim:  # and not a later claim of the same item
                del self._running[claim.name]
            self._room.set()

    async def _result_of(self, claim: ClaimedItem) -> ItemResult | RetryLater | None:
        if (given_up := result_if_given_up(claim, self._clock)) is not None:
            return given_up
        try:
            caller = await self._senders.find(claim.key_id)
        except ServiceError as exc:
            return failed_result(claim, self._clock.new_id(), exc)
        edition = self._editions.current
        lines = lines_of(edition, self._client, self._clock)
        runner = ItemRunner(edition.inference, self._recalibrations, self._clock, lines, self._sender)
        return await runner.run(caller, claim, self._store)

    async def _store(self, ended: ItemResult) -> bool:
        record = ended.record
        if record is not None and record.attempts and not self._is_ours(record.provider):
            self._backpressure.note_use(ended.claim.concurrency_group, record.attempts[-1].target)
        return await self._finisher.store(ended)

    def _is_ours(self, provider: str) -> bool:
        """Whether our own engine answers there, which puts interactive calls first by itself."""
        settings = self._editions.current.settings.providers.get(provider)
        return settings is not None and settings.self_hosted

    async def _look_around(self) -> None:
        if self._running:
            async with self._database.begin() as connection:
                _, self._rate = await read_backlog(connection)
                await self._backpressure.check(connection)

    async def _requeue(self, claim: ClaimedItem, wait: RetryLater) -> None:
        limit = self.limits.of(claim.concurrency_group)
        if wait.is_congestion:
            limit.congested()
        elif wait.is_try:
            limit.failed()
        if (wait.is_congestion or wait.is_try) and not (claim.is_of_several and claim.is_first):
            limit.retried()
        if not wait.is_try and not (wait.is_congestion and claim.is_of_several):  # the rest would get the same answer
            until = self._clock.monotonic() + wait.seconds
            self._not_before[claim.batch_id] = max(self._not_before.get(claim.batch_id, 0.0), until)
        async with self._database.begin() as connection:
            await requeue(connection, self.owner, claim, wait.seconds, is_try=wait.is_try)

    async def _renew(self) -> None:
        now = self._clock.monotonic()
        if self._running:
            async with self._database.begin() as connection:
                await renew_leases(connection, self.owner, [*self._running.values()])
        self._renewed = now

    async def _end_batches(self) -> None:
        keep = self._keep()
        async with self._database.begin() as connection:
            for batch_id in await expire_batches(connection, self._clock, keep):
                log.warning("batch_expired", batch_id=batch_id)
        async with self._database.begin() as connection:
            await finish_cancelled(connection, self._clock, keep)
            self._has_suspects = await has_suspects(connection)

    def _keep(self) -> float:
        return self._editions.current.settings.retention.batch_files

    async def _check_inputs(self) -> None:
        while await check_next_input(self._database, self._clock) is not None:
            pass


async def _all_of(tasks: set[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks)
