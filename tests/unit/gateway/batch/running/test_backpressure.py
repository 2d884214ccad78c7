# When batches slow down for people at a commercial model, and how its limit falls and rises; on the test's own clock.

from __future__ import annotations

import pytest

from gateway.batch.running.adaptive_concurrency import LONGEST_PAUSE, ConcurrencyLimits
from gateway.batch.running.backpressure import Baseline, LatencySample, baseline_of, has_risen
from tests.support.clock import SetClock


def sample(p90_ms: float | None = 400.0, calls: int = 50, refused: int = 0) -> LatencySample:
    """Return what people met in a while."""
    return LatencySample(target="t", calls=calls, p90_ms=p90_ms, tries=max(calls, 50), refused=refused)


def test_what_is_usual_is_what_the_better_samples_had() -> None:
    """Hours with batches in them do not become the measure; samples of few calls tell nothing."""
    samples = [sample(ms) for ms in (390, 400, 410, 420, 900, 900, 900, 900)]

    assert baseline_of([*samples, sample(1.0, calls=3)]) == Baseline(410)
    assert baseline_of([sample(400, calls=9), sample(None, calls=0)]) == Baseline(None, 0.0)
    assert [baseline_of(samples).refusals for samples in ([], [sample(refused=10), sample(refused=5)])] == [0.0, 0.1]


@pytest.mark.parametrize(
    ("now", "baseline", "risen"),
    [
        (sample(601), Baseline(400), True),
        (sample(599), Baseline(400), False),
        (sample(149), Baseline(20), False),  # too little to notice
        (sample(151), Baseline(20), True),
        (sample(9000, calls=9), Baseline(400), None),  # too few to tell
        (sample(9000), Baseline(None), False),  # as slow as it is, it may always be
        (sample(refused=2), Baseline(400), True),  # two of fifty
        (sample(refused=1), Baseline(400), False),
        (sample(refused=5), Baseline(400, 0.05), False),  # as usual
        (sample(refused=6), Baseline(400, 0.05), True),
        (sample(None, calls=0, refused=50), Baseline(None), True),
    ],
)
def test_people_wait_when_it_is_longer_than_usual(now: LatencySample, baseline: Baseline, risen: bool | None) -> None:
    """By the time to the first token, or by rate limits."""
    assert has_risen(now, baseline) is risen


def test_a_limit_falls_at_once_and_comes_back_step_by_step() -> None:
    """Halved each time, never to nothing; frozen while people wait, though its own answers come; other groups go on."""
    limits = ConcurrencyLimits(16, SetClock())
    slow, other = limits.of("slow"), limits.of("other")
    for _ in range(1000):
        slow.succeeded()
        other.succeeded()

    seen = []
    for _ in range(6):
        slow.slow_down()
        limits.freeze({"slow"})
        slow.succeeded()
        seen.append(slow.current)
    assert (seen, other.current) == ([8, 4, 2, 1, 1, 1], 16)
    limits.freeze(set())
    for _ in range(4):
        slow.succeeded()
    assert slow.current == 3


def test_failures_in_a_row_lower_a_limit_and_a_single_one_does_not() -> None:
    """A model that answers 503 is asked by fewer at once, the longer it does."""
    clock = SetClock()
    limit = ConcurrencyLimits(16, clock).of("group")
    for _ in range(200):
        limit.failed()
        limit.succeeded()
        clock.move(1)
    assert limit.current == 16
    limit.failed()
    limit.failed()
    assert limit.current == 11
    for _ in range(20):
        limit.failed()
        clock.move(1)
    clock.move(LONGEST_PAUSE)
    assert limit.current == 1
