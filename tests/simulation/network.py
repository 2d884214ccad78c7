# One process's way to the database. Statements may be slow, lost, executed without an answer, executed long after their
# process has given up, or executed twice.

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from billing.core.records import UsageRecord
from billing.quotas.draws import DONE_WITHIN, LOOK_AGAIN
from billing.quotas.lease_store import Beat, Need, PostgresLeases, Taken, Told
from tests.simulation.sql_model import SqlModel, today_at

if TYPE_CHECKING:
    from tests.simulation.process import Process
    from tests.simulation.world import World

GIVEN_UP_AFTER = 10.0  # seconds, as the driver does by itself


class Trouble(Struct, frozen=True):
    """How likely each thing is that may become of a statement."""

    slow: float = 0.0
    lost: float = 0.0  # it is never executed
    unheard: float = 0.0  # it is, and the answer is lost
    late: float = 0.0  # it is, long after it was given up
    twice: float = 0.0
    slow_back: float = 0.0  # the answer takes up to 60 ms, which is no trouble

    @property
    def any(self) -> float:
        """How likely it is that one of them happens."""
        return self.slow + self.lost + self.unheard + self.late + self.twice


class Line:
    """The way of one process."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.process = process
        self.is_cut = False
        self.trouble_at = -1e9  # loop time of the last thing that was not, or will not be, as it should be

    def has_trouble(self, until: float) -> None:
        """Note that not everything is as it should be, until a moment of the loop."""
        self.trouble_at = max(self.trouble_at, until)

    def ask(self, verb: str, statement: Callable[[SqlModel, float], Any]) -> asyncio.Future[Any]:
        """Send a statement; the answer comes, or an error, or silence for ten seconds."""
        world = self.world
        loop, dice, trouble = world.loop, world.dice, world.trouble
        answer: asyncio.Future[Any] = loop.create_future()
        if self.is_cut or world.is_down:
            self._fail(answer, 0.001 if dice.random() < 0.5 else GIVEN_UP_AFTER)
            return answer
        fate = dice.random()
        go, times, is_heard = 0.0002 + 0.001 * dice.random(), 1, True
        if fate < trouble.any:
            self.has_trouble(loop.elapsed)
            if fate < trouble.slow:
                go = 3 * dice.random() ** 3
            elif (fate := fate - trouble.slow) < trouble.lost:
                self._fail(answer, dice.choice((0.001, 0.5, GIVEN_UP_AFTER)))
                return answer
            elif (fate := fate - trouble.lost) < trouble.unheard:
                self._fail(answer, dice.choice((0.005, 0.5, GIVEN_UP_AFTER)))
                is_heard = False
            elif fate - trouble.unheard < trouble.late:
                self._fail(answer, 0.5)
                go = 60 * dice.random() ** 4
                if verb == "take":  # what it draws is looked for after pauses that grow, and found then
                    self.has_trouble(loop.elapsed + min(2 * go + LOOK_AGAIN, DONE_WITHIN))
            else:
                times = 2
                if verb == "take":  # it may draw each time, so it is said again only after an error
                    self._fail(answer, 0.5)
                    is_heard = False
        heard = answer if is_heard else None
        loop.call_later(go, self._execute, self.process.name, verb, statement, heard, times, context=world.context)
        return answer

    def _execute(
        self,
        owner: str,
        verb: str,
        statement: Callable[[SqlModel, float], Any],
        answer: asyncio.Future[Any] | None,
        times: int,
    ) -> None:
        world = self.world
        if world.is_down:
            if answer is not None:
                self._fail(answer, 0.001)
            return
        told = world.run(owner, verb, statement)
        if times > 1:
            world.run_again(owner, verb, statement)
        if answer is not None and not answer.done():
            dice, back = world.dice, 0.001
            if dice.random() < world.trouble.slow_back:
                back = 0.06
            world.loop.call_later(0.0002 + back * dice.random(), self._arrive, answer, *told, context=world.context)

    def _arrive(self, answer: asyncio.Future[Any], told: Any, receipt: Receipt) -> None:
        if self.is_cut:
            self._fail(answer, GIVEN_UP_AFTER)
        elif not answer.done():
            receipt.was_heard = True
            if receipt.was_forgotten:
                self.world.unsure(receipt.owner)
            answer.set_result(told)

    def _fail(self, answer: asyncio.Future[Any], after: float) -> None:
        self.has_trouble(self.world.loop.elapsed)
        self.world.loop.call_later(after, _refuse, answer, context=self.world.context)


class Receipt:
    """What became of a statement that was executed."""

    __slots__ = ("owner", "was_forgotten", "was_heard")

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.was_heard = False
        self.was_forgotten = False


class SimStore(PostgresLeases):
    """The same verbs, by one process's way."""

    def __init__(self, line: Line, now: Callable[[], float]) -> None:
        self._line = line
        self._now = now  # by the process's own clock

    async def begin(self, owner: str, version: str) -> None:
        """List an owner."""
        await self._line.ask("begin", lambda model, moment: model.begin(owner, version, moment))

    async def beat(self, owner: str, watermark: float, backlog: int, holds: str | None = None) -> Beat | None:
        """Say that an owner lives."""
        return await self._line.ask("beat", lambda model, moment: model.beat(owner, watermark, backlog, moment))

    async def take(self, owner: str, day: str, asks: Sequence[Sequence[Need]], share: float) -> Taken:
        """Draw room."""
        clock = self._now()
        take = self._line.world.take
        return await self._line.ask(
            "take",
            lambda model, moment: take(lambda: model.take_room(owner, day, asks, share, moment, clock), day, clock),
        )

    async def give_back(self, owner: str, returns: Sequence[Told]) -> int | None:
        """Set what an owner has given back."""
        return await self._line.ask("give_back", lambda model, moment: model.give_back(owner, returns, moment))

    async def set_again(self, owner: str, leases: Sequence[Told]) -> int | None:
        """Tell all leases of an owner anew."""
        process, forgotten = self._line.process, self._line.process.forgotten

        def set_again(model: SqlModel, moment: float) -> int | None:
            beat = model.set_again(owner, leases, moment)
            if beat is not None and owner == process.name:
                process.world.told_again(process, forgotten)  # not by what was said before, and comes late
            return beat

        return await self._line.ask("set_again", set_again)

    async def found_failover(self, known: float | None) -> float:
        """Note that the database forgot."""
        process, server = self._line.process, self._line.process.owner._server

        def found(model: SqlModel, moment: float) -> float:
            found_at, world = model.found_failover(known, moment), process.world
            if server == model.server and world.found_at is None:
                world.found_at = found_at if found_at >= model.server else moment
            return found_at

        return await self._line.ask("found_failover", found)

    async def end(self, owner: str) -> bool:
        """End an owner."""
        return await self._line.ask("end", lambda model, moment: model.end(owner, moment))

    async def insert(self, flusher: str, records: Sequence[UsageRecord]) -> tuple[list[UsageRecord], int | None]:
        """Insert rows; return the new ones and the flusher's beat."""
        return await self._line.ask(
            "insert", lambda model, moment: model.insert(flusher, records, today_at(moment).isoformat())
        )


def _refuse(answer: asyncio.Future[Any]) -> None:
    if not answer.done():
        answer.set_exception(ConnectionError("the database does not answer"))
