# Looks after batches at providers, whichever worker gathered them: sends them, looks how far they are, stores what came
# out, and lets go of the lines that did not come: those are asked again, as ordinary calls.
#
# A batch is sent once. That it will be is written before; where nothing was heard of it then, it is searched for at the
# provider until it must have shown, and only then sent again.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import structlog
from msgspec import Struct

from billing.core.store_errors import POSTGRES_AWAY, told_if_away
from billing.quotas.reservations import Reservations
from gateway.accounts.teams import find_caller_of_key
from gateway.batch.at_providers.lines import ProviderLines, lines_of
from gateway.batch.at_providers.sender import FALL_BACK
from gateway.batch.at_providers.store import (
    ProviderBatch,
    SentLine,
    claim_provider_batch,
    find_sent,
    forget_lines,
    has_lines,
    ids_in_order,
    known_upstream_ids,
    let_go,
    note,
    read_lines_of,
    renew,
)
from gateway.batch.running.finisher import Finisher
from gateway.batch.running.item import ItemRunner
from gateway.core.clock import Clock
from gateway.core.principals import Caller
from gateway.inference.answer import Inference
from gateway.inference.edition import Edition, Editions
from gateway.inference.recalibrations import Recalibrations
from gateway.storage.database import Database
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.provider_batches import NotMade, ProviderBatches
from gateway.upstreams.wire.batches import BatchPlace, RemoteBatch
from gateway.upstreams.wire.errors import UpstreamFailure

MOST_TRIES = 3  # to send a batch of which nothing was heard
LINES_AT_ONCE = 200  # read of one that is to be sent
ANSWERS_AT_ONCE = 50  # stored together
BYTES_AT_ONCE = 8 * 1024 * 1024  # of answers, about

log = structlog.get_logger(__name__)


class Pace(Struct, frozen=True, kw_only=True):
    """How often is looked, and how long is waited; seconds."""

    every: float = 1.0  # between looks for what is due
    lease: float = 30.0  # that another worker waits for one that does not answer
    quiet: float = 3.0  # without another line, after which a batch is sent
    first_look: float = 2.0  # and each further one after a tenth of its age,
    longest: float = 20.0  # at the most: a reservation that is not looked after for 30 seconds is called silent
    later: float = 20.0  # after what may pass
    full: float = 600.0  # while a provider has no room for more of a model
    settle: float = 900.0  # until what a provider took unheard must have shown
    cancel: float = 1800.0  # that a provider may take to end a batch


PACE = Pace()


class ProviderBatchRunner(Struct, eq=False):
    """One worker's part in the batches at providers. ``keep``: seconds that answers are kept."""

    _editions: Editions
    _database: Database
    _reservations: Reservations
    _recalibrations: Recalibrations
    _client: UpstreamClient
    _clock: Clock
    _owner: str
    _keep: Callable[[], float]
    _pace: Pace

    async def look(self) -> None:
        """Look after every batch that is due. Raises POSTGRES_AWAY."""
        while True:
            async with self._database.begin() as connection:
                one = await claim_provider_batch(connection, self._owner, self._pace.lease)
            if one is None:
                return
            await self.look_after(one)

    async def look_after(self, one: ProviderBatch) -> None:
        """Do what is next for a batch that this worker has claimed."""
        try:
            async with self._renewed(one):
                await self._reservations.keep_alive(one.reservation)
                await self._try_step(one)
        except _LostLease:
            log.warning("provider_batch_taken_over", provider_batch=one.id)

    async def _try_step(self, one: ProviderBatch) -> None:
        try:
            await self._step(one, self._editions.current)
            return
        except UpstreamFailure as exc:
            told = {"provider_batch": one.id, "provider": one.provider, "error": exc.message, "outcome": exc.outcome}
            log.warning("provider_batch_not_reached", **told)
        except (_LostLease, *POSTGRES_AWAY):
            raise
        except Exception:  # a fault in our code: it must not stop the worker, nor hold what the batch holds for ever
            log.exception("provider_batch_failed", provider_batch=one.id)
        if not self._is_wanted(one) and self._waited_for_end(one):
            await self._end(one, "unreachable")
        else:
            await self._note(one, look_in=self._pace.later)

    async def _step(self, one: ProviderBatch, edition: Edition) -> None:
        lines = lines_of(edition, self._client, self._clock)
        batches = lines.batches
        is_known = batches.knows(one.target)
        if one.upstream_id is None and one.tried_at is None and not (is_known and batches.may_ask(one.target)):
            await self._end(one, "not_sent")
            return
        if not is_known:
            raise UpstreamFailure(f"tollgate.yaml names no {one.provider} at that place any more.", outcome="unknown")
        if one.status == "gathering" and not await self._is_gathered(one, batches):
            return
        place = await batches.place_of(one.target, one.key_digest)
        if one.upstream_id is None:
            await self._send(one, batches, place)
            return
        remote, told = await batches.look(one.target, place, one.upstream_id)
        if remote.state == "running":
            await self._wait(one, batches, place)
        elif remote.waits_for_room and self._is_wanted(one):
            back = {"upstream_id": None, "tried_at": None, "tries": 0, "submitted_at": one.now, "status": "submitting"}
            await self._note(one, **back, look_in=self._pace.longest)
        else:
            is_ours = await self._collect(one, edition.inference, lines, place, remote, told)
            await self._end(one, remote.told)
            if is_ours:
                await batches.clean_up(one.target, place, told)

    def _is_wanted(self, one: ProviderBatch) -> bool:
        """Whether what a provider would answer is still waited for."""
        left = (one.expires_at - one.now).total_seconds()
        return one.batch_status == "in_progress" and left > FALL_BACK

    def _waited_for_end(self, one: ProviderBatch) -> bool:
        """Whether a provider had its time to end a batch, since that is not waited for."""
        late = one.expires_at - timedelta(seconds=FALL_BACK)
        since = one.cancelled_at or min(one.left_at or late, late)
        return (one.now - since).total_seconds() > self._pace.cancel

    async def _is_gathered(self, one: ProviderBatch, batches: ProviderBatches) -> bool:
        """Close a batch to further lines when none have come for a while, or no more fit; return whether it is."""
        wire = batches.wire_of(one.target)
        is_full = one.lines >= wire.most_lines or one.bytes >= 0.9 * wire.most_bytes
        quiet = (one.now - one.touched_at).total_seconds()
        if self._is_wanted(one) and not is_full and quiet < self._pace.quiet:
            await self._note(one, look_in=self._pace.quiet - quiet + 0.05)
            return False
        await self._note(one, status="submitting")
        return True

    async def _send(self, one: ProviderBatch, batches: ProviderBatches, place: BatchPlace) -> None:
        """Have a provider take a batch, unless it may have it already."""
        if one.tried_at is not None:
            if (found := await self._search(one, batches, place)) is not None:
                log.info("provider_batch_found", provider_batch=one.id, upstream_id=found.id)
                await self._sent(one, batches, place, found)
                return
            if (one.now - one.tried_at).total_seconds() < self._pace.settle:
                await self._note(one, look_in=min(self._pace.later, self._pace.settle))
                return
        elif self._waits_for_room(one):
            await self._note(one, look_in=self._pace.longest)  # what it holds is looked after meanwhile
            return
        if not self._is_wanted(one) or one.tries >= MOST_TRIES or not (lines := await self._lines(one)):
            await self._end(one, "not_sent")
            return
        await self._note(one, tried_at=one.now, tries=one.tries + 1, lines=len(lines))
        made = await batches.make(one.target, place, one.id, lines)
        if isinstance(made, RemoteBatch):
            await self._sent(one, batches, place, made)
        elif made is NotMade.REFUSED:
            log.warning("provider_batch_refused", provider_batch=one.id, provider=one.provider)
            await self._end(one, "refused")
        elif made is NotMade.LATER:
            await self._note(one, tried_at=None, tries=one.tries, look_in=self._pace.later)
        else:
            log.warning("provider_batch_unheard_of", provider_batch=one.id, provider=one.provider)
            await self._note(one, look_in=min(self._pace.later, self._pace.settle))

    def _waits_for_room(self, one: ProviderBatch) -> bool:
        """Whether a batch was at its provider a while ago, which had no room for it."""
        if one.submitted_at is None or not self._is_wanted(one):
            return False
        return (one.now - one.submitted_at).total_seconds() < self._pace.full

    async def _search(self, one: ProviderBatch, batches: ProviderBatches, place: BatchPlace) -> RemoteBatch | None:
        assert one.tried_at is not None
        async with self._database.begin() as connection:
            known = await known_upstream_ids(connection, one.provider)
        since = one.tried_at.timestamp()
        return await batches.find(one.target, place, one.id, since=since, lines=one.lines, known=known)

    async def _sent(self, one: ProviderBatch, batches: ProviderBatches, place: BatchPlace, remote: RemoteBatch) -> None:
        """Write down what the provider calls it; where another worker has taken over meanwhile, it sends its own."""
        told = {"status": "submitted", "upstream_id": remote.id, "submitted_at": one.now}
        try:
            await self._note(one, **told, look_in=self._pace.first_look)
        except _LostLease:
            if not batches.wire_of(one.target).keeps_names:  # else it is found
                await batches.cancel(one.target, place, remote.id)
            raise
        log.info("provider_batch_sent", provider_batch=one.id, batch_id=one.batch_id, upstream_id=remote.id)

    async def _lines(self, one: ProviderBatch) -> list[bytes]:
        lines, after = list[bytes](), -1
        while True:
            async with self._database.begin() as connection:
                some = await read_lines_of(connection, one.id, after, LINES_AT_ONCE)
            if not some:
                return lines
            lines += [line for _, line in some]
            after = some[-1][0]

    async def _wait(self, one: ProviderBatch, batches: ProviderBatches, place: BatchPlace) -> None:
        """Look again later; a batch that is not waited for is cancelled at its provider, and given up after a while."""
        assert one.upstream_id is not None
        if self._is_wanted(one):
            age = (one.now - (one.submitted_at or one.now)).total_seconds()
            await self._note(one, look_in=min(max(self._pace.first_look, age / 10), self._pace.longest))
        elif one.cancelled_at is None:
            await batches.cancel(one.target, place, one.upstream_id)
            log.info("provider_batch_cancelled", provider_batch=one.id, upstream_id=one.upstream_id)
            await self._note(one, cancelled_at=one.now, look_in=self._pace.first_look)
        elif self._waited_for_end(one):
            await self._end(one, "not_ended")
        else:
            await self._note(one, look_in=self._pace.first_look)

    async def _collect(
        self,
        one: ProviderBatch,
        inference: Inference,
        lines: ProviderLines,
        place: BatchPlace,
        remote: RemoteBatch,
        told: dict[str, Any],
    ) -> bool:
        """Store every answer that came out: said twice, or out of order, each is stored once. Return whether the batch
        is ours: one that was found by its moment and its size may be another program's."""
        runner = ItemRunner(inference, self._recalibrations, self._clock, lines)
        store = _Answers(self, one, runner)
        unnamed: list[bytes | None] = []
        named: list[str] = []  # some of them
        async for answer in lines.batches.results(one.target, place, remote, told):
            if answer.custom_id is not None and len(named) < ANSWERS_AT_ONCE:
                named.append(answer.custom_id)
            if answer.custom_id is None:
                unnamed.append(answer.body)
            elif answer.body is not None:
                await store.add(answer.custom_id, answer.body)
        if unnamed and not store.seen:  # the provider goes by the order of the lines
            async with self._database.begin() as connection:
                ids = await ids_in_order(connection, one.id)
            for ident, body in zip(ids, unnamed, strict=False) if len(ids) == len(unnamed) else ():
                if body is not None:
                    await store.add(ident, body)
        await store.flush()
        log.info("provider_batch_collected", provider_batch=one.id, stored=store.stored, of=one.lines, told=remote.told)
        if lines.batches.wire_of(one.target).keeps_names:
            return True
        async with self._database.begin() as connection:
            return await has_lines(connection, one.id, named)

    async def store(self, one: ProviderBatch, runner: ItemRunner, answers: dict[str, bytes]) -> int:
        """Store answers by the request ids of their lines; return how many there were."""
        async with self._database.begin() as connection:
            lines = await find_sent(connection, one.id, list(answers))
            callers = {line.claim.key_id: line for line in lines}
            known = {key: await find_caller_of_key(connection, key, also_revoked=True) for key in callers}
        finisher = Finisher(self._database, self._clock, one.id, self._keep)

        async def book(line: SentLine, caller: Caller) -> bool:
            body = answers[line.request_id]
            return await runner.book(caller, line, one.target, body, finisher.store, one.reservation)

        callers_of = [(line, caller) for line in lines if (caller := known[line.claim.key_id]) is not None]
        return sum(await asyncio.gather(*(book(line, caller) for line, caller in callers_of)))

    async def _end(self, one: ProviderBatch, outcome: str) -> None:
        """Give back what it held, and let go of the lines that have no answer."""
        await self._reservations.end(one.reservation)
        async with self._database.begin() as connection:
            left = await let_go(connection, one.id)
            await forget_lines(connection, one.id)
            if not await note(connection, one, status="ended", outcome=outcome[:100], ended_at=one.now):
                raise _LostLease
        log.info("provider_batch_ended", provider_batch=one.id, batch_id=one.batch_id, outcome=outcome, let_go=left)

    async def _note(self, one: ProviderBatch, *, look_in: float | None = None, **changes: Any) -> None:
        async with self._database.begin() as connection:
            if not await note(connection, one, look_in=look_in, **changes):
                raise _LostLease

    @asynccontextmanager
    async def _renewed(self, one: ProviderBatch) -> AsyncIterator[None]:
        """Keep the lease of a batch for as long as the block runs."""
        renewing = asyncio.create_task(self._renew(one))
        try:
            yield
        finally:
            renewing.cancel()

    async def _renew(self, one: ProviderBatch) -> None:
        while True:
            await asyncio.sleep(self._pace.lease / 4)
            with told_if_away(log, "provider_batch_not_renewed", provider_batch=one.id):
                async with self._database.begin() as connection:
                    await renew(connection, one, self._pace.lease)
                await self._reservations.keep_alive(one.reservation)


class _LostLease(Exception):
    """Another worker looks after the batch now."""


class _Answers:
    """Gathers answers until some are stored together."""

    def __init__(self, keeper: ProviderBatchRunner, one: ProviderBatch, runner: ItemRunner) -> None:
        self.seen = self.stored = 0
        self._keeper, self._one, self._runner = keeper, one, runner
        self._waiting: dict[str, bytes] = {}
        self._bytes = 0

    async def add(self, ident: str, body: bytes) -> None:
        """Take an answer in."""
        self.seen += 1
        self._waiting.setdefault(ident, body)
        self._bytes += len(body)
        if len(self._waiting) >= ANSWERS_AT_ONCE or self._bytes >= BYTES_AT_ONCE:
            await self.flush()

    async def flush(self) -> None:
        """Store those that wait."""
        if self._waiting:
            waiting, self._waiting, self._bytes = self._waiting, {}, 0
            self.stored += await self._keeper.store(self._one, self._runner, waiting)
