# When a callback is tried again, and when never.

from __future__ import annotations

from itertools import pairwise

import pytest

from gateway.outbox.schedule import (
    FIRST_WAIT,
    KEEP_TRYING,
    LEAST_WAIT,
    LONGEST_WAIT,
    Delivered,
    DeliveryResult,
    GiveUp,
    NextStep,
    TryAgain,
    next_step,
)

FAILED = DeliveryResult(status=500)


def step(result: DeliveryResult, tries: int = 1, now: float = 0.0, dice: float = 1.0) -> NextStep:
    return next_step(result, tries, now, KEEP_TRYING, dice)


@pytest.mark.parametrize(
    ("status", "expected"), [(200, True), (204, True), (299, True), (301, False), (404, False), (None, False)]
)
def test_any_2xx_is_delivered(status: int | None, expected: bool) -> None:
    """Nothing else is: neither a redirect nor silence."""
    assert isinstance(step(DeliveryResult(status=status)), Delivered) == expected


def test_gone_is_the_end() -> None:
    """410 says that nobody wants it any more."""
    assert step(DeliveryResult(status=410, retry_after=5.0)) == GiveUp()


def test_waits_double_up_to_an_hour() -> None:
    """The most that each wait can be."""
    waits = [step(FAILED, tries).at for tries in range(1, 30)]  # type: ignore[union-attr]

    assert waits[0] == FIRST_WAIT
    assert all(later == min(2 * earlier, LONGEST_WAIT) for earlier, later in pairwise(waits))
    assert step(FAILED, 10_000) == TryAgain(LONGEST_WAIT)


def test_the_dice_spread_the_whole_wait() -> None:
    """Full jitter: anything from next to nothing to the most."""
    assert step(FAILED, 5, dice=0.0) == TryAgain(LEAST_WAIT)
    assert step(FAILED, 5, dice=0.5) == TryAgain(0.5 * FIRST_WAIT * 16)


@pytest.mark.parametrize(("asked", "wait"), [(600.0, 600.0), (86400.0, LONGEST_WAIT), (0.0, LEAST_WAIT)])
def test_retry_after_is_obeyed_within_bounds(asked: float, wait: float) -> None:
    """A receiver may ask for an hour at most."""
    assert step(DeliveryResult(status=503, retry_after=asked), dice=0.0) == TryAgain(wait)


def test_the_last_try_is_at_the_end_of_24_hours() -> None:
    """No wait leads past it, and after it there is none."""
    assert step(FAILED, 20, now=KEEP_TRYING - 1.5) == TryAgain(KEEP_TRYING)
    assert step(FAILED, 21, now=KEEP_TRYING) == GiveUp()
    assert step(DeliveryResult(status=200), 21, now=KEEP_TRYING + 1) == Delivered()
