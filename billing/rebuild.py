# Building the counters anew: every owner puts back what only it knows, and one of them adds what the statements say.
#
# The cut is exact because nobody flushes between an owner's snapshot and the reading of the statements: every charged
# call is either in the sums or put back, never both, never neither. Each owner promises to keep still until a moment of
# Redis's clock; the epoch becomes ready only before the first promise ends, else another one is begun.

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import structlog

from billing.epochs import Epochs
from billing.flusher import Flusher
from billing.holds import Hold
from billing.journal import Journal
from billing.ledger_sums import LedgerSums, TeamSums
from billing.quotas import Quotas
from billing.rebuild_store import RebuildStore
from billing.records import CHARGED, UsageRecord
from billing.store_errors import REDIS_AWAY, STORES_AWAY

STILL = 10.0  # seconds that an owner keeps still for a rebuild, at most
TURN = 5.0  # seconds after which somebody else takes a rebuild over
PATIENCE = 35.0  # seconds for an owner that lives and does not put back; it heals the books when it turns up
AFTERLIFE = 1.0  # seconds in which Postgres ends what a dead process had begun
READ_WITHIN = 8.0  # seconds for the statements
LOAD_WITHIN = 1.0  # seconds after which a load is too late
SOON = 0.05  # seconds between looks at a rebuild that goes on
CHUNK = 200  # calls put back in one step of Redis's
AT_ONCE = 100  # teams asked or loaded together

T = TypeVar("T")

log = structlog.get_logger(__name__)


class Rebuilder:
    """One owner's part in a rebuild: to put back, and to see it through when it is the one whose turn it is."""

    def __init__(
        self,
        quotas: Quotas,
        journal: Journal,
        flusher: Flusher,
        store: RebuildStore,
        epochs: Epochs,
        *,
        still: float = STILL,
    ) -> None:
        self.owner = flusher.id
        self._quotas = quotas
        self._journal = journal
        self._flusher = flusher
        self._store = store
        self._epochs = epochs
        self._still = still
        self._found_dead: dict[str, float] = {}  # and when, in monotonic seconds

    async def put_back(self, epoch: str, is_over: Callable[[], bool] = lambda: False) -> None:
        """Tell the new epoch what only we know; flush nothing until it is ready, given up, or ``is_over``."""
        seen = await self._epochs.look()
        looked = time.monotonic()
        async with self._flusher.paused():
            still_until = time.monotonic() + self._still
            # One moment: from here on every call that closes counts in the new epoch.
            live = self._quotas.begin_epoch(epoch)
            closed = [record for record in self._journal.unflushed() if record.status in CHARGED]
            try:
                if not await self._epochs.begin(epoch, self.owner, seen.now + still_until - looked):
                    return
                for team_id, some_closed, some_live in _by_team(closed, live):
                    await self._quotas.put_back(epoch, team_id, some_closed, some_live)
                await self._epochs.done(epoch, self.owner)
                log.info("calls_put_back", epoch=epoch, closed=len(closed), live=len(live))
            except REDIS_AWAY as exc:  # what was said may still be heard: the promise stands
                log.warning("put_back_broken_off", epoch=epoch, error=repr(exc))
            await self._keep_still(epoch, still_until, is_over)

    async def _keep_still(self, epoch: str, until: float, is_over: Callable[[], bool]) -> None:
        """Wait until the epoch is ready, and count in it; or until it is given up, or our promise ends."""
        while time.monotonic() < until and not is_over():
            try:
                present = (await self._epochs.look()).epoch
                if present is None or present.id != epoch:
                    return
                if present.is_ready:
                    if present.owners.get(self.owner, (False, 0.0))[0]:
                        await self._quotas.come_back()
                    return
            except REDIS_AWAY:
                pass
            await asyncio.sleep(SOON)

    async def lead(self, epoch: str, after: str, why: str) -> bool:
        """Build ``epoch``, if it is our turn. False when it did not become ready: another has to follow."""
        if not await self._epochs.start(epoch, after, self.owner, TURN):
            return False
        log.warning("rebuild_started", epoch=epoch, after=after, why=why)
        turn = asyncio.create_task(_survived(self._keep_turn(epoch)))
        work = asyncio.create_task(_survived(self._build(epoch)))
        try:
            await self.put_back(epoch, work.done)
            return work.done() and bool(work.result())  # else our own promise has ended
        finally:
            turn.cancel()
            work.cancel()

    async def _keep_turn(self, epoch: str) -> None:
        while True:
            if not await self._epochs.keep(epoch, self.owner, TURN):
                return
            await asyncio.sleep(TURN / 5)

    async def _build(self, epoch: str) -> bool:
        """Wait for every owner, read the statements, load them, and let the epoch count."""
        while True:
            seen = await self._epochs.look()
            if seen.epoch is None or seen.epoch.id != epoch:
                return False
            owners = seen.epoch.owners
            if any(seen.now >= until for _, until in owners.values()):
                return False  # a promise has ended before we could read
            alive = await self._store.owners_alive() if seen.now < seen.epoch.since + PATIENCE else set()
            alive -= self._gone()
            if all(owners.get(each, (False, 0.0))[0] for each in alive | owners.keys() | {self.owner}):
                break
            await asyncio.sleep(SOON)
        sums = await self._read(epoch)
        await self._load(epoch, sums)
        server = await self._epochs.run_id()
        is_ready = await self._epochs.finish(epoch, self.owner, sums.read_at, server)
        if is_ready:
            log.warning("counters_rebuilt", epoch=epoch, teams=len(sums.teams), owners=sorted(owners))
            await self._store.forgive_dead()
        return is_ready

    def _gone(self) -> set[str]:
        """Return who died on this disk: it flushes nothing more, and a neighbour books what it left.

        Only those dead for a moment: what a process sent last, Postgres may still be committing.
        """
        now = time.monotonic()
        self._found_dead = {name: self._found_dead.get(name, now) for name in self._journal.dead_neighbours()}
        return {name for name, since in self._found_dead.items() if now - since >= AFTERLIFE}

    async def _read(self, epoch: str) -> LedgerSums:
        async with asyncio.timeout(READ_WITHIN):
            teams = await self._store.teams()
            put_back: list[str] = []
            for some in _batches(teams, AT_ONCE):
                found = await asyncio.gather(*(self._quotas.calls_put_back(epoch, team_id) for team_id in some))
                put_back += [request_id for ids in found for request_id in ids]
            return await self._store.ledger_sums(put_back)

    async def _load(self, epoch: str, sums: LedgerSums) -> None:
        for some in _batches(sums.by_team(), AT_ONCE):
            valid_until = (await self._epochs.look()).now + LOAD_WITHIN
            loads = [self._quotas.load(epoch, team_id, each, valid_until) for team_id, each in some]
            if not all(await asyncio.gather(*loads)):
                raise TimeoutError("the sums were loaded too late")


def nothing() -> TeamSums:
    """Return the sums of a team that has used nothing."""
    return [], [], []


def _by_team(
    closed: Sequence[UsageRecord], live: Sequence[Hold]
) -> Iterator[tuple[str, Sequence[UsageRecord], Sequence[Hold]]]:
    """Yield what is put back in one step of Redis's: some calls of one team."""
    closed_of: dict[str, list[UsageRecord]] = defaultdict(list)
    live_of: dict[str, list[Hold]] = defaultdict(list)
    for record in closed:
        closed_of[record.team_id].append(record)
    for hold in live:
        live_of[hold.request.team_id].append(hold)
    for team_id, records in closed_of.items():
        for some in _batches(records, CHUNK):
            yield team_id, some, ()
    for team_id, holds in live_of.items():
        for some_holds in _batches(holds, CHUNK):
            yield team_id, (), some_holds


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


async def _survived(work: Coroutine[Any, Any, Any]) -> Any:
    """Return what ``work`` returns; None when Redis or Postgres failed."""
    try:
        return await work
    except STORES_AWAY as exc:
        log.warning("rebuild_broken_off", error=repr(exc))
        return None
