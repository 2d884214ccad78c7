# Slots and turns under any order of events: bounded, work-conserving, fair within the bound that fair_queue.py derives,
# and nobody starves. After every step the books are checked.

from __future__ import annotations

from itertools import combinations, count

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.overload.slots import (
    AGES_AFTER,
    EVERY,
    FIRST_GUESS,
    LAGS,
    MOST_BYTES,
    OVERTIME_EVERY,
    Room,
    Slot,
    Ticket,
    Turns,
)

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.5, "d": 0.25}
PER_TEAM = 5
SIZE = MOST_BYTES // 3 - 1  # bytes of the larger requests: three of a team's may wait
WAIT = 10.0
teams = st.sampled_from(sorted(WEIGHTS))
priorities = st.sampled_from(sorted(LAGS))


class TurnsMachine(RuleBasedStateMachine):
    """Calls come for one or both of two targets, hold slots, wait and leave; limits move."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.turns = Turns(PER_TEAM, WAIT)
        self.rooms = (Room("one", 2), Room("two", 1))
        self.most = dict.fromkeys(self.rooms, 2)  # slots held at once, so far
        self.longest = dict.fromkeys(self.rooms, FIRST_GUESS)  # seconds that a slot was held, or charged for
        self.held: list[Slot] = []
        self.waiting: list[Ticket] = []
        self.gone: list[Ticket] = []

    @rule(
        team=teams,
        priority=priorities,
        is_batch=st.booleans(),
        wanted=st.sampled_from([(0,), (1,), (0, 1), (1, 0)]),
        size=st.sampled_from([0, 0, SIZE]),
    )
    def come(self, team: str, priority: str, is_batch: bool, wanted: tuple[int, ...], size: int) -> None:
        """A call takes the first free slot of its route, else waits, else is refused."""
        rooms = [self.rooms[place] for place in wanted]
        free = next((room for room in rooms if room.has_free), None)
        if free is not None:
            self.held.append(free.give(team, WEIGHTS[team], is_batch, self.now))
            return
        before = [ticket.size for ticket in self.waiting if ticket.team == team]
        ticket = self.turns.join(team, WEIGHTS[team], is_batch, priority, rooms, self.now, size)
        assert (ticket is None) == (len(before) == PER_TEAM or sum(before) + size > MOST_BYTES)
        if ticket is not None:
            self.waiting.append(ticket)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A running call ends; its slot goes on. Giving it back again changes nothing."""
        slot = data.draw(st.sampled_from(self.held))
        self.held.remove(slot)
        self.longest[slot.room] = max(self.longest[slot.room], self.now - slot.since)
        self.hand_out(self.turns.release(slot, self.now))
        assert self.turns.release(slot, self.now) == []

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A client leaves, or its time is over; leaving again changes nothing."""
        ticket = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(ticket)
        self.gone.append(ticket)
        self.turns.leave(ticket)
        self.turns.leave(ticket)

    @rule(place=st.integers(0, 1), limit=st.integers(0, 4))
    def resize(self, place: int, limit: int) -> None:
        """A target has more slots than before, or fewer."""
        self.hand_out(self.turns.resize(self.rooms[place], limit, self.now))

    @rule(seconds=st.floats(0.0, 8.0))
    def pass_time(self, seconds: float) -> None:
        """Calls run on."""
        self.now += seconds
        for slot in self.held:
            self.longest[slot.room] = max(self.longest[slot.room], self.now - slot.since)

    def hand_out(self, lucky: list[Ticket]) -> None:
        for ticket in lucky:
            assert ticket.slot is not None and ticket.slot.room in ticket.rooms
            self.waiting.remove(ticket)
            self.held.append(ticket.slot)

    @invariant()
    def nobody_waits_while_a_slot_is_free(self) -> None:
        assert not any(room.has_free for ticket in self.waiting for room in ticket.rooms)

    @invariant()
    def slots_and_queues_are_bounded(self) -> None:
        for room in self.rooms:
            held = [slot for slot in self.held if slot.room is room]
            assert set(held) == set(room.held)
            self.most[room] = max(self.most[room], len(held))
            lined = [ticket for ticket in self.waiting if room in ticket.rooms]
            assert len(lined) == len(room.interactive.tickets) + len(room.batch.tickets)
        for team in WEIGHTS:
            assert sum(ticket.team == team for ticket in self.waiting) == self.turns.waiting[team] <= PER_TEAM

    @invariant()
    def who_left_holds_nothing(self) -> None:
        assert all(ticket.slot is None for ticket in self.gone)

    @invariant()
    def counters_of_those_who_wait_are_close(self) -> None:
        """The bound of fair_queue.py, for every two teams in every line."""
        for room in self.rooms:
            worst = self.most[room] * self.longest[room]
            for line in (room.interactive, room.batch):
                for one, other in combinations(line.counters().values(), 2):
                    bound = worst * (1 / one.weight + 1 / other.weight)
                    assert abs(one.served - other.served) <= bound + 1e-6


TurnsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestTurns = TurnsMachine.TestCase


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=2, max_size=5),
    slots=st.integers(1, 8),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_backlogged_teams_are_served_by_weight(weights: list[float], slots: int, data: st.DataObject) -> None:
    """While all of them wait, slot-time over weight differs by no more than twice the bound, however long calls are."""
    lengths = st.sampled_from([0.05, 0.4, 1.0, 2.0, 6.0])
    turns, room, now = Turns(3, WAIT), Room("one", slots), 0.0
    served = dict.fromkeys(range(len(weights)), 0.0)  # slot-seconds over weight of calls that ended
    ends: list[tuple[float, int, int, Slot]] = []
    numbers = count()

    def start(team: int, slot: Slot) -> None:
        ends.append((now + data.draw(lengths), next(numbers), team, slot))

    for _ in range(slots):
        start(0, room.give("0", weights[0], False, now))
    for team, weight in enumerate(weights):
        for _ in range(3):
            assert turns.join(str(team), weight, False, "normal", [room], now) is not None
    for _ in range(120):
        ending = min(ends)
        ends.remove(ending)
        before, (now, _, team, slot) = now, ending
        assert now >= before
        served[team] += (now - slot.since) / weights[team]
        for ticket in turns.release(slot, now):
            winner = int(ticket.team)
            assert ticket.slot is not None
            start(winner, ticket.slot)
            assert turns.join(ticket.team, weights[winner], False, "normal", [room], now) is not None

    bound = 2 * slots * 6.0
    for one, other in combinations(served, 2):
        # What runs when the count ends is in the counters, not in ``served``: once more C·D each.
        assert abs(served[one] - served[other]) <= (bound + slots * 6.0) * (1 / weights[one] + 1 / weights[other])


def turn_by_turn(turns: Turns, slot: Slot, seconds: float, times: int) -> list[Ticket]:
    """End the one running call again and again, ``seconds`` after it began; return who went, in order."""
    went: list[Ticket] = []
    now = slot.since
    for _ in range(times):
        now += seconds
        [ticket] = turns.release(slot, now)
        assert ticket.slot is not None
        went.append(ticket)
        slot = ticket.slot
    return went


def test_a_newcomer_goes_before_whoever_holds_much() -> None:
    """A team that begins to wait passes a flood of another team, however many of that wait and for how long."""
    turns, room = Turns(100, WAIT), Room("one", 1)
    slot = room.give("flood", 1.0, False, 0.0)
    for _ in range(50):
        turns.join("flood", 1.0, False, "high", [room], 0.0)
    turns.join("quiet", 1.0, False, "low", [room], 0.5)

    assert turn_by_turn(turns, slot, 1.0, 1)[0].team == "quiet"


def test_what_was_not_used_is_no_credit() -> None:
    """A team that comes back after an hour of the other's work takes turns as an equal, not twenty in a row."""
    turns, room = Turns(1000, WAIT), Room("one", 1)
    turns.release(room.give("b", 1.0, False, 0.0), 1.0)
    slot = room.give("a", 1.0, False, 1.0)
    for _ in range(400):
        turns.join("a", 1.0, False, "normal", [room], 1.0)
    slot = turn_by_turn(turns, slot, 10.0, 360)[-1].slot
    assert slot is not None
    for _ in range(20):
        turns.join("b", 1.0, False, "normal", [room], slot.since)

    went = [ticket.team for ticket in turn_by_turn(turns, slot, 10.0, 20)]
    assert 9 <= went.count("b") <= 11


def test_use_of_what_was_free_is_no_debt() -> None:
    """A team that had all slots to itself for an hour takes turns as an equal once somebody else waits."""
    turns, room = Turns(100, WAIT), Room("one", 1)
    now = 0.0
    for _ in range(360):
        now += 10.0
        turns.release(room.give("a", 1.0, False, now - 10.0), now)
    slot = room.give("a", 1.0, False, now)
    for _ in range(20):
        turns.join("a", 1.0, False, "normal", [room], now)
        turns.join("b", 1.0, False, "normal", [room], now)

    went = [ticket.team for ticket in turn_by_turn(turns, slot, 10.0, 20)]
    assert 9 <= went.count("a") <= 11


def test_long_calls_count_as_what_they_are() -> None:
    """A team whose calls run for a minute gets as much slot-time as one whose calls run for a second."""
    turns, room, now = Turns(500, WAIT), Room("one", 4), 0.0
    lengths, used = {"long": 60.0, "short": 1.0}, {"long": 0.0, "short": 0.0}
    running = [room.give("short", 1.0, False, now) for _ in range(4)]
    owner = dict.fromkeys(running, "short")
    for _ in range(300):
        for team in lengths:
            turns.join(team, 1.0, False, "normal", [room], now)
    while now < 3000.0:
        slot = min(owner, key=lambda slot: slot.since + lengths[owner[slot]])
        team = owner.pop(slot)
        now = slot.since + lengths[team]
        used[team] += lengths[team]
        for ticket in turns.release(slot, now):
            assert ticket.slot is not None
            owner[ticket.slot] = ticket.team
            turns.join(ticket.team, 1.0, False, "normal", [room], now)

    assert 0.9 < used["long"] / used["short"] < 1.2


def test_priorities_order_a_team_and_let_nobody_starve() -> None:
    """High before normal before low, within a team; who waited for long goes before what comes later."""
    turns, room = Turns(100, WAIT), Room("one", 1)
    slot = room.give("a", 1.0, False, 0.0)
    came = {priority: turns.join("a", 1.0, False, priority, [room], 0.0) for priority in ("low", "normal", "high")}
    late = turns.join("a", 1.0, False, "high", [room], 1.0 + LAGS["low"] * WAIT)

    went = turn_by_turn(turns, slot, 0.1, 4)
    assert went == [came["high"], came["normal"], came["low"], late]


def test_batch_waits_for_interactive_and_does_not_starve() -> None:
    """Interactive calls go first; once a batch call has waited half of the longest wait, it is its turn soon."""
    turns, room, now = Turns(1000, WAIT), Room("one", 1), 0.0
    slot = room.give("a", 1.0, False, now)
    turns.join("b", 1.0, True, "normal", [room], now)
    went: list[tuple[float, bool]] = []
    while now < 2 * WAIT:
        turns.join("a", 1.0, False, "normal", [room], now)
        now += 0.5
        [ticket] = turns.release(slot, now)
        assert ticket.slot is not None
        slot = ticket.slot
        went.append((now, ticket.is_batch))

    first = next(moment for moment, is_batch in went if is_batch)
    assert AGES_AFTER * WAIT <= first <= AGES_AFTER * WAIT + 0.5 * (EVERY + 1)


def test_overtime_is_charged_while_it_runs() -> None:
    """A team whose calls have held three of four slots for long waits for the fourth behind the others."""
    turns, room = Turns(100, WAIT), Room("one", 4)
    for _ in range(3):
        room.give("a", 1.0, False, 0.0)
    slot = room.give("b", 1.0, False, 0.0)
    now = OVERTIME_EVERY
    for _ in range(12):
        turns.join("a", 1.0, False, "normal", [room], now)
        turns.join("b", 1.0, False, "normal", [room], now)
    went: list[str] = []
    for _ in range(10):
        now += 1.0
        [ticket] = turns.release(slot, now)
        assert ticket.slot is not None
        slot = ticket.slot
        went.append(ticket.team)

    assert went == ["b"] * 10


def test_an_honest_estimate_of_the_wait() -> None:
    """Turns ahead in one's own queue, at the pace of the slots, over one's share of the turns."""
    turns, room = Turns(100, WAIT), Room("one", 2)
    for _ in range(2):
        room.give("a", 1.0, False, 0.0)
    for _ in range(9):
        turns.join("a", 1.0, False, "normal", [room], 0.0)

    assert turns.wait_expected("a", 1.0, False, [room]) == 10 * FIRST_GUESS / 2
    assert turns.wait_expected("b", 1.0, False, [room]) == 2 * FIRST_GUESS / 2
