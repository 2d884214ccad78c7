# One start of a gateway process: its leases, owner, journal and flusher are the real ones, its callers are dice.

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from billing.core.edges import Database
from billing.core.holds import OF_VALUES, HoldRequest, Leg, Limits, RefusedHold, Scope
from billing.core.ids import uuid7
from billing.core.records import Status, UsageRecord
from billing.journal.journal import Journal
from billing.quotas.leases import Leases
from billing.upkeep.flusher import Flusher
from billing.upkeep.owner import Owner
from protocol.usage import Usage
from tests.simulation.loop import LIFE, Life
from tests.simulation.network import Line, SimStore
from tests.support.clock import SetClock

if TYPE_CHECKING:
    from tests.simulation.world import Machine, World

SEGMENT_BYTES = 32 * 1024
SHARE = 0.25  # of what is left, in leases of all owners together


class SkewedClock(SetClock):
    """A machine's own clock, off by ``skew`` seconds until it follows the database's."""

    def __init__(self, world: World, skew: float) -> None:
        super().__init__()
        self._world = world
        self.skew = skew

    def now(self) -> float:
        """Return unix seconds, as this process has them."""
        return self._world.now + self.skew + self.ahead

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return self._world.loop.elapsed


class SimJournal(Journal):
    """The real one, with names that the seed gives."""

    starts = 0

    def begin_again(self) -> None:
        """Write from now on as another process would."""
        super().begin_again()
        self.starts += 1
        self.name(self.token_of_start)

    def name(self, token: str) -> None:
        """Have this in the name of every segment."""
        self.token_of_start = token
        self.token = f"{token}-{self.starts}"


class SimFlusher(Flusher):
    """The real one, whose rows go to the world's database."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.journal, cast(Database, None), process.clock, process.leases)
        self._process = process

    async def _write(self, records: Sequence[UsageRecord], stuck: set[str]) -> set[str]:
        leases, process = self._process.leases, self._process
        sent = leases.mark
        async with asyncio.timeout(30):
            _, beat = await process.store.insert(leases.owner, records)
        if beat is not None:
            leases.heard(sent, beat)
        return set()


class Process:
    """One start."""

    def __init__(self, world: World, machine: Machine, token: str, skew: float) -> None:
        self.world = world
        self.machine = machine
        self.life = Life()
        self.context: Context = copy_context()
        self.context.run(LIFE.set, self.life)
        self.clock = SkewedClock(world, skew)
        self.line = Line(world, self)
        self.store = SimStore(self.line, self.clock.now)
        self.journal = SimJournal.open(machine.folder, clock=self.clock, segment_bytes=SEGMENT_BYTES)
        cast(SimJournal, self.journal).name(token)
        self.leases = Leases(self.store, self.clock, self.journal.token, share=SHARE)
        self.flusher = SimFlusher(self)
        self.owner = Owner(self.leases, self.flusher, self.journal, self.clock, version="sim")
        self.went_on_at = -1e9  # loop time at which it last went on after it had stood still
        self.is_unsure = False  # the database forgot something that it had told us
        self.forgotten = 0  # times that it did
        self.has_begun = False
        self.is_leaving = False
        self.bells: dict[str, float] = {}  # by scope: when its bell was last heard, by the database's time
        self.excess: dict[Any, int] = {}  # by room: what was billed beyond its hold, or held of no cap without asking
        self._force, self.leases.holding.force = self.leases.holding.force, self._force_open  # type: ignore[method-assign]
        self._loops: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        """The owner that the process is at present."""
        return self.leases.owner

    def start(self) -> None:
        """Begin to run."""
        self.world.loop.create_task(self._run(), context=self.context)

    async def _run(self) -> None:
        await self.owner.start()
        self._loops = [asyncio.create_task(self.flusher.run()), asyncio.create_task(self.owner.run())]
        self.has_begun = True

    def crash(self) -> None:
        """Die: the memory is gone, the files stay and their locks are free."""
        self.life.is_over = True
        for segment in self.journal._segments:
            segment.close()
        if self.owner._claim is not None:
            os.close(self.owner._claim)

    async def leave(self) -> None:
        """End in order, as at SIGTERM."""
        self.is_leaving = True
        while self.leases.holding.calls:
            await asyncio.sleep(0.05)
        for _ in range(20):
            if not self.journal.backlog:
                break
            await asyncio.sleep(0.1)
        for task in self._loops:
            task.cancel()
        await self.owner.stop()
        self.journal.close()
        self.world.gone(self)

    def hear_bell(self, scope: str) -> None:
        """Hear that a scope has become tight."""
        self.bells[scope] = self.world.now
        self.leases.recall([scope])

    # -- calls

    def request(self, team: str, key: str, tokens: int, nanousd: int) -> HoldRequest:
        """Return what a call asks for."""
        limits = self.world.model.limits
        scopes = [
            Scope(kind, which, Limits(**limits.get(f"{kind}:{which}", {})))
            for kind, which in (("team", team), ("key", key))
        ]
        if f"model:{team}/m" in limits:
            scopes.append(Scope("model", f"{team}/m", Limits(**limits[f"model:{team}/m"]), "m"))
        for kind in OF_VALUES:  # of one of a few end users, and of one tag
            scope = f"{kind}{team}/{self.world.dice.randrange(3) if kind == 'user:' else 'k=1'}"
            if scope in limits:
                scopes.append(Scope(kind[:-1], scope.removeprefix(kind), Limits(**limits[scope])))
        request_id = uuid7(int(self.clock.now() * 1000), self.world.dice.getrandbits(80))
        legs = Leg("m", tokens, nanousd, "m"), Leg("n", tokens, nanousd, "n")
        return HoldRequest(request_id=request_id, team_id=team, scopes=tuple(scopes), legs=legs)

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
            model_used=dice.choice("mn"), provider="p", provider_endpoint="e", status=Status.ANSWERED,
            owner=leases.owner, held_tokens=tokens, held_nanousd=nanousd,
            held_models=tuple(scope.model for scope in request.scopes if scope.model),
            held_scopes=tuple(scope.name for scope in request.scopes if scope.name.startswith(OF_VALUES)),
        )  # fmt: skip
        try:
            self.journal.opened(record)
            world.opened[request_id] = record
            await asyncio.sleep(4 * dice.random() ** 3)
            if dice.random() < 0.2:
                self._reach(request_id, int(tokens * dice.random()), int(nanousd * dice.random()))
                await asyncio.sleep(dice.random())
        except asyncio.CancelledError:  # its client left; a crash comes by here not even as an end of the generator
            self._close(record)
            raise
        self._close(record)

    def _reach(self, request_id: str, tokens: int, nanousd: int) -> None:
        self.journal.progress(request_id, Usage(output_tokens=tokens), nanousd)
        self.world.reached[request_id] = (tokens, nanousd) if tokens else (0, 0)

    def _close(self, record: UsageRecord) -> None:
        dice, tokens, nanousd = self.world.dice, record.held_tokens, record.held_nanousd
        part = dice.random() if dice.random() < 0.98 else 1.0 + dice.random()  # an upstream that bills too much
        status = dice.choices((Status.ANSWERED, Status.INTERRUPTED, Status.FAILED), (85, 10, 5))[0]
        used, cost = (int(tokens * part), int(nanousd * part)) if status is not Status.FAILED else (0, 0)
        closed = replace(record, status=status, input_tokens=used, output_tokens=0, cost_nanousd=cost)
        self.journal.closed(closed)
        self.world.closed[record.request_id] = closed
        if dice.random() < 0.3:
            self.world.loop.call_later(0.01 * dice.random(), self._settle, record, used, cost)
        else:
            self._settle(record, used, cost)

    def _settle(self, record: UsageRecord, used: int, cost: int) -> None:
        held = self.leases.holding.calls.get(record.request_id)
        parts = () if held is None else zip(held.rooms, held.amounts, held.scopes, strict=True)
        for pair, amounts, scope in parts:
            for room, more in zip(pair, (used - amounts[0], cost - amounts[1]), strict=True):
                if more > 0 and scope.model in ("", record.model_used):
                    self.excess[room] = self.excess.get(room, 0) + more
        self.leases.settle(record.request_id, used, cost, record.model_used)

    def _force_open(self, request: HoldRequest) -> None:
        self._force(request)
        for of_tokens, of_money in self.leases.holding.calls[request.request_id].rooms:
            self.excess[of_tokens] = self.excess.get(of_tokens, 0) + request.tokens
            self.excess[of_money] = self.excess.get(of_money, 0) + request.cost_nanousd

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
