# What this process has drawn of budgets: a room for each scope, unit and day, and which of them are tight, to be looked
# at, or to be told to the database. Arithmetic alone; nothing here waits.
#
# Escrow (O'Neil, "The Escrow Transactional Method", 1986) with cumulative leases: ``granted`` comes in only as the
# database tells it, ``returned`` is ours to say and leaves the room before the database is told, and what is used or
# held never asks the database.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import islice

from billing.core.holds import OF_VALUES, HoldRequest
from billing.core.ids import EPOCH, day_of
from billing.quotas.lease_store import NANOUSD, TOKENS, Taken, Told

NOON = 43_200.0  # seconds of a day
HORIZON = 3600.0  # seconds of recent spending that a lease is made for
RECENT = 60.0  # seconds that "recent" looks back
MOST_LOOKS = 1000  # scopes that one turn looks at: a millisecond; with more of them each has its turn less often


class Room:
    """One lease of this process: of a scope, a unit and a day. Whole tokens or nano-dollars."""

    __slots__ = (
        "day",
        "granted",
        "held",
        "hold",
        "is_recalled",
        "is_tight",
        "rate",
        "returned",
        "scope",
        "told",
        "unit",
        "used",
        "was",
    )

    def __init__(self, scope: str, unit: str, day: str) -> None:
        self.scope, self.unit, self.day = scope, unit, day
        self.granted = 0  # by the database, as last read
        self.returned = 0  # of these; cumulative, like all the next
        self.told = 0  # of these, what the database has acknowledged
        self.used = 0  # by calls of this process that have ended
        self.held = 0  # by calls that run
        self.hold = 0  # the largest of late
        self.rate = 0.0  # used a second, of late
        self.was = 0  # used by the last turn
        self.is_tight = False  # nothing is kept that is not used
        self.is_recalled = False  # the bell rang since we asked last: an answer may be older than that

    @property
    def free(self) -> int:
        """What calls may still hold; below zero where they were billed for more than was held."""
        return self.granted - self.returned - self.used - self.held

    @property
    def size(self) -> int:
        """What is worth having free. Calls that begin together and run long have used nothing yet: by what they hold, a
        thousand of them ask ten times."""
        return max(int(self.rate * HORIZON), 4 * self.hold, self.held)

    def give_back(self, keep: int) -> bool:
        """Return what is free beyond ``keep``; whether the database has something to hear."""
        self.returned += max(0, self.free - keep)
        return self.returned > self.told

    def as_told(self) -> Told:
        """How the lease stands by our figures."""
        return Told(self.scope, self.unit, self.day, self.granted, self.returned)


Pair = tuple[Room, Room]  # of tokens and of money


class Rooms:
    """All rooms of one process."""

    def __init__(self) -> None:
        self.by_day: dict[int, dict[str, Pair]] = {}  # and scope
        self.tight: dict[Room, None] = {}
        self.untold: dict[Room, None] = {}  # what was returned of them is to be told
        self.for_tomorrow: dict[str, None] = {}  # scopes used since noon, without a lease for tomorrow
        self.forgotten = -1  # the last day whose rooms were let go: what they had used is not known any more
        self._looked_at: dict[tuple[int, str], float] = {}  # when; by day and scope of what is used, free or untold
        self._turned = 0.0  # seconds of all turns, by which that is told

    def of(self, request: HoldRequest) -> tuple[Pair, ...]:
        """Return the rooms of a call, by scope; made where they are missing."""
        day = day_of(request.request_id)
        try:
            rooms = self.by_day[day]
            return tuple([rooms[scope.name] for scope in request.scopes])
        except KeyError:
            return tuple([self.on(day, scope.name) for scope in request.scopes])

    def on(self, day: int, scope: str) -> Pair:
        """Return the rooms of a scope on a day; made where they are missing."""
        rooms = self.by_day.setdefault(day, {})
        if scope not in rooms:
            of = (EPOCH + timedelta(days=day)).isoformat()
            rooms[scope] = Room(scope, TOKENS, of), Room(scope, NANOUSD, of)
        return rooms[scope]

    def known(self, day: int, scopes: Iterable[str]) -> list[Room]:
        """Return those of these scopes that are there."""
        rooms = self.by_day.get(day, {})
        return [room for scope in scopes for room in rooms.get(scope, ())]

    def __iter__(self) -> Iterator[Room]:
        return (room for rooms in self.by_day.values() for pair in rooms.values() for room in pair)

    def take_in(self, taken: Taken, day: int, asked: Iterable[Room]) -> None:
        """Learn what the database says of our leases and their balances."""
        for row in taken.leases or ():
            pair = self.by_day.get(day, {}).get(row.scope)
            if pair is not None:
                room = pair[row.unit == NANOUSD]
                room.granted = max(room.granted, row.granted)
                self.look_at(day, row.scope)
        tight = {(balance.scope, balance.unit) for balance in taken.balances or () if balance.tight_for is not None}
        for room in asked:
            # Without a cap it has no balance to tell of.
            room.is_tight = room.is_recalled or (room.scope, room.unit) in tight
            if room.is_tight:
                self.tight[room] = None
            else:
                self.tight.pop(room, None)

    def recall(self, rooms: Iterable[Room]) -> None:
        """Keep nothing unused of these: their balances have become tight."""
        for room in rooms:
            self.tight[room] = None
            room.is_tight = room.is_recalled = True

    def give_back(self, rooms: Iterable[Room], keep: int = 0) -> None:
        """Return what is free of each beyond ``keep``."""
        for room in rooms:
            if room.give_back(keep):
                self.untold[room] = None

    def forget(self) -> None:
        """Begin with nothing, as another owner."""
        self.by_day, self.tight, self.untold, self._looked_at = {}, {}, {}, {}
        self.forgotten = -1

    def look_at(self, day: int, scope: str) -> None:
        """Look at the rooms of a scope from the next turn on."""
        self._looked_at.setdefault((day, scope), self._turned)

    def turn(self, seconds: float, now: float) -> None:
        """Look at rooms, so many seconds after the last look at some: learn how fast they are spent, and return what is
        too much.

        Not at those of which nothing is used, held, free or untold: they are looked at again from their next grant on.
        ``now``: unix seconds by the database.
        """
        self._turned += seconds
        today = int(now // 86_400)
        for key, last in tuple(islice(self._looked_at.items(), MOST_LOOKS)):  # those that have waited longest
            day, scope = key
            del self._looked_at[key]
            pair = self.by_day[day][scope]
            if self._look(pair, self._turned - last, day - today):
                self._looked_at[key] = self._turned
                if day == today and now % 86_400 >= NOON and any(room.rate for room in pair):
                    self.for_tomorrow[scope] = None
        for day in [day for day in self.by_day if day < today - 1]:
            self.forgotten = max(self.forgotten, day)
            rooms = self.by_day[day]
            for scope in [scope for scope in rooms if (day, scope) not in self._looked_at]:
                for room in rooms.pop(scope):
                    self.tight.pop(room, None)
            if not rooms:
                del self.by_day[day]

    def _look(self, pair: Pair, seconds: float, ahead: int) -> bool:
        """Look at a scope's rooms of a day, so many ahead, after so many seconds; whether to look again."""
        is_used = False
        for room in pair:
            room.rate += (max(0, room.used - room.was) / seconds - room.rate) * min(1.0, seconds / RECENT)
            room.was = room.used
            if room.rate * HORIZON < 1 or ahead < 0:
                room.rate, room.hold = 0.0, room.hold // 2
            if ahead < 0 or (ahead == 0 and room.is_tight):
                self.give_back((room,))
            elif ahead == 0 and room.free > 2 * room.size:
                self.give_back((room,), room.size)
            is_used = is_used or bool(room.rate or room.held or room.free > 0 or room.returned > room.told)
        return is_used

    def let_go(self, request: HoldRequest, is_unread: Callable[[str], bool]) -> None:
        """Forget rooms of end users and tags that nothing was drawn of, or names that callers make up would fill the
        memory. Not those of which an answer is on its way: ``is_unread``."""
        day = day_of(request.request_id)
        rooms = self.by_day.get(day, {})
        for scope in request.scopes:
            pair = rooms.get(scope.name, ())
            is_idle = not any(room.granted or room.held or room.used for room in pair)
            if scope.name.startswith(OF_VALUES) and is_idle and not is_unread(scope.name):
                rooms.pop(scope.name, None)
                self._looked_at.pop((day, scope.name), None)
                for room in pair:
                    self.tight.pop(room, None)
                    self.untold.pop(room, None)
