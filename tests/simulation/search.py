# Every order of what two owners may do with three calls in two scopes: each state is visited once, and in each the
# books are compared. The statements are the model's, holding and settling are the real leases'.
#
# What an owner sends lies on the wire until it is executed, now, late or never; so does what it is answered. An owner
# may give up and ask again, crash with calls held and rows unflushed, be adopted, and be ended. At most so many faults
# befall (an answer lost, an ask given up, a crash, a cap lowered), in all orders that there are.

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from billing.core.holds import HoldRequest, Leg, Limits, Scope
from billing.core.ids import uuid7
from billing.core.records import Status, UsageRecord
from billing.quotas.callers import Waiting
from billing.quotas.holding import Held
from billing.quotas.lease_store import NANOUSD, Need, Taken, Told
from billing.quotas.leases import Leases
from billing.quotas.rooms import Room
from tests.simulation import invariants
from tests.simulation.invariants import Broken
from tests.simulation.sql_model import SqlModel, day_text
from tests.support.clock import NOON, SetClock
from tests.support.factories import make_record

DAY = int(NOON // 86_400)
DAY_TEXT = day_text(DAY)
SCOPES = (Scope("team", "t", Limits(nanousd_per_day=10)), Scope("key", "k", Limits(nanousd_per_month=9)))
CALLS = ((4, 3), (4, 5), (3, 3))  # what each holds, and what it is billed for: the second for more than was held
OWNERS = ("a", "b")
PLACES = ((0,), (1,), (0, 1))  # at which owners each may be asked for
CAP_AFTER = 6  # of the team, when somebody lowers it
ASKS = 2  # times that a call is asked for, at most
WANT = 2  # beyond the need, of a first ask

NEW, ASKING, HELD, CLOSED, WRITTEN, OVER = range(6)


class Call(Struct, frozen=True):
    """One call: how far it is, and with which owner."""

    state: int = NEW
    owner: int = -1
    asked: int = 0
    cost: int = 0


class Owner(Struct, frozen=True):
    """One owner: what its process knows of its two leases. ``rooms``: granted, returned, used, held, excess of each."""

    is_alive: bool = True
    is_ended: bool = False
    rooms: tuple[tuple[int, int, int, int, int], ...] = ((0, 0, 0, 0, 0), (0, 0, 0, 0, 0))


class State(Struct, frozen=True):
    """All there is. ``wire``: statements and answers on their way, each with how often it may still arrive."""

    calls: tuple[Call, ...]
    owners: tuple[Owner, ...]
    wire: tuple[tuple[Any, ...], ...] = ()
    is_lowered: bool = False
    faults: int = 0  # that may still befall
    tables: tuple[dict, ...] = ()

    def key(self) -> Any:
        """What makes it another state: not beats, nor when an owner was seen."""
        owners, balances, leases, _, rows = self.tables
        return (
            self.calls, self.owners, self.wire, self.is_lowered, self.faults,
            tuple(sorted(balances.items(), key=_first)), tuple(sorted(leases.items(), key=_first)), frozenset(rows),
            tuple(row.ended_at is None for row in owners.values()),
        )  # fmt: skip


class Search:
    """The search, of so many calls and faults."""

    def __init__(self, *, calls: int, faults: int) -> None:
        self.calls = calls
        self.faults = faults
        self.model = SqlModel()
        self.model.on_grant = self._check_grant
        self.visited = 0
        self.requests = [_request(number, hold) for number, (hold, _) in enumerate(CALLS)]
        self._broken: Broken | None = None

    def run(self, most: int = 10_000_000) -> int:
        """Visit every state; return how many there are. Raises ``Broken`` with the way to the first that is."""
        model = self.model
        for owner in OWNERS:
            model.begin(owner, "search", NOON)
        for scope in SCOPES:
            limits = scope.limits
            model.set_limits(
                scope.name,
                {
                    name: cap
                    for name in ("nanousd_per_day", "nanousd_per_month")
                    if (cap := getattr(limits, name)) is not None
                },
                NOON,
            )
        first = State((Call(),) * self.calls, (Owner(),) * len(OWNERS), faults=self.faults, tables=self._dump())
        seen = {first.key()}
        queue: deque[tuple[State, Any]] = deque([(first, None)])
        while queue and len(seen) < most:
            state, way = queue.popleft()
            for name, after in self._steps(state):
                if (key := after.key()) not in seen:
                    seen.add(key)
                    queue.append((after, (name, way)))
                    try:
                        self._check(after)
                    except Broken as exc:
                        raise Broken(exc.number, f"{exc} after {' → '.join(_way((name, way)))}") from exc
        self.visited = len(seen)
        return self.visited

    # -- what can happen

    def _steps(self, state: State) -> Iterator[tuple[str, State]]:
        for number, call in enumerate(state.calls):
            yield from self._steps_of_call(state, number, call)
        for at, owner in enumerate(state.owners):
            yield from self._steps_of_owner(state, at, owner)
        for message in state.wire:
            yield from self._arrive(state, message)
        if not state.is_lowered and state.faults:
            self._load(state)
            self.model.set_limits(SCOPES[0].name, {"nanousd_per_day": CAP_AFTER}, NOON)
            yield "lower the cap", _fault(replace(state, is_lowered=True, tables=self._dump()))

    def _steps_of_call(self, state: State, number: int, call: Call) -> Iterator[tuple[str, State]]:
        if call.state == NEW and call.asked < ASKS:
            for at, owner in enumerate(state.owners):
                if owner.is_alive and not owner.is_ended and at in PLACES[number] and call.owner in (-1, at):
                    yield f"ask {number} at {OWNERS[at]}", self._ask(state, number, at)
        elif call.state == ASKING and state.faults:
            left = replace(call, state=NEW if call.asked < ASKS else OVER)
            yield f"give up {number}", _fault(_with_call(state, number, left))
        elif call.state == HELD:
            cost = CALLS[number][1]
            leases, owner = self._leases(state, call.owner), state.owners[call.owner]
            leases.settle(self.requests[number].request_id, 0, cost)
            over = max(0, cost - CALLS[number][0])
            rooms = tuple((*room[:4], room[4] + over) for room in _rooms_in(leases, owner))
            after = _with_owner(state, call.owner, replace(owner, rooms=rooms))
            yield f"close {number}", _with_call(after, number, replace(call, state=CLOSED, cost=cost))

    def _steps_of_owner(self, state: State, at: int, owner: Owner) -> Iterator[tuple[str, State]]:
        name = OWNERS[at]
        if owner.is_alive and not owner.is_ended:
            if state.faults:
                yield f"crash {name}", _fault(self._crash(state, at, owner))
            leases = self._leases(state, at)
            if sum(room.give_back(0) for room in _money(leases)):
                message = "give", at, tuple(room.returned for room in _money(leases))
                after = _with_owner(state, at, replace(owner, rooms=_rooms_in(leases, owner)))
                if not any(one[:2] == message[:2] for one in state.wire):
                    yield f"return of {name}", _sent(after, message)
        waits = [number for number, call in enumerate(state.calls) if call.owner == at and call.state == CLOSED]
        by = next((one for one, other in enumerate(state.owners) if other.is_alive), None)
        if by is not None and waits and (owner.is_alive or by != at):
            after = self._flush(state, at if owner.is_alive else by, waits)
            if state.faults:
                yield f"flush {name} unheard", _fault(after)
            for number in waits:
                after = _with_call(after, number, replace(after.calls[number], state=WRITTEN))
            yield f"flush {name}", after
        busy = any(call.owner == at and call.state in (ASKING, HELD, CLOSED) for call in state.calls)
        if not owner.is_ended and not busy and (not owner.is_alive or _any_over(state, at)):
            self._load(state)
            self.model.end(name, NOON)
            after = _with_owner(state, at, replace(owner, is_ended=True))
            yield f"end {name}", replace(after, tables=self._dump())

    def _arrive(self, state: State, message: tuple[Any, ...]) -> Iterator[tuple[str, State]]:
        kind, at = message[0], message[1]
        rest = _without(state, message)
        if kind == "take":
            self._load(state)
            number, needs = message[2], message[3]
            taken = self._say("take", lambda: self.model.take_room(OWNERS[at], DAY_TEXT, [needs], 0.5, NOON, NOON))
            after = replace(rest, tables=self._dump())
            call = state.calls[number]
            if call.state == ASKING and call.owner == at and state.owners[at].is_alive:
                yield f"take for {number}", _sent(after, ("taken", at, number, _answer(taken)))
            else:  # too late for whom asked
                yield f"take for {number}, late", after
        elif kind == "taken" and state.owners[at].is_alive:
            number = message[2]
            leases, call = self._leases(state, at), state.calls[number]
            leases.rooms.take_in(Taken(leases=message[3]), DAY, ())
            held = call.state == ASKING and leases.holding.try_hold(self.requests[number])
            after = _with_owner(rest, at, replace(state.owners[at], rooms=_rooms_in(leases, state.owners[at])))
            if call.state == ASKING:
                after = _with_call(after, number, replace(call, state=HELD if held else OVER))
            yield f"hear of {number}", after
        elif kind == "give":
            self._load(state)
            told = [
                Told(scope.name, NANOUSD, DAY_TEXT, 0, returned)
                for scope, returned in zip(SCOPES, message[2], strict=True)
            ]
            self._say("give_back", lambda: self.model.give_back(OWNERS[at], told, NOON))
            yield f"return of {OWNERS[at]} arrives", replace(rest, tables=self._dump())
            self._say("give_back", lambda: self.model.give_back(OWNERS[at], told, NOON))
            self._guard(lambda: invariants.check_again(self.model, "give_back"))
            yield f"return of {OWNERS[at]} arrives, and again", replace(rest, tables=self._dump())

    def _ask(self, state: State, number: int, at: int) -> State:
        leases, call = self._leases(state, at), replace(state.calls[number], owner=at)
        request = self.requests[number]
        if leases.holding.try_hold(request):
            after = _with_owner(state, at, replace(state.owners[at], rooms=_rooms_in(leases, state.owners[at])))
            return _with_call(after, number, replace(call, state=HELD))
        needs = next(leases.callers.asks([Waiting(request, None, 0.0, 0.0)]))  # type: ignore[arg-type]
        wanted = tuple(replace(need, want=need.need + WANT) for need in needs if need.unit == NANOUSD)
        after = _with_call(state, number, replace(call, state=ASKING, asked=call.asked + 1))
        return _sent(after, ("take", at, number, wanted))

    def _crash(self, state: State, at: int, owner: Owner) -> State:
        after = _with_owner(state, at, replace(owner, is_alive=False, rooms=Owner().rooms))
        for number, call in enumerate(state.calls):
            if call.owner == at and call.state in (NEW, ASKING):
                after = _with_call(after, number, replace(call, state=OVER))
            elif call.owner == at and call.state == HELD:  # it will have broken off, and cost nothing
                after = _with_call(after, number, replace(call, state=CLOSED, cost=0))
        return replace(after, wire=tuple(one for one in after.wire if one[:2] != ("taken", at)))

    def _flush(self, state: State, by: int, numbers: list[int]) -> State:
        self._load(state)
        rows = [self._row(number, state.calls[number]) for number in numbers]
        self._say("insert", lambda: self.model.insert(OWNERS[by], rows, DAY_TEXT))
        return replace(state, tables=self._dump())

    def _row(self, number: int, call: Call) -> UsageRecord:
        return make_record(
            self.requests[number].request_id, team_id="t", key_id="k", owner=OWNERS[call.owner], input_tokens=0,
            cached_input_tokens=0, output_tokens=0, cost_nanousd=call.cost,
            status=Status.ANSWERED if call.cost else Status.FAILED,
        )  # fmt: skip

    # -- what must hold

    def _check(self, state: State) -> None:
        if self._broken is not None:
            raise self._broken
        self._load(state)
        model = self.model
        invariants.check_books(model)
        for at, owner in enumerate(state.owners):
            for scope, (_, _, used, held, excess) in zip(SCOPES, owner.rooms, strict=True):
                lease = model.leases.get((OWNERS[at], scope.name, NANOUSD, DAY_TEXT), invariants.NOTHING)
                if used + held - excess > max(0, lease.granted - lease.returned):
                    raise Broken(3, f"{OWNERS[at]} uses {used} and holds {held} of {scope.name} {lease}")
                if owner.is_ended and lease.granted - lease.returned != lease.spent:
                    raise Broken(6, f"{OWNERS[at]} has ended with {lease}")
        spent = sum(row.cost_nanousd for row in model.rows.values())
        for scope in SCOPES:
            of_scope = sum(lease.spent for key, lease in model.leases.items() if key[1] == scope.name)
            if of_scope != spent:
                raise Broken(4, f"rows have spent {spent}, leases of {scope.name} {of_scope}")
        missing = [call for call in state.calls if call.state == WRITTEN]
        if len(model.rows) < len(missing):
            raise Broken(4, "a call that was heard to be written has no row")

    def _say(self, verb: str, statement: Any) -> Any:
        answer = statement()
        self._guard(lambda: invariants.check_statement(self.model, verb))
        return answer

    def _check_grant(self, owner: str, needs: list[Need], amounts: list[int], day: str, share: float) -> None:
        self._guard(lambda: invariants.check_grant(self.model, owner, needs, amounts, day, share))

    def _guard(self, check: Any) -> None:
        try:
            check()
        except Broken as exc:
            self._broken = self._broken or exc

    # -- states to objects, and back

    def _load(self, state: State) -> None:
        model = self.model
        model.owners, model.balances, model.leases, model.limits, model.rows = map(dict, state.tables)
        model.daily = {}

    def _dump(self) -> tuple[dict, ...]:
        model = self.model
        tables = model.owners, model.balances, model.leases, model.limits, model.rows
        model._undo.clear()
        return tuple(dict(table) for table in tables)

    def _leases(self, state: State, at: int) -> Leases:
        leases = Leases(None, SetClock(), OWNERS[at], share=0.5)  # type: ignore[arg-type]
        pairs = []
        for scope, (granted, returned, used, held, _) in zip(SCOPES, state.owners[at].rooms, strict=True):
            of_money = Room(scope.name, NANOUSD, DAY_TEXT)
            of_money.granted, of_money.returned, of_money.used, of_money.held = granted, returned, used, held
            pairs.append((Room(scope.name, "tokens", DAY_TEXT), of_money))
            leases.rooms.by_day.setdefault(DAY, {})[scope.name] = pairs[-1]
        for number, call in enumerate(state.calls):
            if call.owner == at and call.state == HELD:
                request_id = self.requests[number].request_id
                leases.holding.calls[request_id] = Held("t", tuple(pairs), ((0, CALLS[number][0]),) * 2, SCOPES)
        return leases


def _money(leases: Leases) -> list[Room]:
    return [leases.rooms.by_day[DAY][scope.name][1] for scope in SCOPES]


def _rooms_in(leases: Leases, before: Owner) -> tuple[tuple[int, int, int, int, int], ...]:
    return tuple(
        (room.granted, room.returned, room.used, room.held, old[4])
        for room, old in zip(_money(leases), before.rooms, strict=True)
    )


def _answer(taken: Taken) -> Any:
    return tuple(row for row in taken.leases or () if row.unit == NANOUSD)


def _any_over(state: State, at: int) -> bool:
    return any(call.owner == at and call.state >= WRITTEN for call in state.calls)


def _fault(state: State) -> State:
    return replace(state, faults=state.faults - 1)


def _with_call(state: State, number: int, call: Call) -> State:
    return replace(state, calls=(*state.calls[:number], call, *state.calls[number + 1 :]))


def _with_owner(state: State, at: int, owner: Owner) -> State:
    return replace(state, owners=(*state.owners[:at], owner, *state.owners[at + 1 :]))


def _sent(state: State, message: tuple[Any, ...]) -> State:
    return replace(state, wire=tuple(sorted((*state.wire, message), key=repr)))


def _without(state: State, message: tuple[Any, ...]) -> State:
    wire = list(state.wire)
    wire.remove(message)
    return replace(state, wire=tuple(wire))


def _first(item: tuple[Any, Any]) -> Any:
    return item[0]


def _request(number: int, hold: int) -> HoldRequest:
    return HoldRequest(
        request_id=uuid7(int(NOON * 1000), number), team_id="t", scopes=SCOPES, legs=(Leg("m", 0, hold),)
    )


def _way(way: Any) -> list[str]:
    names = []
    while way is not None:
        name, way = way
        names.append(name)
    return names[::-1]
