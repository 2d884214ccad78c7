# Whose turn it is among batches, how many run at once, and when they will be done.

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.batch.estimate import requests_before
from gateway.batch.pace import MOST_LANES, ONCE_IN, Pace, Paces
from gateway.batch.turns import SHARES, Turns, Waiting
from tests.support.clock import SetClock


def waiting(batch_id: str, team: str = "t", priority: str = "normal", *, weight: float = 1, due: float = 0) -> Waiting:
    """Return a batch that has something to run."""
    return Waiting(batch_id=batch_id, team_id=team, weight=weight, priority=priority, expires_at=due, lane=batch_id)


def taken(turns: Turns, batches: list[Waiting], count: int) -> Counter[str]:
    """Take turns and return how many each batch had."""
    found = Counter[str]()
    for _ in range(count):
        batch = turns.next(batches)
        turns.took(batch, 1)
        found[batch.batch_id] += 1
    return found


def test_priorities_share_and_low_ones_still_move() -> None:
    """Of thirteen turns eight are for high, four for normal, one for low."""
    batches = [waiting(priority, priority=priority) for priority in SHARES]

    assert taken(Turns(), batches, 130) == {"high": 80, "normal": 40, "low": 10}


def test_a_team_with_many_batches_has_no_more_turns() -> None:
    """Teams take turns, by their weights; a team's own batches go by their deadlines."""
    many = [waiting(f"a{number}", "a", due=number) for number in range(9)]
    batches = [*many, waiting("b", "b"), waiting("c", "c", weight=2)]

    assert taken(Turns(), batches, 40) == {"a0": 10, "b": 10, "c": 20}


@given(st.lists(st.integers(0, 2), min_size=20, max_size=200))
def test_who_comes_back_has_no_credit_for_its_absence(absences: list[int]) -> None:
    """Among two teams of one weight that both wait, neither is ever two turns ahead since both were there."""
    turns, both = Turns(), [waiting("a", "a"), waiting("b", "b")]
    ahead = 0
    for absent in absences:
        present = [batch for place, batch in enumerate(both) if place != absent]
        batch = turns.next(present)
        turns.took(batch, 1)
        if len(present) < 2:
            ahead = 0
            continue
        ahead += 1 if batch.batch_id == "a" else -1
        assert abs(ahead) <= 2


def test_the_pace_rises_slowly_and_falls_at_once() -> None:
    """A limit's worth of answers raises it by about one; congestion lowers it, once a second, never to nothing."""
    clock = SetClock()
    pace = Pace(16, clock)
    for _ in range(9):
        pace.went_well()
    assert pace.limit == 9
    for _ in range(1000):
        pace.went_well()
    assert pace.limit == 16

    pace.was_too_much()
    pace.was_too_much()
    assert pace.limit == 11
    for _ in range(50):
        clock.move(ONCE_IN)
        pace.was_too_much()
    assert pace.limit == 1


def test_an_estimate_counts_what_comes_before() -> None:
    """All of the same priority that wait, and of the others what their shares allow meanwhile."""
    idle = {"high": 0, "normal": 0, "low": 0}

    assert requests_before(100, "normal", idle) == 100
    assert requests_before(100, "normal", idle | {"normal": 300}) == 400
    assert requests_before(100, "normal", idle | {"high": 1000, "low": 1000}) == 100 + 200 + 25
    assert requests_before(100, "low", idle | {"high": 50}) == 150


def test_a_congested_lane_slows_no_other() -> None:
    """Each has its own pace, which it keeps while others come; only the longest unused are forgotten."""
    clock = SetClock()
    paces = Paces(16, clock)
    for _ in range(20):
        paces.of("busy").was_too_much()
        clock.move(ONCE_IN)

    assert [paces.of(lane).limit for lane in ("busy", "other", "busy")] == [1, 8, 1]
    for number in range(MOST_LANES):
        paces.of(f"lane-{number}")
    assert paces.of("busy").limit == 8
