# Whether a failed attempt is followed by another, and when; the deadline over all of a call's attempts; and the budget
# that makes a storm of retries impossible.
# Pure: dice and time are arguments. dispatcher.py sleeps.

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from msgspec import Struct

from gateway.core.settings import ProviderSettings, Retries
from gateway.upstreams.resilience.breaker import Verdict
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFailure

BASE = 0.25  # seconds; the most that is waited before the first retry,
CAP = 4.0  # and before any
LONGEST_PAUSE = 5.0  # seconds that a call waits because an upstream asked it to; beyond them it moves on

OVER = 60.0  # seconds over which the budget is kept
BURST = 100  # extra attempts in that time that calls need not earn; once more than
FOR_RETRIES = 10  # of them are made, of either kind, the rest are for moving on alone

# Words of attempts (UpstreamFailure.outcome) that say nothing of the target's health.
NOT_ITS_DOING = frozenset({"refused_key", "forbidden", "not_found", "too_long", "deadline"})
OF_OUR_SETTINGS = ("status_3", "status_4")  # a wrong path, a redirect: how we ask is at fault
NEVER_ASKED = frozenset({"unsupported", "unsayable"})  # refused before anything was sent: a format cannot say it
OF_THE_KEY = frozenset({"refused_key", "spend_cap", "rate_limited"})


def verdict_of(failure: UpstreamFailure) -> Verdict:
    """Return what a failed attempt says of its target: no connection, silence, cuts and 5xx speak against it."""
    match failure.status:
        case 502 | 504 if failure.outcome not in NOT_ITS_DOING and not failure.outcome.startswith(OF_OUR_SETTINGS):
            return Verdict.BAD
        case 400 | 413 if failure.outcome not in NEVER_ASKED:
            return Verdict.GOOD  # it is well enough to say what is wrong
    return Verdict.NOTHING


def next_pause(
    failure: UpstreamFailure, tries: int, policy: Retries, *, time_left: float, dice: float, has_sibling: bool
) -> float | None:
    """Return the seconds to wait before the same target is asked again, or ``None`` to move on.

    ``tries`` counts those made at this target, ``dice`` is in [0, 1). Where the model has another endpoint
    (``has_sibling``), that is asked at once instead. A target that was silent for a whole deadline gets no other.
    """
    if has_sibling or tries >= policy.attempts or not isinstance(failure, UpstreamError):
        return None
    if verdict_of(failure) is not Verdict.BAD or failure.outcome == "malformed":
        return None
    pause = max(full_jitter(tries, dice), failure.retry_after or 0.0)
    return pause if pause <= LONGEST_PAUSE and pause < time_left else None


def full_jitter(tries: int, dice: float) -> float:
    """Return the seconds before the next try: anything up to a bound that doubles each time.

    "Full jitter" of M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """
    return dice * min(CAP, BASE * 2 ** (min(tries, 30) - 1))


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


class Deadline(Struct, frozen=True):
    """The moment, in monotonic seconds, at which a call's attempts end, however many there are."""

    at: float

    def left(self, now: float) -> float:
        """Return the seconds left, never less than 0."""
        return max(0.0, self.at - now)

    def within(self, patience: float, now: float) -> float:
        """Return the seconds that one attempt may take which would usually get ``patience``."""
        return min(patience, self.left(now))
