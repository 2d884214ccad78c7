# Bugs, one or more for each invariant: what a hurried hand could have written. The simulation or the search must find
# every one of them.

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from billing.core.holds import HoldRequest
from billing.journal.owner_files import bury, dead
from billing.quotas.callers import Callers
from billing.quotas.draws import Draws
from billing.quotas.holding import Holding
from billing.quotas.leases import Leases
from billing.quotas.returns import Returns
from billing.quotas.rooms import Room, Rooms
from billing.upkeep.owner import Owner
from tests.simulation.network import Trouble
from tests.simulation.sql_model import BalanceRow, Lease, SqlModel, day_in, spent_by
from tests.simulation.story import FEW, Plan

Plant = Callable[[pytest.MonkeyPatch], None]
QUIET = Plan(faults=(), trouble=Trouble())
UNHEARD = Plan(calls=200, pause=1.0, faults=(), trouble=Trouble(unheard=0.02))
SLOW = Plan(faults=("limits",), fault_every=0.5, trouble=Trouble(slow_back=1.0))
CORRECTED = Plan(faults=("correct", "correct", "limits"), fault_every=0.5, trouble=Trouble())
DEATHS = Plan(faults=("die_unheard",), fault_every=2.0)


class Bug(Struct, frozen=True):
    """One bug, and the invariants of which one is the first to break. ``shows_in``: the world that is played first. It
    is found there; others are played where the story has changed since."""

    name: str
    numbers: tuple[int, ...]
    plant: Plant
    plan: Plan = Plan()
    shows_in: int = 0


def _cap_is_not_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SqlModel, "_fits", lambda *_: True)
    patch.setattr(SqlModel, "_may_fit", lambda *_: True)


def _correction_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BalanceRow, "left", property(lambda row: row.cap - row.drawn))


def _month_is_not_drawn(patch: pytest.MonkeyPatch) -> None:
    draw = SqlModel._draw

    def of_the_day(self: SqlModel, changes: Iterable[Any]) -> None:
        keys_of, self.keys_of = self.keys_of, lambda *room: keys_of(*room)[:1]  # type: ignore[method-assign]
        try:
            draw(self, changes)
        finally:
            del self.keys_of

    patch.setattr(SqlModel, "_draw", of_the_day)


def _returns_are_added(patch: pytest.MonkeyPatch) -> None:
    def give_back(self: SqlModel, owner: str, returns: Any, moment: float) -> int | None:
        told = []
        for one in returns:
            lease = self.leases.get((owner, one.scope, one.unit, one.day), Lease())
            told.append(replace(one, returned=lease.returned + one.returned))
        return give_back_once(self, owner, told, moment)

    give_back_once = SqlModel.give_back
    patch.setattr(SqlModel, "give_back", give_back)


def _setting_again_lowers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SqlModel, "_told_as", lambda self, lease, told: replace(lease, granted=told.granted))


def _grants_are_added(patch: pytest.MonkeyPatch) -> None:
    take_in = Rooms.take_in

    def add(self: Rooms, taken: Any, day: int, *rest: Any) -> None:
        before = {room: room.granted for room in self}
        take_in(self, taken, day, *rest)
        for room, granted in before.items():
            if room.granted > granted > 0:
                room.granted += granted

    patch.setattr(Rooms, "take_in", add)


def _returned_stays_in_use(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Room, "free", property(lambda room: room.granted - room.used - room.held))


def _rows_spend_each_time(patch: pytest.MonkeyPatch) -> None:
    insert = SqlModel.insert

    def again(self: SqlModel, flusher: str, records: Any, today: str) -> Any:
        known = [record for record in records if record.request_id in self.rows]
        answer = insert(self, flusher, records, today)
        for record in known:
            self.book_spent(flusher, dict(spent_by(record, day_in(record.request_id))))
        return answer

    patch.setattr(SqlModel, "insert", again)


def _rows_beyond_a_lease_are_not_forced(patch: pytest.MonkeyPatch) -> None:
    book = SqlModel.book_spent

    def inside(self: SqlModel, flusher: str, spent: Any) -> int | None:
        fitting = {}
        for key, amount in spent.items():
            lease = self.leases.get(key, Lease())
            if lease.returned + lease.spent + amount <= lease.granted:
                fitting[key] = amount
        return book(self, flusher, fitting)

    patch.setattr(SqlModel, "book_spent", inside)


def _month_is_not_corrected(patch: pytest.MonkeyPatch) -> None:
    correct = SqlModel.correct

    def of_the_day(self: SqlModel, *args: Any) -> None:
        keys_of, self.keys_of = self.keys_of, lambda *room: keys_of(*room)[:1]  # type: ignore[method-assign]
        try:
            correct(self, *args)
        finally:
            del self.keys_of

    patch.setattr(SqlModel, "correct", of_the_day)


def _ended_owners_keep_room(patch: pytest.MonkeyPatch) -> None:
    def end(self: SqlModel, owner: str, moment: float) -> bool:
        self._statement()
        row = self.owners.get(owner)
        if row is None or row.ended_at is not None:
            return False
        self._put(self.owners, owner, replace(row, ended_at=moment))
        return True

    patch.setattr(SqlModel, "end", end)


def _ended_owners_are_served(patch: pytest.MonkeyPatch) -> None:
    def touch(self: SqlModel, owner: str, **changes: float) -> int | None:
        row = self.owners.get(owner)
        if row is None:
            return None
        self._put(self.owners, owner, replace(row, beat=row.beat + 1, **changes))
        return row.beat + 1

    patch.setattr(SqlModel, "_touch", touch)


def _idle_room_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "recall", lambda *_: None)
    patch.setattr(Returns, "return_tight", lambda self: setattr(self, "_next", None))
    patch.setattr(Room, "give_back", lambda *_: False)


def _callers_wait_on(patch: pytest.MonkeyPatch) -> None:
    async def ask(self: Callers, line: Any) -> float:
        await asyncio.sleep(0.6)
        return await once(self, line)

    once = Callers.ask
    patch.setattr(Callers, "ask", ask)


def _share_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    def amount(self: SqlModel, need: Any, day: str, share: float) -> int:
        return max(0, need.need, min(need.want, *(balance.left for balance in self._known(need, day)), need.want))

    patch.setattr(SqlModel, "_amount", amount)


def _clocks_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    take_room = SqlModel.take_room

    def take(self: SqlModel, owner: str, day: str, asks: Any, share: float, moment: float, _: float) -> Any:
        return take_room(self, owner, day, asks, share, moment, moment)

    patch.setattr(SqlModel, "take_room", take)


def _grants_go_on_after_a_failover(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SqlModel, "_is_recovering", lambda *_: False)


def _failovers_are_not_noticed(patch: pytest.MonkeyPatch) -> None:
    async def recover(self: Owner, beat: Any) -> None:
        self._has_forgotten, self._set_again_for = False, beat.found_at

    patch.setattr(Owner, "_recover", recover)


def _unheard_grants_are_not_read(patch: pytest.MonkeyPatch) -> None:
    async def read_nothing(self: Draws) -> None:
        self.unread = {}

    patch.setattr(Draws, "read_again", read_nothing)


def _answers_overwrite_the_bell(patch: pytest.MonkeyPatch) -> None:
    def take_in(self: Rooms, taken: Any, day: int, asked: Iterable[Room]) -> None:
        rooms = list(asked)
        for room in rooms:
            room.is_recalled = False
        take_in_once(self, taken, day, rooms)

    take_in_once = Rooms.take_in
    patch.setattr(Rooms, "take_in", take_in)


def _limits_leave_balances_as_tight_as_they_were(patch: pytest.MonkeyPatch) -> None:
    def set_limits(self: SqlModel, scope: str, limits: dict[str, int], moment: float) -> None:
        before = {key: row.tight_since for key, row in self.balances.items()}
        set_once(self, scope, limits, moment)
        for key, row in tuple(self.balances.items()):
            if key[0] == scope and row.tight_since is None:
                self._put(self.balances, key, replace(row, tight_since=before[key]))

    set_once = SqlModel.set_limits
    patch.setattr(SqlModel, "set_limits", set_limits)


def _the_dead_are_not_delivered_again(patch: pytest.MonkeyPatch) -> None:
    async def end_dead(self: Owner) -> None:
        for one in dead(self._journal.directory):
            if one.is_carried:
                await self._store.end(one.name)
                bury(one.path, self._now())

    patch.setattr(Owner, "end_dead", end_dead)


def _the_next_failover_is_not_found(patch: pytest.MonkeyPatch) -> None:
    found_failover = SqlModel.found_failover

    def found(self: SqlModel, known: float | None, moment: float) -> float:
        found_at = self.failovers.get(1)
        return found_failover(self, None if found_at is not None and moment < found_at + 30 else known, moment)

    patch.setattr(SqlModel, "found_failover", found)


def _end_users_need_no_room(patch: pytest.MonkeyPatch) -> None:
    def try_hold(self: Holding, request: HoldRequest) -> bool:
        others = tuple(scope for scope in request.scopes if scope.kind != "user")
        rooms = self._rooms.of(replace(request, scopes=others))
        amounts = request.tokens, request.cost_nanousd
        if any(room.free < amount for pair in rooms for room, amount in zip(pair, amounts, strict=True)):
            return False
        self.enter(request, self._rooms.of(request), request.amounts)
        return True

    patch.setattr(Holding, "try_hold", try_hold)


def _rows_leave_end_users_out(patch: pytest.MonkeyPatch) -> None:
    book = SqlModel.book_spent

    def without(self: SqlModel, flusher: str, spent: Any) -> int | None:
        return book(self, flusher, {key: amount for key, amount in spent.items() if not key[1].startswith("user:")})

    patch.setattr(SqlModel, "book_spent", without)


FAILOVERS = Plan(faults=("fail_over", "fail_over", "crash", "down"), fault_every=2.0)

BUGS = (
    Bug("a grant does not read the cap", (1,), _cap_is_not_read),
    Bug("a grant does not count corrections", (1, 7), _correction_is_not_counted, CORRECTED),
    Bug("a grant draws on the day alone", (1,), _month_is_not_drawn),
    Bug("a return is added, not set", (2, 3), _returns_are_added),
    Bug("setting leases again lowers them", (2, 3, 4, 7), _setting_again_lowers, FAILOVERS),
    Bug("a process adds what it is told of a grant", (3,), _grants_are_added),
    Bug("a process uses what it has returned", (3,), _returned_stays_in_use),
    Bug("a row spends each time it is delivered", (2, 4), _rows_spend_each_time),
    Bug("a row beyond its lease is not booked", (3, 4), _rows_beyond_a_lease_are_not_forced),
    Bug("a row leaves its end user out", (3, 4, 6), _rows_leave_end_users_out),
    Bug("a call is let in without room for its end user", (3,), _end_users_need_no_room),
    Bug("a correction leaves its month as it is", (5,), _month_is_not_corrected, shows_in=11),
    Bug("an ended owner keeps its room", (6,), _ended_owners_keep_room),
    Bug(
        "an ended owner is served",
        (6,),
        _ended_owners_are_served,
        Plan(faults=("detach", "crash"), fault_every=1.5),
        shows_in=4,
    ),
    Bug("idle room is never given back", (6, 7), _idle_room_is_kept, QUIET),
    Bug("an unheard grant stays unknown", (7,), _unheard_grants_are_not_read, UNHEARD),
    Bug("an answer overwrites the bell", (7,), _answers_overwrite_the_bell, SLOW, shows_in=4),
    Bug("another limit leaves a balance tight", (7,), _limits_leave_balances_as_tight_as_they_were, FEW[0]),
    Bug("callers wait in vain", (7,), _callers_wait_on, QUIET),
    Bug("a lease takes all that is left", (8,), _share_is_not_kept),
    Bug("a clock that is off opens a day", (9,), _clocks_are_not_compared, Plan(faults=("skew",), fault_every=0.5)),
    Bug("grants go on after a failover", (10,), _grants_go_on_after_a_failover, FAILOVERS),
    Bug("the next failover is not found", (10,), _the_next_failover_is_not_found, FAILOVERS),
    Bug("the dead are not delivered again", (4, 6), _the_dead_are_not_delivered_again, DEATHS, shows_in=1),
    Bug("a failover is not noticed", (1, 3, 4, 6, 10), _failovers_are_not_noticed, FAILOVERS),
)

# Those that the search finds, too: no failovers, no clocks, no waiting.
IN_SEARCH = {
    "a grant does not read the cap",
    "a grant draws on the day alone",
    "a return is added, not set",
    "a process adds what it is told of a grant",
    "a process uses what it has returned",
    "a row spends each time it is delivered",
    "a row beyond its lease is not booked",
    "an ended owner keeps its room",
    "an ended owner is served",
    "a lease takes all that is left",
}
