# How many further attempts there can be at the most.

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.upstreams.resilience.retry_budget import BURST, OVER, RetryBudget


@given(
    share=st.floats(0, 1),
    gaps=st.lists(st.floats(0, 5), min_size=1, max_size=300),
    greed=st.integers(1, 8),
)
def test_a_storm_is_impossible(share: float, gaps: list[float], greed: int) -> None:
    """With everything failing, whatever calls would like: (1 + share) × calls + burst attempts in any minute."""
    budget, now, calls, attempts = RetryBudget(share), 0.0, [], []
    for gap in gaps:
        now += gap
        budget.deposit(now)
        calls.append(now)
        attempts.append(now)
        for number in range(greed):
            if budget.take_retry(now) if number % 2 else budget.take_move(now):
                attempts.append(now)

    for end in calls:
        in_minute = [at for at in attempts if end - (OVER - 2) < at <= end]
        earning = [at for at in calls if end - (OVER + 2) < at <= end]
        first = [at for at in calls if end - (OVER - 2) < at <= end]
        assert len(in_minute) - len(first) <= share * len(earning) + BURST
    assert budget.spent + len(calls) == len(attempts)


def test_the_burst_is_mostly_for_moving_on() -> None:
    """Ten tries at a failing target are free, and then a region may still fail for a hundred calls at once."""
    budget = RetryBudget(0.1)
    budget.deposit(0.0)
    retries = sum(budget.take_retry(0.0) for _ in range(200))
    moves = sum(budget.take_move(0.0) for _ in range(200))

    assert (retries, retries + moves) == (10, BURST)
    assert budget.refused == 400 - BURST


def test_the_budget_comes_back_with_time_and_not_before() -> None:
    """A minute later the burst is there again; a clock that goes back brings nothing."""
    budget = RetryBudget(0.0)
    while budget.take_move(100.0):
        pass
    early = budget.take_move(50.0), budget.take_move(159.0)
    budget.deposit(161.0)

    assert early == (False, False)
    assert budget.take_move(161.0)
