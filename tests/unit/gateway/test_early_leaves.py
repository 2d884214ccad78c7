# How long a key waits whose calls are left before their first token.

from __future__ import annotations

import pytest

from billing.errors import RateLimited
from gateway.answering.early_leaves import FORGOTTEN, FREE, LONGEST, EarlyLeaves
from tests.support.clock import SetClock


def wait_of(leaves: EarlyLeaves) -> int:
    """Return for how long the key is refused; 0 where its call may run."""
    try:
        leaves.refuse("key")
    except RateLimited as exc:
        return int(exc.headers["retry-after"])
    return 0


def leave(leaves: EarlyLeaves, clock: SetClock, times: int) -> None:
    """Call and leave, one call after the other."""
    for _ in range(times):
        clock.move(0.5)
        began = clock.monotonic()
        clock.move(0.5)
        leaves.count("key", began)


def test_the_wait_doubles_from_one_second_to_a_minute() -> None:
    """A few ends in a row are let pass."""
    clock = SetClock()
    leaves = EarlyLeaves(clock)
    leave(leaves, clock, FREE)
    assert wait_of(leaves) == 0

    waits = []
    for _ in range(9):
        leave(leaves, clock, 1)
        waits.append(wait_of(leaves))
    assert waits == [1, 2, 4, 8, 16, 32, LONGEST, LONGEST, LONGEST]


def test_after_a_wait_one_call_goes_ahead_of_the_next_wait() -> None:
    """Not all at once: the upstream has not been asked yet whether the client stays."""
    clock = SetClock()
    leaves = EarlyLeaves(clock)
    leave(leaves, clock, FREE + 3)
    clock.move(4.0)

    assert [wait_of(leaves), wait_of(leaves)] == [0, 4]


@pytest.mark.parametrize("how", ["a first token", "time"])
def test_a_row_ends(how: str) -> None:
    """By a first token, or when the last end is long ago."""
    clock = SetClock()
    leaves = EarlyLeaves(clock)
    leave(leaves, clock, FREE + 1)
    if how == "time":
        clock.move(FORGOTTEN)
    else:
        leaves.forget("key")
    leave(leaves, clock, FREE)

    assert wait_of(leaves) == 0


def test_calls_that_are_left_together_count_as_one() -> None:
    """An app that is restarted leaves all its calls at once, and is served when it comes back."""
    clock = SetClock()
    leaves = EarlyLeaves(clock)
    clock.move(1.0)
    began = clock.monotonic()
    clock.move(1.0)
    for _ in range(50):
        leaves.count("key", began)

    assert wait_of(leaves) == 0
    assert leaves.refuse("other") is None  # type: ignore[func-returns-value]
