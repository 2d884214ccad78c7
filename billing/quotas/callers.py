# The callers of one process that wait for room: one ask for all of a team's, first come, first served, and a quarter of
# a second for what others hold unused.

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence

from msgspec import Struct

from billing.core.holds import HoldRequest, RefusedHold
from billing.core.ids import day_of
from billing.core.store_errors import is_without_schema
from billing.quotas.draws import Draws
from billing.quotas.holding import Holding
from billing.quotas.lease_store import Need, Taken
from billing.quotas.refusals import is_capped, refusal, too_many, unknown
from billing.quotas.returns import Returns
from billing.quotas.rooms import Room, Rooms
from billing.quotas.standing import Standing

WAIT_FOR_ROOM = 0.25  # seconds that a caller waits for room which other owners hold unused
ROOM_IS_THERE = 2.0  # seconds more, for room that came back while the answer was written, or is on its way
LEAST_ASKS = 3  # for the same
LONGEST_ASK = 3.0  # seconds between two answers; where they are more, this process stood still, and waited for nothing
ASK_AGAIN = 0.05  # seconds between asks for what was refused


class Waiting(Struct, eq=False):
    """A call that waits. ``answer`` gives the refusal, or None when it is held."""

    request: HoldRequest
    answer: asyncio.Future[RefusedHold | None]
    until: float  # loop time, as the next
    seen: float
    asked: int = 0  # times


class Callers:
    """Those who wait, by team."""

    def __init__(self, standing: Standing, rooms: Rooms, holding: Holding, draws: Draws, returns: Returns) -> None:
        self.waiting: dict[str, deque[Waiting]] = {}  # by team, first come, first served
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._left: dict[str, list[HoldRequest]] = {}  # by team: whose callers left while they waited
        self._standing = standing
        self._rooms = rooms
        self._holding = holding
        self._draws = draws
        self._returns = returns

    async def hold(self, request: HoldRequest) -> RefusedHold | None:
        """Hold a call with room that the database gives, or return why there is none."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        waiting = Waiting(request, loop.create_future(), now + WAIT_FOR_ROOM, now)
        self.waiting.setdefault(request.team_id, deque()).append(waiting)
        self.serve(request.team_id)
        if request.team_id not in self._asking:
            self._asking[request.team_id] = asyncio.create_task(self._ask_for(request.team_id))
        return await waiting.answer

    def leave(self, request: HoldRequest) -> None:
        """Forget what a caller wanted that left while it waited, as soon as no answer for its team is on its way."""
        self._left.setdefault(request.team_id, []).append(request)
        if request.team_id not in self._asking:
            self._let_go_of_left(request.team_id)

    def serve(self, team_id: str) -> None:
        """Let callers in that wait, as far as what has just become free reaches; first come, first served."""
        line = self.waiting.get(team_id)
        while line and (line[0].answer.done() or self._holding.try_hold(line[0].request)):
            served = line.popleft()
            if not served.answer.done():
                served.answer.set_result(None)

    async def _ask_for(self, team_id: str) -> None:
        """Ask for all callers of a team that wait, until none does."""
        line = self.waiting[team_id]
        try:
            while line:
                pause = await self.ask(line)
                self._let_go_of_left(team_id)
                if pause:  # calls that come within it share the next answer
                    await asyncio.sleep(pause)
        except BaseException as exc:
            lacks_schema = is_without_schema(exc)
            for waiting in line:
                if not waiting.answer.done() and not (lacks_schema and self._force(waiting)):
                    waiting.answer.set_exception(exc if isinstance(exc, Exception) else RuntimeError("leases ended"))
            if not lacks_schema:  # which each caller tells
                raise
        finally:
            del self.waiting[team_id], self._asking[team_id]
            self._let_go_of_left(team_id)

    async def ask(self, line: deque[Waiting]) -> float:
        """Ask once; return how long not to ask again, in seconds."""
        self.serve(line[0].request.team_id)
        if not line:
            return 0.0
        day = day_of(line[0].request.request_id)
        asked = [one for one in line if not one.answer.done() and day_of(one.request.request_id) == day]
        rooms = {room for one in asked for pair in self._rooms.of(one.request) for room in pair}
        for room in rooms:
            room.is_recalled = False
        before = _granted(rooms)
        taken = await self._draws.take(day, self.asks(asked))
        if taken is None or taken.refused is not None:
            for waiting in asked:
                self._end_without(waiting, taken)
            return 0.0
        has_grown = _granted(rooms) > before
        self._refuse_beyond(asked, taken.beyond)
        without = [waiting for waiting in asked if not waiting.answer.done() and not self._let_in(waiting)]
        for waiting in without:
            self._refuse_or_keep(waiting, taken)
        tight = [room for room in rooms if room.is_tight]
        self._rooms.give_back(tight)
        if self._rooms.untold:
            self._returns.tell_soon()
        pace = self._standing.pace
        if without and not has_grown:
            return max(ASK_AGAIN, pace)
        return pace if tight else 0.0

    def _let_in(self, waiting: Waiting) -> bool:
        """Hold a call if there is room, and tell its caller; return whether there was."""
        is_held = self._holding.try_hold(waiting.request)
        if is_held:
            waiting.answer.set_result(None)
        return is_held

    def _refuse_or_keep(self, waiting: Waiting, taken: Taken) -> None:
        """Refuse a call for which room did not come in its time, or cannot come; let others wait for the next ask."""
        of, is_slow = self._rooms.of(waiting.request), self._standing.pace > ASK_AGAIN
        why, may_come = refusal(waiting.request, of, taken, is_slow=is_slow)
        waiting.asked += 1
        now = asyncio.get_running_loop().time()
        if now - waiting.seen > LONGEST_ASK:
            waiting.until += now - waiting.seen
        waiting.seen = now
        # Where the room is there it is asked for again, however late it is: this process may have been stopped.
        is_there = why is None and (waiting.until + ROOM_IS_THERE > now or waiting.asked < LEAST_ASKS)
        if not may_come or not (is_there or waiting.until > now):
            self._refuse(waiting, why or unknown(waiting.request))

    def asks(self, asked: Sequence[Waiting]) -> Iterator[list[Need]]:
        """Yield what each call lacks after those before it. The first asks for as much as is worth having, and of rooms
        that have that already for nothing, however often a tight one beside them is asked for."""
        free: dict[Room, int] = {}
        for waiting in asked:
            request, needs = waiting.request, []
            for pair, amounts in zip(self._rooms.of(request), request.amounts, strict=True):
                for room, amount in zip(pair, amounts, strict=True):
                    is_first = room not in free
                    room.hold = max(room.hold, amount)
                    left = free.get(room, room.free)
                    need = max(0, amount - left)
                    free[room] = left + need - amount
                    want = max(need, amount + room.size - left) if is_first and not room.is_tight else need
                    needs.append(Need(room.scope, room.unit, need, want, amount, room.granted == 0))
            yield needs

    def _end_without(self, waiting: Waiting, taken: Taken | None) -> None:
        """Answer a caller to whom the database gave nothing: who has no cap needs none, others cannot be let in."""
        if waiting.answer.done():
            return
        if self._let_in(waiting):
            return
        if (taken is not None and taken.refused == "ended") or not self._force(waiting):
            self._refuse(waiting, unknown(waiting.request))

    def _force(self, waiting: Waiting) -> bool:
        """Hold a call that has no cap, and tell its caller; return whether it has none."""
        if any(map(is_capped, waiting.request.scopes)):
            return False
        self._holding.force(waiting.request)
        waiting.answer.set_result(None)
        return True

    def _refuse_beyond(self, asked: Iterable[Waiting], beyond: Collection[str]) -> None:
        """Refuse the calls of end users or tags of whom their team has too many."""
        for waiting in asked:
            scope = next((scope for scope in waiting.request.scopes if scope.name in beyond), None)
            if scope is not None and not waiting.answer.done():
                self._refuse(waiting, too_many(scope))

    def _refuse(self, waiting: Waiting, why: RefusedHold) -> None:
        waiting.answer.set_result(why)
        self._let_go(waiting.request)

    def _let_go_of_left(self, team_id: str) -> None:
        for request in self._left.pop(team_id, ()):
            self._let_go(request)

    def _let_go(self, request: HoldRequest) -> None:
        if not self._draws.late:
            self._rooms.let_go(request, self._draws.is_unread)


def _granted(rooms: Iterable[Room]) -> int:
    return sum(room.granted for room in rooms)
