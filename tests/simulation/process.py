# One start of a gateway process: its leases, journal and flusher are the real ones, its callers are dice.

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from billing.edges import Database
from billing.flusher import Flusher
from billing.holds import HoldRequest, Leg, Limits, RefusedHold, Scope
from billing.ids import uuid7
from billing.journal import Journal
from billing.leases import Leases
from billing.owners import carried, claim
from billing.records import Status, UsageRecord
from billing.store_errors import POSTGRES_AWAY
from protocol.usage import Usage
from tests.simulation.loop import LIFE, Life
from tests.simulation.network import Line, SimStore
from tests.support.clock import SetClock

if TYPE_CHECKING:
    from tests.simulation.world import Machine, World

SEGMENT_BYTES = 32 * 1024


class SkewedClock(SetClock):
    """A process's own clock, off by ``skew`` seconds."""

    def __init__(self, world: World, skew: float) -> None:
        super().__init__()
        self._world = world
        self.skew = skew

    def now(self) -> float:
        """Return unix seconds, as this machine has them."""
        return self._world.now + self.skew

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return self._world.loop.elapsed


class SimFlusher(Flusher):
    """The real one, whose rows go to the world's database."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.journal, cast(Database, None), process.clock)
        self._process = process

    async def _write(self, records: Sequence[UsageRecord], stuck: set[str]) -> list[UsageRecord]:
        process = self._process
        sent = process.leases.acknowledged
        async with asyncio.timeout(30):
            new, beat = await process.store.insert(process.name, records)
        if beat is not None:
            process.leases.heard(sent, beat)
        process.machine.kept.update((record.request_id, record) for record in records)
        return new

    async def _find(self, request_ids: Any) -> list[UsageRecord]:
        return []

    async def report(self) -> None:
        """Leave it to the beat."""


class Process:
    """One start."""

    def __init__(self, world: World, machine: Machine, name: str, skew: float) -> None:
        self.world = world
        self.machine = machine
        self.name = name
        self.life = Life()
        self.context: Context = copy_context()
        self.context.run(LIFE.set, self.life)
        self.clock = SkewedClock(world, skew)
        self.line = Line(world, name)
        self.store = SimStore(self.line, self.clock.now)
        self.leases = Leases(self.store, self.clock, name, share=0.25)
        self.leases.on_beat = self._heard
        self.journal = Journal.open(machine.folder, clock=self.clock, segment_bytes=SEGMENT_BYTES)
        self.journal.token = f"{name}-0"
        self.flusher = SimFlusher(self)
        self.ahead = 0.0  # seconds; what the database's clock shows more than ours
        self.frozen_at = -1e9  # loop time at which it last went on after it had stood still
        self.is_unsure = False  # the database forgot something that it had told us
        self.has_begun = False
        self.is_leaving = False
        self.excess: dict[Any, int] = {}  # by room: what was used or held beyond its lease, and counted
        self._forgot = asyncio.Event()
        self._set_again_at = 0.0
        self._claim: int | None = None

    def start(self) -> None:
        """Begin to run."""
        self.world.loop.create_task(self._run(), context=self.context)

    def crash(self) -> None:
        """Die: the memory is gone, the files stay and their locks are free."""
        self.life.is_over = True
        for segment in self.journal._segments:
            segment.close()
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    async def leave(self) -> None:
        """End in order, as at SIGTERM."""
        self.is_leaving = True
        while self.leases.running:
            await asyncio.sleep(0.05)
        while self.journal.backlog:
            with contextlib.suppress(*POSTGRES_AWAY):
                await self.flusher.flush_once()
            await asyncio.sleep(0.1)
        self.leases.leave()
        ended = False
        while not ended:
            with contextlib.suppress(*POSTGRES_AWAY):
                await self.leases.tell()
                await self.store.end(self.name)
                ended = True
            await asyncio.sleep(0.1)
        self.journal.close()
        self.world.gone(self)

    def mint(self) -> str:
        """Return an id, in the database's time."""
        moment = self.clock.now() + self.ahead
        return uuid7(int(moment * 1000), self.world.dice.getrandbits(80))

    async def _run(self) -> None:
        self._claim = claim(self.machine.folder, self.journal.token, self.name)
        for _ in self.journal.adopt_each():
            await asyncio.sleep(0)
        while not self.has_begun:
            with contextlib.suppress(*POSTGRES_AWAY):
                await self.store.begin(self.name, "sim")
                await self._beat()
                self.has_begun = True
            await asyncio.sleep(0.2)
        flushing = asyncio.create_task(self.flusher.run())
        while not self.is_leaving:
            await asyncio.sleep(1.0)
            try:
                async with asyncio.timeout(1.0):
                    await self._beat()
                    await self._recover()
                    await self._end_the_dead()
            except POSTGRES_AWAY:
                pass
            self.leases.turn(1.0)
        flushing.cancel()

    async def _beat(self) -> None:
        sent = self.leases.acknowledged
        beat = await self.store.beat(self.name, self.clock.now(), self.journal.backlog)
        if beat is None:
            return
        self.ahead = beat.now - self.clock.now()
        self.leases.living = beat.living
        self.leases.heard(sent, beat.beat)
        self.leases.recall(beat.tight)
        if beat.found_at is not None and beat.found_at > self._set_again_at:
            self._forgot.set()

    def _heard(self, sent: int, beat: int) -> None:
        if beat <= sent:
            self.leases.acknowledged = beat
            self._forgot.set()

    async def _recover(self) -> None:
        if not self._forgot.is_set():
            return
        self._forgot.clear()
        try:
            await self.store.found_failover()
            kept = list(self.machine.kept.values())
            if kept:
                await self.store.insert(self.name, kept)
            found_at = self.world.now
            await self.store.set_again(self.name, self.leases.told())
            self._set_again_at = found_at
        except BaseException:
            self._forgot.set()
            raise

    async def _end_the_dead(self) -> None:
        for name, path in carried(self.machine.folder).items():
            if not any(closed.record.user_tag == name for closed in self.journal.take_closed(10_000)):
                await self.store.end(name)
                path.unlink(missing_ok=True)

    # -- calls

    def request(self, team: str, key: str, tokens: int, nanousd: int) -> HoldRequest:
        """Return what a call asks for."""
        scopes = tuple(
            Scope(kind, id, Limits(**self.world.model.limits.get(f"{kind}:{id}", {})))
            for kind, id in (("team", team), ("key", key))
        )
        return HoldRequest(
            request_id=self.mint(), team_id=team, scopes=scopes, legs=(Leg("m", tokens, nanousd),), valid_until=0
        )

    async def call(self, team: str, key: str) -> None:
        """Serve one call."""
        world, dice, leases = self.world, self.world.dice, self.leases
        tokens, nanousd = dice.randrange(10, 400), dice.randrange(50, 4000)
        request = self.request(team, key, tokens, nanousd)
        refused = await self.admit(request)
        if refused is not None:
            world.refused += 1
            return
        request_id = request.request_id
        record = UsageRecord(
            request_id=request_id, team_id=team, key_id=key, endpoint="chat.completions", model_asked="m",
            model_used="m", provider="p", provider_endpoint="e", status=Status.ANSWERED, user_tag=self.name,
        )  # fmt: skip
        self.journal.opened(record)
        world.opened[request_id] = self
        await asyncio.sleep(4 * dice.random() ** 3)
        share = dice.random()
        if dice.random() < 0.2:
            self.journal.progress(request_id, Usage(int(tokens * share / 2), 0), int(nanousd * share / 2))
            await asyncio.sleep(dice.random())
        part = dice.random() if dice.random() < 0.98 else 1.0 + dice.random()  # an upstream that bills too much
        status = dice.choices((Status.ANSWERED, Status.INTERRUPTED, Status.FAILED), (85, 10, 5))[0]
        used, cost = (int(tokens * part), int(nanousd * part)) if status is not Status.FAILED else (0, 0)
        closed = replace(record, status=status, input_tokens=used, output_tokens=0, cost_nanousd=cost)
        self.journal.closed(closed)
        world.closed[request_id] = closed
        if dice.random() < 0.3:
            await asyncio.sleep(0.01 * dice.random())
        held = leases.held(request_id)
        if held is not None and part > 1:
            for of_tokens, of_money in held.rooms:
                self.excess[of_tokens] = self.excess.get(of_tokens, 0) + max(0, used - tokens)
                self.excess[of_money] = self.excess.get(of_money, 0) + max(0, cost - nanousd)
        leases.settle(request_id, used, cost)

    async def admit(self, request: HoldRequest) -> RefusedHold | None:
        """Hold what the call may cost."""
        if self.leases.try_hold(request):
            self.world.admitted(self, request)
            return None
        since = self.world.loop.elapsed
        refused = await self.leases.hold(request)
        self.world.waited(self, request, refused, since)
        if refused is None:
            self.world.admitted(self, request)
        return refused
