# The leases of this process, as calls and the beat of its owner speak to them. Holding and settling is arithmetic over
# rooms (holding.py, rooms.py): a call waits for the database only where its process has no room for it (callers.py,
# draws.py), and what is not used goes back (returns.py).

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from itertools import chain, islice

import msgspec

from billing.core.edges import Clock
from billing.core.holds import HoldRequest, RefusedHold
from billing.quotas.callers import Callers
from billing.quotas.draws import Draws
from billing.quotas.holding import MOST_TOLD, Held, Holding
from billing.quotas.lease_store import Need, PostgresLeases
from billing.quotas.returns import Returns
from billing.quotas.rooms import NOON, Room, Rooms
from billing.quotas.standing import Standing

TOMORROW_AT_ONCE = 5  # scopes, each second: what was used in the last hour is done long before midnight


class Leases(Standing):
    """The leases of one process; single-threaded. Only ``hold``, ``take_tomorrow`` and verbs of ``returns`` and of
    ``draws`` do I/O; all but the first raise what the database raises."""

    def __init__(self, store: PostgresLeases, clock: Clock, owner: str, *, share: float) -> None:
        super().__init__(store, clock, owner, share=share)
        self.rooms = Rooms()
        self.holding = Holding(self.rooms)
        self.returns = Returns(self, self.rooms)
        self.draws = Draws(self, self.rooms, self.returns)
        self.callers = Callers(self, self.rooms, self.holding, self.draws, self.returns)
        self._lately: tuple[set[Room] | None, ...] = ()  # of calls that ended before the last beats; None: too many

    def try_hold(self, request: HoldRequest) -> bool:
        """Hold what the request may cost in all of its scopes, if this process has the room."""
        return not self.callers.waiting.get(request.team_id) and self.holding.try_hold(request)

    async def hold(self, request: HoldRequest) -> RefusedHold | None:
        """Hold it with room that the database gives, or return why there is none. Waits a quarter of a second for room
        that others hold unused."""
        try:
            return await self.callers.hold(request)
        except asyncio.CancelledError:
            self.release(request.request_id)
            self.callers.leave(request)
            raise

    def settle(self, request_id: str, tokens: int, nanousd: int, model: str = "") -> None:
        """Put what a call used in place of what it held; of limits of a model, only of the one that answered. Once,
        however often it is said."""
        settled = self.holding.settle(request_id, tokens, nanousd, model)
        if settled is None:
            return
        team_id, is_tight = settled
        if team_id in self.callers.waiting:
            self.callers.serve(team_id)
        if is_tight:
            self.returns.return_soon()

    def release(self, request_id: str) -> None:
        """Give a hold back: the call cost nothing."""
        self.settle(request_id, 0, 0)

    def holds(self) -> str | None:
        """Return as JSON what is used and held of each room that calls hold a part of, or have used in the last seconds
        and may not be booked, for people who ask what is left; ``None`` where that would be too much to tell."""
        self._lately = (*self._lately[-2:], _rooms_of(self.holding.ended))
        self.holding.ended.clear()
        rooms: set[Room] = set()
        for some in (_rooms_of(self.holding.calls.values()), *self._lately):
            if some is None or len(rooms := rooms | some) > MOST_TOLD:
                return None
        told = {f"{room.scope} {room.unit} {room.day}": room.used + room.held for room in rooms}
        return msgspec.json.encode(told).decode()

    def recall(self, scopes: Iterable[str]) -> None:
        """Keep nothing unused for these scopes: their balances have become tight."""
        wanted = tuple(scopes)
        self.rooms.recall([room for day in self.rooms.by_day for room in self.rooms.known(day, wanted)])
        self.returns.return_tight()

    def turn(self, seconds: float, now: float | None = None) -> None:
        """Look at leases, as once a second: learn how fast they are spent, and return what is too much. ``now``: unix
        seconds by the database, whatever our own clock shows."""
        self.rooms.turn(seconds, self.clock.now() if now is None else now)
        self.returns.tell_soon()

    async def take_tomorrow(self, most: int = TOMORROW_AT_ONCE) -> None:
        """From noon on, draw tomorrow's leases with today's, some each second: a database that is away at midnight then
        leaves room."""
        now, rooms = self.clock.now(), self.rooms
        today = int(now // 86_400)
        if now % 86_400 < NOON or not self.may_ask:
            return
        for scope in tuple(islice(rooms.for_tomorrow, most)):
            del rooms.for_tomorrow[scope]
            if scope in rooms.by_day.get(today + 1, ()):
                continue
            used = [room for room in rooms.known(today, (scope,)) if not room.is_tight]
            asks = [Need(scope, room.unit, 0, room.size, room.hold) for room in used]
            rooms.on(today + 1, scope)
            if asks:
                await self.draws.draw(today + 1, [asks])
                self.returns.return_tight()  # the bell may have rung while the answer was on its way

    def leave(self) -> None:
        """Return everything that no running call holds; nothing is held from now on."""
        self.may_ask = False
        self.return_idle()

    def return_idle(self) -> None:
        """Return everything that no running call holds, and what those leave until an answer tells what is tight."""
        self.rooms.recall(self.rooms)
        self.rooms.give_back(self.rooms)

    def forget(self) -> None:
        """Begin with nothing, as another owner: what runs is settled where it was held."""
        self.rooms.forget()
        self.draws.unread = {}
        self.count_from(0)


def _rooms_of(calls: Collection[Held]) -> set[Room] | None:
    return {room for held in calls for room in chain(*held.rooms)} if len(calls) < MOST_TOLD else None
