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
    QueuedCall,
    Slot,
    SlotPool,
    SlotQueues,
)

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.5, "d": 0.25}
PER_TEAM = 5
SIZE = MOST_BYTES // 3 - 1  # bytes of the larger requests: three of a team's may wait
WAIT = 10.0
teams = st.sampled_from(sorted(WEIGHTS))
priorities = st.sampled_from(sorted(LAGS))


class SlotQueuesMachine(RuleBasedStateMachine):
    """Calls come for one or both of two targets, hold slots, wait and leave; limits move."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.queues = SlotQueues(PER_TEAM, WAIT)
        self.pools = (SlotPool("one", 2), SlotPool("two", 1))
        self.most = dict.fromkeys(self.pools, 2)  # slots held at once, so far
        self.longest = dict.fromkeys(self.pools, FIRST_GUESS)  # seconds that a slot was held, or charged for
        self.held: list[Slot] = []
        self.waiting: list[QueuedCall] = []
        self.gone: list[QueuedCall] = []

    @rule(
        team=teams,
        priority=priorities,
        is_batch=st.booleans(),
        wanted=st.sampled_from([(0,), (1,), (0, 1), (1, 0)]),
        size=st.sampled_from([0, 0, SIZE]),
    )
    def come(self, team: str, priority: str, is_batch: bool, wanted: tuple[int, ...], size: int) -> None:
        """A call takes the first free slot of its route, else waits, else is refused."""
        pools = [self.pools[place] for place in wanted]
        free = next((pool for pool in pools if pool.has_free), None)
        if free is not None:
            self.held.append(free.give(team, WEIGHTS[team], is_batch, self.now))
            return
        before = [queued.size for queued in self.waiting if queued.team == team]
        queued = self.queues.join(team, WEIGHTS[team], is_batch, priority, pools, self.now, size)
        assert (queued is None) == (len(before) == PER_TEAM or sum(before) + size > MOST_BYTES)
        if queued is not None:
            self.waiting.append(queued)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A running call ends; its slot goes on. Giving it back again changes nothing."""
        slot = data.draw(st.sampled_from(self.held))
        self.held.remove(slot)
        self.longest[slot.pool] = max(self.longest[slot.pool], self.now - slot.since)
        self.hand_out(self.queues.release(slot, self.now))
        assert self.queues.release(slot, self.now) == []

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A client leaves, or its time is over; leaving again changes nothing."""
        queued = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(queued)
        self.gone.append(queued)
        self.queues.leave(queued)
        self.queues.leave(queued)

    @rule(place=st.integers(0, 1), limit=st.integers(0, 4))
    def resize(self, place: int, limit: int) -> None:
        """A target has more slots than before, or fewer."""
        self.hand_out(self.queues.resize(self.pools[place], limit, self.now))

    @rule(seconds=st.floats(0.0, 8.0))
    def pass_time(self, seconds: float) -> None:
        """Calls run on."""
        self.now += seconds
        for slot in self.held:
            self.longest[slot.pool] = max(self.longest[slot.pool], self.now - slot.since)

    def hand_out(self, admitted: list[QueuedCall]) -> None:
        for queued in admitted:
            assert queued.slot is not None and queued.slot.pool in queued.pools
            self.waiting.remove(queued)
            self.held.append(queued.slot)

    @invariant()
    def nobody_waits_while_a_slot_is_free(self) -> None:
        assert not any(pool.has_free for queued in self.waiting for pool in queued.pools)

    @invariant()
    def slots_and_queues_are_bounded(self) -> None:
        for pool in self.pools:
            held = [slot for slot in self.held if slot.pool is pool]
            assert set(held) == set(pool.held)
            self.most[pool] = max(self.most[pool], len(held))
            queued_here = [queued for queued in self.waiting if pool in queued.pools]
            assert len(queued_here) == len(pool.interactive.calls) + len(pool.batch.calls)
        for team in WEIGHTS:
            assert sum(queued.team == team for queued in self.waiting) == self.queues.waiting[team] <= PER_TEAM

    @invariant()
    def who_left_holds_nothing(self) -> None:
        assert all(queued.slot is None for queued in self.gone)

    @invariant()
    def counters_of_those_who_wait_are_close(self) -> None:
        """The bound of fair_queue.py, for every two teams in every queue."""
        for pool in self.pools:
            worst = self.most[pool] * self.longest[pool]
            for queue in (pool.interactive, pool.batch):
                for one, other in combinations(queue.counters().values(), 2):
                    bound = worst * (1 / one.weight + 1 / other.weight)
                    assert abs(one.served - other.served) <= bound + 1e-6


SlotQueuesMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestSlotQueues = SlotQueuesMachine.TestCase


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=2, max_size=5),
    slots=st.integers(1, 8),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_backlogged_teams_are_served_by_weight(weights: list[float], slots: int, data: st.DataObject) -> None:
    """While all of them wait, slot-time over weight differs by no more than twice the bound, however long calls are."""
    lengths = st.sampled_from([0.05, 0.4, 1.0, 2.0, 6.0])
    queues, pool, now = SlotQueues(3, WAIT), SlotPool("one", slots), 0.0
    served = dict.fromkeys(range(len(weights)), 0.0)  # slot-seconds over weight of calls that ended
    ends: list[tuple[float, int, int, Slot]] = []
    numbers = count()

    def start(team: int, slot: Slot) -> None:
        ends.append((now + data.draw(lengths), next(numbers), team, slot))

    for _ in range(slots):
        start(0, pool.give("0", weights[0], False, now))
    for team, weight in enumerate(weights):
        for _ in range(3):
            assert queues.join(str(team), weight, False, "normal", [pool], now) is not None
    for _ in range(120):
        ending = min(ends)
        ends.remove(ending)
        before, (now, _, team, slot) = now, ending
        assert now >= before
        served[team] += (now - slot.since) / weights[team]
        for queued in queues.release(slot, now):
            winner = int(queued.team)
            assert queued.slot is not None
            start(winner, queued.slot)
            assert queues.join(queued.team, weights[winner], False, "normal", [pool], now) is not None

    bound = 2 * slots * 6.0
    for one, other in combinations(served, 2):
        # What runs when the count ends is in the counters, not in ``served``: once more C·D each.
        assert abs(served[one] - served[other]) <= (bound + slots * 6.0) * (1 / weights[one] + 1 / weights[other])


def turn_by_turn(queues: SlotQueues, slot: Slot, seconds: float, times: int) -> list[QueuedCall]:
    """End the one running call again and again, ``seconds`` after it began; return who went, in order."""
    went: list[QueuedCall] = []
    now = slot.since
    for _ in range(times):
        now += seconds
        [queued] = queues.release(slot, now)
        assert queued.slot is not None
        went.append(queued)
        slot = queued.slot
    return went


def test_a_newcomer_goes_before_a_team_that_holds_much() -> None:
    """A team that begins to wait passes a flood of another team, however many of that wait and for how long."""
    queues, pool = SlotQueues(100, WAIT), SlotPool("one", 1)
    slot = pool.give("flood", 1.0, False, 0.0)
    for _ in range(50):
        queues.join("flood", 1.0, False, "high", [pool], 0.0)
    queues.join("quiet", 1.0, False, "low", [pool], 0.5)

    assert turn_by_turn(queues, slot, 1.0, 1)[0].team == "quiet"


def test_what_was_not_used_is_no_credit() -> None:
    """A team that comes back after an hour of the other's work takes turns as an equal, not twenty in a row."""
    queues, pool = SlotQueues(1000, WAIT), SlotPool("one", 1)
    queues.release(pool.give("b", 1.0, False, 0.0), 1.0)
    slot = pool.give("a", 1.0, False, 1.0)
    for _ in range(400):
        queues.join("a", 1.0, False, "normal", [pool], 1.0)
    slot = turn_by_turn(queues, slot, 10.0, 360)[-1].slot
    assert slot is not None
    for _ in range(20):
        queues.join("b", 1.0, False, "normal", [pool], slot.since)

    went = [queued.team for queued in turn_by_turn(queues, slot, 10.0, 20)]
    assert 9 <= went.count("b") <= 11


def test_use_of_what_was_free_is_no_debt() -> None:
    """A team that had all slots to itself for an hour takes turns as an equal once somebody else waits."""
    queues, pool = SlotQueues(100, WAIT), SlotPool("one", 1)
    now = 0.0
    for _ in range(360):
        now += 10.0
        queues.release(pool.give("a", 1.0, False, now - 10.0), now)
    slot = pool.give("a", 1.0, False, now)
    for _ in range(20):
        queues.join("a", 1.0, False, "normal", [pool], now)
        queues.join("b", 1.0, False, "normal", [pool], now)

    went = [queued.team for queued in turn_by_turn(queues, slot, 10.0, 20)]
    assert 9 <= went.count("a") <= 11


def test_long_calls_count_as_what_they_are() -> None:
    """A team whose calls run for a minute gets as much slot-time as one whose calls run for a second."""
    queues, pool, now = SlotQueues(500, WAIT), SlotPool("one", 4), 0.0
    lengths, used = {"long": 60.0, "short": 1.0}, {"long": 0.0, "short": 0.0}
    running = [pool.give("short", 1.0, False, now) for _ in range(4)]
    owner = dict.fromkeys(running, "short")
    for _ in range(300):
        for team in lengths:
            queues.join(team, 1.0, False, "normal", [pool], now)
    while now < 3000.0:
        slot = min(owner, key=lambda slot: slot.since + lengths[owner[slot]])
        team = owner.pop(slot)
        now = slot.since + lengths[team]
        used[team] += lengths[team]
        for queued in queues.release(slot, now):
            assert queued.slot is not None
            owner[queued.slot] = queued.team
            queues.join(queued.team, 1.0, False, "normal", [pool], now)

    assert 0.9 < used["long"] / used["short"] < 1.2


def test_priorities_order_a_team_and_let_no_call_starve() -> None:
    """High before normal before low, within a team; who waited for long goes before what comes later."""
    queues, pool = SlotQueues(100, WAIT), SlotPool("one", 1)
    slot = pool.give("a", 1.0, False, 0.0)
    came = {priority: queues.join("a", 1.0, False, priority, [pool], 0.0) for priority in ("low", "normal", "high")}
    late = queues.join("a", 1.0, False, "high", [pool], 1.0 + LAGS["low"] * WAIT)

    went = turn_by_turn(queues, slot, 0.1, 4)
    assert went == [came["high"], came["normal"], came["low"], late]


def test_batch_waits_for_interactive_and_does_not_starve() -> None:
    """Interactive calls go first; once a batch call has waited half of the longest wait, it is its turn soon."""
    queues, pool, now = SlotQueues(1000, WAIT), SlotPool("one", 1), 0.0
    slot = pool.give("a", 1.0, False, now)
    queues.join("b", 1.0, True, "normal", [pool], now)
    went: list[tuple[float, bool]] = []
    while now < 2 * WAIT:
        queues.join("a", 1.0, False, "normal", [pool], now)
        now += 0.5
        [queued] = queues.release(slot, now)
        assert queued.slot is not None
        slot = queued.slot
        went.append((now, queued.is_batch))

    first = next(moment for moment, is_batch in went if is_batch)
    assert AGES_AFTER * WAIT <= first <= AGES_AFTER * WAIT + 0.5 * (EVERY + 1)


def test_overtime_is_charged_while_it_runs() -> None:
    """A team whose calls have held three of four slots for long waits for the fourth behind the others."""
    queues, pool = SlotQueues(100, WAIT), SlotPool("one", 4)
    for _ in range(3):
        pool.give("a", 1.0, False, 0.0)
    slot = pool.give("b", 1.0, False, 0.0)
    now = OVERTIME_EVERY
    for _ in range(12):
        queues.join("a", 1.0, False, "normal", [pool], now)
        queues.join("b", 1.0, False, "normal", [pool], now)
    went: list[str] = []
    for _ in range(10):
        now += 1.0
        [queued] = queues.release(slot, now)
        assert queued.slot is not None
        slot = queued.slot
        went.append(queued.team)

    assert went == ["b"] * 10


def test_an_honest_estimate_of_the_wait() -> None:
    """Turns ahead in one's own queue, at the pace of the slots, over one's share of the turns."""
    queues, pool = SlotQueues(100, WAIT), SlotPool("one", 2)
    for _ in range(2):
        pool.give("a", 1.0, False, 0.0)
    for _ in range(9):
        queues.join("a", 1.0, False, "normal", [pool], 0.0)

    assert queues.wait_expected("a", 1.0, False, [pool]) == 10 * FIRST_GUESS / 2
    assert queues.wait_expected("b", 1.0, False, [pool]) == 2 * FIRST_GUESS / 2
