# How long a key waits whose calls are left before their first token.

from __future__ import annotations

import pytest

from billing.core.errors import RateLimited
from gateway.calls.early_leaves import FORGOTTEN, FREE, LONGEST, MOST, TOGETHER, EarlyLeaves
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


def test_a_row_is_forgotten_after_its_latest_end() -> None:
    """Ten minutes without an early end: the key is served as if there had been none."""
    clock = SetClock()
    leaves = EarlyLeaves(clock)
    leave(leaves, clock, MOST)
    wait_of(leaves)
    clock.move(FORGOTTEN + 1)
    leave(leaves, clock, FREE)

    assert wait_of(leaves) == 0


def test_a_first_token_takes_one_end_off_the_row() -> None:
    """Not all of them: one cheap call would buy five that are left."""
    clock = SetClock()
    leaves = EarlyLeaves(clock)
    leave(leaves, clock, FREE)
    leaves.forget_one("key")
    leave(leaves, clock, 1)
    free = wait_of(leaves)
    leave(leaves, clock, 1)

    assert (free, wait_of(leaves)) == (0, 1)


def test_a_client_that_stays_again_comes_back_to_no_wait() -> None:
    """However long the row was: seven first tokens after the longest wait."""
    clock = SetClock()
    leaves = EarlyLeaves(clock)
    leave(leaves, clock, 10 * MOST)
    for _ in range(MOST - FREE):
        clock.move(wait_of(leaves))
        assert wait_of(leaves) == 0
        leaves.forget_one("key")

    assert [wait_of(leaves) for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(("calls", "wait"), [(TOGETHER, 0), (FREE * TOGETHER, 0), (FREE * TOGETHER + 1, 1), (1000, 60)])
def test_calls_that_are_left_together_count_as_one_for_each_eight(calls: int, wait: int) -> None:
    """An app that is restarted leaves its calls at once and is served when it comes back, with up to forty of them."""
    clock = SetClock()
    leaves = EarlyLeaves(clock)
    clock.move(1.0)
    began = clock.monotonic()
    clock.move(1.0)
    for _ in range(calls):
        leaves.count("key", began)

    assert wait_of(leaves) == wait
    assert leaves.refuse("other") is None  # type: ignore[func-returns-value]


def test_one_first_token_pays_for_no_group_of_calls() -> None:
    """Eight calls left together and one that stays, again and again, come to a wait."""
    clock = SetClock()
    leaves = EarlyLeaves(clock)
    for _ in range(FREE + 1):
        clock.move(1.0)
        began = clock.monotonic()
        clock.move(1.0)
        for _ in range(TOGETHER):
            leaves.count("key", began)
        leaves.forget_one("key")

    assert wait_of(leaves) > 0


def test_a_chain_of_overlapping_calls_is_counted() -> None:
    """Each call begins before the one ahead of it ends; a row of long calls is not forgotten while it goes on."""
    clock = SetClock()
    leaves = EarlyLeaves(clock)
    for _ in range(2 * FREE + 1):
        clock.move(FORGOTTEN * 0.7)
        leaves.count("key", clock.monotonic() - FORGOTTEN * 1.2)

    assert wait_of(leaves) > 0
