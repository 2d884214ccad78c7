# When a batch gives way to people at a commercial model, and how its pace falls and rises; on the test's own clock.

from __future__ import annotations

import pytest

from gateway.batch.running.adaptive_concurrency import LONGEST_REST, Paces
from gateway.batch.running.backpressure import Spell, Usual, has_risen, usual_of
from tests.support.clock import SetClock


def spell(p90_ms: float | None = 400.0, calls: int = 50, refused: int = 0) -> Spell:
    """Return what people met in a while."""
    return Spell(target="t", calls=calls, p90_ms=p90_ms, tries=max(calls, 50), refused=refused)


def test_what_is_usual_is_what_the_better_spells_had() -> None:
    """Hours with batches in them do not become the measure; spells of few calls tell nothing."""
    spells = [spell(ms) for ms in (390, 400, 410, 420, 900, 900, 900, 900)]

    assert usual_of([*spells, spell(1.0, calls=3)]) == Usual(410)
    assert usual_of([spell(400, calls=9), spell(None, calls=0)]) == Usual(None, 0.0)
    assert [usual_of(spells).refusals for spells in ([], [spell(refused=10), spell(refused=5)])] == [0.0, 0.1]


@pytest.mark.parametrize(
    ("now", "usual", "risen"),
    [
        (spell(601), Usual(400), True),
        (spell(599), Usual(400), False),
        (spell(149), Usual(20), False),  # nobody notices so little
        (spell(151), Usual(20), True),
        (spell(9000, calls=9), Usual(400), None),  # too few to tell
        (spell(9000), Usual(None), False),  # as slow as it is, it may always be
        (spell(refused=2), Usual(400), True),  # two of fifty
        (spell(refused=1), Usual(400), False),
        (spell(refused=5), Usual(400, 0.05), False),  # as usual
        (spell(refused=6), Usual(400, 0.05), True),
        (spell(None, calls=0, refused=50), Usual(None), True),
    ],
)
def test_people_wait_when_it_is_longer_than_usual(now: Spell, usual: Usual, risen: bool | None) -> None:
    """By the time to the first token, or by rate limits."""
    assert has_risen(now, usual) is risen


def test_a_pace_gives_way_at_once_and_comes_back_step_by_step() -> None:
    """Halved each time, never to nothing; held while people wait, though its own answers come; other lanes go on."""
    paces = Paces(16, SetClock())
    slow, other = paces.of("slow"), paces.of("other")
    for _ in range(1000):
        slow.went_well()
        other.went_well()

    seen = []
    for _ in range(6):
        slow.give_way()
        paces.hold({"slow"})
        slow.went_well()
        seen.append(slow.limit)
    assert (seen, other.limit) == ([8, 4, 2, 1, 1, 1], 16)
    paces.hold(set())
    for _ in range(4):
        slow.went_well()
    assert slow.limit == 3


def test_failures_in_a_row_lower_a_pace_and_a_single_one_does_not() -> None:
    """A model that answers 503 is asked by fewer at once, the longer it does."""
    clock = SetClock()
    pace = Paces(16, clock).of("lane")
    for _ in range(200):
        pace.failed()
        pace.went_well()
        clock.move(1)
    assert pace.limit == 16
    pace.failed()
    pace.failed()
    assert pace.limit == 11
    for _ in range(20):
        pace.failed()
        clock.move(1)
    clock.move(LONGEST_REST)
    assert pace.limit == 1
