# Whose turn it is among batches, how many run at once, and when they will be done.

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.batch.estimate import requests_before, with_hurried
from gateway.batch.running.adaptive_concurrency import FIRST_REST, LONGEST_REST, MOST_LANES, ONCE_IN, Pace, Paces
from gateway.batch.turns import SHARES, Turns, Waiting
from tests.support.clock import SetClock


def waiting(
    batch_id: str, team: str = "t", priority: str = "normal", *, weight: float = 1, due: float = 0, left: int = 1
) -> Waiting:
    """Return a batch that has something to run."""
    return Waiting(
        batch_id=batch_id, team_id=team, weight=weight, priority=priority, expires_at=due, left=left, lane=batch_id
    )


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


def test_a_turn_that_comes_to_nothing_is_given_back() -> None:
    """What is put back costs its team no turn: its other batch and its neighbour's go on as before."""
    turns, broken = Turns(), waiting("broken", "a", due=0)
    good = [waiting("good", "a", due=1), waiting("other", "b")]
    found = Counter[str]()
    for _ in range(40):
        turns.took(broken, 3)
        for _ in range(3):
            turns.gave_back(broken)
        batch = turns.next(good)
        turns.took(batch, 1)
        found[batch.batch_id] += 1

    assert found == {"good": 20, "other": 20}


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
    clock.move(LONGEST_REST)
    assert pace.limit == 1


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
        return {each.batch_id: each.priority for each in with_hurried([much, low], rate, now)}

    assert priorities(0) == {"much": "normal", "low": "low"}
    assert priorities(2800) == {"much": "normal", "low": "low"}
    assert priorities(2900) == {"much": "normal", "low": "high"}
    assert priorities(2900, rate=2.0) == {"much": "normal", "low": "low"}
    assert priorities(9999, rate=None)["low"] == "low"


def test_a_congested_lane_slows_no_other() -> None:
    """Each has its own pace, which it keeps while others come; only the longest unused are forgotten."""
    clock = SetClock()
    paces = Paces(16, clock)
    for _ in range(20):
        paces.of("busy").was_too_much()
        clock.move(ONCE_IN)
    clock.move(LONGEST_REST)

    assert [paces.of(lane).limit for lane in ("busy", "other", "busy")] == [1, 8, 1]
    for number in range(MOST_LANES):
        paces.of(f"lane-{number}")
    assert paces.of("busy").limit == 8


def test_where_nothing_comes_through_a_lane_rests() -> None:
    """As many failures in a row as run at once, and it rests, longer each time: an hour's outage uses few tries up."""
    clock = SetClock()
    pace, tries = Pace(64, clock), 0
    for _ in range(36_000):
        for _ in range(pace.limit):
            pace.failed()
            pace.was_in_vain()
            tries += 1
        clock.move(0.1)
    assert 200 < tries < 400

    clock.move(LONGEST_REST)
    assert pace.limit == 1
    pace.went_well()
    pace.failed()
    pace.was_in_vain()
    assert pace.limit == 2
    for _ in range(2):
        pace.was_in_vain()
    assert pace.limit == 0
    clock.move(FIRST_REST)
    assert pace.limit == 2
