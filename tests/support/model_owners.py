# Owners for the model of the counters: the real quotas and restorer on a real Valkey, with a way to it that tests can
# break, and with journals, flushers and a ledger that are dicts.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

from redis.asyncio import Redis

from billing.flusher import Flusher
from billing.holds import Hold, HoldRequest, Scope, Settlement, Sums
from billing.ids import day_of
from billing.journal import Journal
from billing.ledger_sums import LedgerSums
from billing.quotas import Quotas
from billing.rebuild_store import ALIVE
from billing.records import CHARGED, Status, UsageRecord
from billing.restore import Restorer
from protocol.usage import Usage
from tests.support.clock import SetClock
from tests.support.factories import make_record

SHORTLY = 0.05  # seconds that an owner keeps still for a rebuild; most of those in the model are in vain


class Way(Enum):
    """What becomes of a command."""

    OPEN = "open"
    CUT = "cut"  # it fails at once, unheard
    DEAF = "deaf"  # it is executed, and the answer lost
    LATE = "late"  # it fails, and is executed some time later


class Line:
    """One owner's way to Redis."""

    def __init__(self, late: list[Callable[[], Awaitable[Any]]]) -> None:
        self.way = Way.OPEN
        self._late = late

    def bend(self, script: Any) -> None:
        """Lead a Script's calls through here."""
        call = script.call

        async def through(key: str, *args: Any) -> Any:
            match self.way:
                case Way.CUT:
                    raise ConnectionError("cut")
                case Way.DEAF:
                    await call(key, *args)
                    raise TimeoutError
                case Way.LATE:
                    self._late.append(lambda: call(key, *args))
                    raise TimeoutError
            return await call(key, *args)

        script.call = through


class DictStore:
    """Postgres, as the restorers know it."""

    def __init__(self, clock: SetClock, team_id: str) -> None:
        self.clock = clock
        self.team_id = team_id
        self.rows: dict[str, UsageRecord] = {}
        self.seen_at: dict[str, float] = {}
        self.unsettled: dict[str, int] = {}
        self.is_away = False

    def insert(self, records: Sequence[UsageRecord]) -> list[UsageRecord]:
        """Insert once; return what was new."""
        self.check()
        new = [record for record in records if record.request_id not in self.rows]
        self.rows |= {record.request_id: record for record in new}
        return new

    def check(self) -> None:
        """Raise when Postgres is away."""
        if self.is_away:
            raise OSError("Postgres is away")

    async def owners_alive(self) -> set[str]:
        self.check()
        return {owner for owner, seen_at in self.seen_at.items() if seen_at >= self.clock.now() - ALIVE}

    async def teams(self) -> Sequence[str]:
        self.check()
        return [self.team_id]

    async def created_at(self, team_id: str) -> float | None:
        self.check()
        return 0.0

    async def ledger_sums(self, put_back: Sequence[str]) -> LedgerSums:
        self.check()
        now = self.clock.now()
        sums, since = LedgerSums(now, [self.team_id]), int(now // 86_400) - 1
        for request_id, record in self.rows.items():
            if record.status in CHARGED and request_id not in put_back:
                tokens = record.input_tokens + record.output_tokens
                sums.add(self.team_id, record.key_id, day_of(request_id), tokens, record.cost_nanousd, since=since)
        return sums

    async def scope_sums(self, scope: Scope, team_id: str, day: int) -> Sums:
        self.check()
        return Sums()

    async def dead_with_unsettled(self) -> Sequence[str]:
        self.check()
        late = self.clock.now() - ALIVE
        return [owner for owner, count in self.unsettled.items() if count and self.seen_at[owner] < late]

    async def forgive_dead(self) -> None:
        for owner in await self.dead_with_unsettled():
            self.unsettled[owner] = 0

    async def note_unsettled(self, owner: str, unsettled: int) -> None:
        self.check()
        self.unsettled[owner] = unsettled

    async def leave(self, owner: str, unsettled: int) -> None: ...

    async def forget(self, owner: str) -> None: ...


@dataclass
class DictJournal:
    """A journal that survives its process."""

    open: dict[str, UsageRecord] = field(default_factory=dict)
    closed: dict[str, UsageRecord] = field(default_factory=dict)
    adopted: set[str] = field(default_factory=set)

    def unflushed(self) -> list[UsageRecord]:
        return list(self.closed.values())

    def dead_neighbours(self) -> set[str]:
        """Return nobody: in the model every process has a disk of its own."""
        return set()

    def adopt(self, dead: DictJournal) -> None:
        """Take over what a dead process left; its running calls were interrupted."""
        self.closed |= dead.closed | dead.open
        self.adopted |= dead.closed.keys() | dead.open.keys()


class DictFlusher:
    """Carries closed calls to the dict that is the ledger."""

    def __init__(self, id: str, journal: DictJournal, store: DictStore, quotas: Quotas) -> None:
        self.id = id
        self._journal = journal
        self._store = store
        self._quotas = quotas
        self._one_at_a_time = asyncio.Lock()

    @property
    def backlog(self) -> int:
        return len(self._journal.closed)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        async with self._one_at_a_time:
            yield

    async def flush(self, *, answer_is_lost: bool = False) -> None:
        """Write everything that is closed; ``answer_is_lost``: the ledger has it, and the flusher does not know."""
        async with self._one_at_a_time:
            records = list(self._journal.closed.values())
            await asyncio.sleep(0)
            new = self._store.insert(records)
            if answer_is_lost and not self._journal.adopted:
                return
            for record in records:
                del self._journal.closed[record.request_id]
            adopted = [record for record in new if record.request_id in self._journal.adopted]
            self._journal.adopted -= {record.request_id for record in records}
            if adopted:
                await self._quotas.book(adopted)


class ModelOwner:
    """One process."""

    def __init__(
        self, number: int, redis_url: str, clock: SetClock, store: DictStore, late: list[Callable[[], Awaitable[Any]]]
    ) -> None:
        self.id = f"owner-{number}"
        self.clock = clock
        self.redis: Redis = Redis.from_url(redis_url)
        self.line = Line(late)
        self.quotas = Quotas(self.redis, clock, standalone_share=0.25, uses_server_time=False, deadline=5.0)
        self.journal = DictJournal()
        self.flusher = DictFlusher(self.id, self.journal, store, self.quotas)
        self.restorer = Restorer(
            self.quotas,
            cast(Journal, self.journal),
            cast(Flusher, self.flusher),
            store,
            self.redis,
            clock,
            uses_server_time=False,
            deadline=5.0,
            still=SHORTLY,
        )
        self.line.bend(self.quotas._script)
        self.line.bend(self.restorer._epochs._script)
        self.holds: dict[str, tuple[Hold, str | None]] = {}  # of calls that are not said, and the epoch of their close
        self.is_paused = False

    def keep_still(self, seconds: float) -> None:
        """Keep still for so long in rebuilds to come."""
        self.restorer._rebuilder._still = seconds

    async def open(self, request: HoldRequest, spent: int) -> Any:
        """Hold and open a call. If this process dies first, it will have been interrupted at ``spent``."""
        answer = await self.quotas.open(request)
        if isinstance(answer, Hold):
            self.holds[request.request_id] = (answer, None)
            key_id = request.scopes[1].id
            self.journal.open[request.request_id] = make_record(
                request.request_id,
                team_id=request.team_id,
                key_id=key_id,
                status=Status.INTERRUPTED if spent else Status.FAILED,
                input_tokens=spent,
                output_tokens=0,
                cost_nanousd=spent * 10,
            )
        return answer

    def close(self, request_id: str, tokens: int, cost: int, status: Status) -> UsageRecord:
        """Close a call in the journal."""
        hold, _ = self.holds[request_id]
        self.holds[request_id] = (hold, self.quotas.close(hold))
        record = self.journal.open.pop(request_id)
        record = make_record(
            request_id,
            team_id=record.team_id,
            key_id=record.key_id,
            status=status,
            input_tokens=tokens,
            output_tokens=0,
            cost_nanousd=cost,
        )
        self.journal.closed[request_id] = record
        return record

    async def say(self, request_id: str, record: UsageRecord) -> None:
        """Settle or release a closed call."""
        hold, epoch = self.holds.pop(request_id)
        if record.status in CHARGED:
            await self.quotas.settle(hold, Settlement(Usage(record.input_tokens), record.cost_nanousd), epoch)
        else:
            await self.quotas.release(hold, epoch)

    async def end(self) -> None:
        """Let go of the tasks and connections."""
        for task in (self.restorer._noting, *self.restorer._welcomes.values()):
            if task is not None:
                task.cancel()
        await self.redis.aclose()
