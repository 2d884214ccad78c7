# Whose turn it is among batches, how many run at once, and when they will be done.

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.batch.estimate import requests_before, with_raised_priorities
from gateway.batch.fair_schedule import SHARES, FairSchedule, RunnableBatch
from gateway.batch.running.adaptive_concurrency import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MOST_GROUPS,
    ONCE_IN,
    ConcurrencyLimit,
    ConcurrencyLimits,
)
from tests.support.clock import SetClock


def waiting(
    batch_id: str, team: str = "t", priority: str = "normal", *, weight: float = 1, due: float = 0, left: int = 1
) -> RunnableBatch:
    """Return a batch that has something to run."""
    return RunnableBatch(
        batch_id=batch_id,
        team_id=team,
        weight=weight,
        priority=priority,
        expires_at=due,
        left=left,
        concurrency_group=batch_id,
    )


def taken(schedule: FairSchedule, batches: list[RunnableBatch], count: int) -> Counter[str]:
    """Take turns and return how many each batch had."""
    found = Counter[str]()
    for _ in range(count):
        batch = schedule.next(batches)
        schedule.charge(batch, 1)
        found[batch.batch_id] += 1
    return found


def test_priorities_share_and_low_ones_still_move() -> None:
    """Of thirteen turns eight are for high, four for normal, one for low."""
    batches = [waiting(priority, priority=priority) for priority in SHARES]

    assert taken(FairSchedule(), batches, 130) == {"high": 80, "normal": 40, "low": 10}


def test_a_team_with_many_batches_has_no_more_turns() -> None:
    """Teams take turns, by their weights; a team's own batches go by their deadlines."""
    many = [waiting(f"a{number}", "a", due=number) for number in range(9)]
    batches = [*many, waiting("b", "b"), waiting("c", "c", weight=2)]

    assert taken(FairSchedule(), batches, 40) == {"a0": 10, "b": 10, "c": 20}


def test_a_turn_that_comes_to_nothing_is_given_back() -> None:
    """What is put back costs its team no turn: its other batch and its neighbour's go on as before."""
    schedule, broken = FairSchedule(), waiting("broken", "a", due=0)
    good = [waiting("good", "a", due=1), waiting("other", "b")]
    found = Counter[str]()
    for _ in range(40):
        schedule.charge(broken, 3)
        for _ in range(3):
            schedule.refund(broken)
        batch = schedule.next(good)
        schedule.charge(batch, 1)
        found[batch.batch_id] += 1

    assert found == {"good": 20, "other": 20}


@given(st.lists(st.integers(0, 2), min_size=20, max_size=200))
def test_who_comes_back_has_no_credit_for_its_absence(absences: list[int]) -> None:
    """Among two teams of one weight that both wait, neither is ever two turns ahead since both were there."""
    schedule, both = FairSchedule(), [waiting("a", "a"), waiting("b", "b")]
    ahead = 0
    for absent in absences:
        present = [batch for place, batch in enumerate(both) if place != absent]
        batch = schedule.next(present)
        schedule.charge(batch, 1)
        if len(present) < 2:
            ahead = 0
            continue
        ahead += 1 if batch.batch_id == "a" else -1
        assert abs(ahead) <= 2


def test_the_pace_rises_slowly_and_falls_at_once() -> None:
    """A limit's worth of answers raises it by about one; congestion lowers it, once a second, never to nothing."""
    clock = SetClock()
    limit = ConcurrencyLimit(16, clock)
    for _ in range(9):
        limit.succeeded()
    assert limit.current == 9
    for _ in range(1000):
        limit.succeeded()
    assert limit.current == 16

    limit.congested()
    limit.congested()
    assert limit.current == 11
    for _ in range(50):
        clock.move(ONCE_IN)
        limit.congested()
    clock.move(LONGEST_PAUSE)
    assert limit.current == 1


def test_an_estimate_counts_what_comes_before() -> None:
    """All of the same priority that wait, and of the others what their shares allow meanwhile."""
    idle = {"high": 0, "normal": 0, "low": 0}

    assert requests_before(100, "normal", idle) == 100
    assert requests_before(100, "normal", idle | {"normal": 300}) == 400
    assert requests_before(100, "normal", idle | {"high": 1000, "low": 1000}) == 100 + 200 + 25
    assert requests_before(100, "low", idle | {"high": 50}) == 150


def test_a_batch_that_would_end_late_goes_first() -> None:
    """A low one that at its share needs more than 70 % of what is left to it; one that has time stays where it is."""
    much = waiting("much", priority="normal", due=90_000, left=50_000)
    low = waiting("low", priority="low", due=10_000, left=1000)  # with 4,000 normal ones meanwhile: 5,000 seconds

    def priorities(now: float, rate: float | None = 1.0) -> dict[str, str]:
        return {each.batch_id: each.priority for each in with_raised_priorities([much, low], rate, now)}

    assert priorities(0) == {"much": "normal", "low": "low"}
    assert priorities(2800) == {"much": "normal", "low": "low"}
    assert priorities(2900) == {"much": "normal", "low": "high"}
    assert priorities(2900, rate=2.0) == {"much": "normal", "low": "low"}
    assert priorities(9999, rate=None)["low"] == "low"


def test_a_congested_group_slows_no_other() -> None:
    """Each has its own limit, which it keeps while others come; only the longest unused are forgotten."""
    clock = SetClock()
    limits = ConcurrencyLimits(16, clock)
    for _ in range(20):
        limits.of("busy").congested()
        clock.move(ONCE_IN)
    clock.move(LONGEST_PAUSE)

    assert [limits.of(group).current for group in ("busy", "other", "busy")] == [1, 8, 1]
    for number in range(MOST_GROUPS):
        limits.of(f"group-{number}")
    assert limits.of("busy").current == 8


def test_where_nothing_comes_through_a_group_pauses() -> None:
    """As many failures in a row as run at once, and it rests, longer each time: an hour's outage uses few tries up."""
    clock = SetClock()
    limit, tries = ConcurrencyLimit(64, clock), 0
    for _ in range(36_000):
        for _ in range(limit.current):
            limit.failed()
            limit.retried()
            tries += 1
        clock.move(0.1)
    assert 200 < tries < 400

    clock.move(LONGEST_PAUSE)
    assert limit.current == 1
    limit.succeeded()
    limit.failed()
    limit.retried()
    assert limit.current == 2
    for _ in range(2):
        limit.retried()
    assert limit.current == 0
    clock.move(FIRST_PAUSE)
    assert limit.current == 2
