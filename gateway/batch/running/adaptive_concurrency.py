# How many batch requests to one model run at once in one worker: the limit rises while calls succeed, falls at once on
# an upstream's overload or where interactive calls wait, and is zero for a while where no request succeeds.
# Each model has its own limit: a broken or busy one does not lower another's.
#
# Additive increase, multiplicative decrease (Chiu and Jain, "Analysis of the Increase and Decrease Algorithms for
# Congestion Avoidance in Computer Networks", 1989, section 3).

from __future__ import annotations

from gateway.core.clock import Clock

LEAST = 1.0
MOST_GROUPS = 1000  # that one worker remembers
FIRST = 8.0
BACK_OFF = 0.7
BACKPRESSURE = 0.5  # while interactive calls wait
ONCE_IN = 1.0  # seconds: requests in flight at a congestion report the same one
FIRST_PAUSE = 1.0  # seconds; each that follows lasts twice as long
LONGEST_PAUSE = 30.0  # seconds


class ConcurrencyLimits:
    """The concurrency limits of one worker, by concurrency group."""

    def __init__(self, most: int, clock: Clock) -> None:
        self.most = most
        self._clock = clock
        self._limits: dict[str, ConcurrencyLimit] = {}

    def of(self, group: str) -> ConcurrencyLimit:
        """Return the limit of a concurrency group."""
        limit = self._limits.pop(group, None) or ConcurrencyLimit(self.most, self._clock)
        if len(self._limits) >= MOST_GROUPS:
            del self._limits[next(iter(self._limits))]  # the least recently used
        self._limits[group] = limit
        return limit

    def freeze(self, groups: set[str]) -> None:
        """Stop the growth of these limits, and let all others grow."""
        for group, limit in self._limits.items():
            limit.is_frozen = group in groups


class ConcurrencyLimit:
    """The limit of one model in one worker. ``most``: its ``--concurrency``."""

    def __init__(self, most: int, clock: Clock) -> None:
        self._most = float(most)
        self._limit = min(FIRST, self._most)
        self._clock = clock
        self._backed_off = float("-inf")
        self._failures = 0  # in a row
        self._retries = 0  # in a row, since the last answer or pause
        self._pauses = 0  # since the last answer
        self._paused_until = float("-inf")  # monotonic seconds
        self.is_frozen = False  # whether it may not grow: interactive calls wait too long

    @property
    def current(self) -> int:
        """Requests that may run at once; none while it pauses."""
        return 0 if self._clock.monotonic() < self._paused_until else int(self._limit)

    def succeeded(self) -> None:
        """Note an answer: a whole limit of them raises it by one."""
        self._failures = self._retries = self._pauses = 0
        if not self.is_frozen:
            self._limit = min(self._most, self._limit + 1 / self._limit)

    def failed(self) -> None:
        """Note that an upstream failed: the second failure in a row counts as congestion."""
        self._failures += 1
        if self._failures > 1:
            self.congested()

    def slow_down(self) -> None:
        """Note that interactive calls wait too long at its target."""
        self._limit = max(LEAST, self._limit * BACKPRESSURE)

    def congested(self) -> None:
        """Note a rate limit, an overload or a timeout."""
        now = self._clock.monotonic()
        if now - self._backed_off >= ONCE_IN:
            self._backed_off = now
            self._limit = max(LEAST, self._limit * BACK_OFF)

    def retried(self) -> None:
        """Note a request that has to be sent again. More of them in a row than run at once: nothing comes through."""
        self._retries += 1
        if self._retries > self._limit:
            self._paused_until = self._clock.monotonic() + min(LONGEST_PAUSE, FIRST_PAUSE * 2.0**self._pauses)
            self._retries, self._pauses = 0, min(self._pauses + 1, 10)
