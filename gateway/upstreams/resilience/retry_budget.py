# The budget that makes a storm of retries impossible. Pure: time is an argument.

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from gateway.core.settings import ProviderSettings

OVER = 60.0  # seconds over which the budget is kept
BURST = 100  # extra attempts in that time that calls need not earn; once more than
FOR_RETRIES = 10  # of them are made, of either kind, the rest are for moving on alone


class RetryBudget:
    """The extra attempts of all calls of a process at one provider: a share of its calls, plus a burst, over a minute.

    Whatever fails, in any minute there are at most (1 + share) × calls + BURST attempts.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.refused = 0  # extra attempts that were not made
        self.spent = 0  # that were
        self._slices: deque[list[float]] = deque()  # [second, calls, extra attempts], of the last minute
        self._calls = 0
        self._extras = 0

    def deposit(self, now: float) -> None:
        """Count a call, which earns its share of an extra attempt."""
        self._slice(now)[1] += 1
        self._calls += 1

    def take_retry(self, now: float) -> bool:
        """Take one extra attempt at the target that failed, or return False."""
        return self._take(now, FOR_RETRIES)

    def take_move(self, now: float) -> bool:
        """Take one extra attempt at another target or with another key, or return False."""
        return self._take(now, BURST)

    def _take(self, now: float, burst: int) -> bool:
        latest = self._slice(now)
        if self._extras + 1 > burst + self.share * self._calls:
            self.refused += 1
            return False
        latest[2] += 1
        self._extras += 1
        self.spent += 1
        return True

    def _slice(self, now: float) -> list[float]:
        slices = self._slices
        if slices and now < slices[-1][0] + 1.0:  # also when the clock went back
            return slices[-1]
        while slices and slices[0][0] <= now - OVER:
            _, calls, extras = slices.popleft()
            self._calls -= int(calls)
            self._extras -= int(extras)
        slices.append([now, 0, 0])
        return slices[-1]


class RetryBudgets:
    """The budget of each provider; a call is on that of the provider that it tries first."""

    def __init__(self) -> None:
        self._budgets: dict[str, RetryBudget] = {}

    def of(self, provider: ProviderSettings) -> RetryBudget:
        """Return a provider's budget."""
        budget = self._budgets.get(provider.name)
        if budget is None:
            budget = self._budgets[provider.name] = RetryBudget(provider.retries.budget)
        return budget

    def follow(self, providers: Mapping[str, ProviderSettings]) -> None:
        """Go by what another configuration says of its providers, and forget all others."""
        self._budgets = {name: budget for name, budget in self._budgets.items() if name in providers}
        for name, budget in self._budgets.items():
            budget.share = providers[name].retries.budget

    def all(self) -> Mapping[str, RetryBudget]:
        """Return the budgets by provider."""
        return self._budgets
