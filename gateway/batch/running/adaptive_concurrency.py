# How many batch requests to one model run at once in one worker: the limit rises while calls succeed, falls at once on
# an upstream's overload or where interactive calls wait, and is zero for a while where no request succeeds.
# Each model has its own limit: a broken or busy one does not lower another's.
#
# Additive increase, multiplicative decrease (Chiu and Jain, "Analysis of the Increase and Decrease Algorithms for
# Congestion Avoidance in Computer Networks", 1989, section 3).

from __future__ import annotations

from gateway.core.clock import Clock

LEAST = 1.0
MOST_LANES = 1000  # that one worker remembers
FIRST = 8.0
BACK_OFF = 0.7
GIVE_WAY = 0.5  # to interactive calls, which wait now
ONCE_IN = 1.0  # seconds: requests in flight at a congestion report the same one
FIRST_REST = 1.0  # seconds; each that follows lasts twice as long
LONGEST_REST = 30.0  # seconds


class Paces:
    """The concurrency limits of one worker, by model or batch."""

    def __init__(self, most: int, clock: Clock) -> None:
        self.most = most
        self._clock = clock
        self._paces: dict[str, Pace] = {}

    def of(self, lane: str) -> Pace:
        """Return the limit of a ``lane``."""
        pace = self._paces.pop(lane, None) or Pace(self.most, self._clock)
        if len(self._paces) >= MOST_LANES:
            del self._paces[next(iter(self._paces))]  # the least recently used
        self._paces[lane] = pace
        return pace

    def hold(self, lanes: set[str]) -> None:
        """Stop the growth of these limits, and let all others grow."""
        for lane, pace in self._paces.items():
            pace.is_held = lane in lanes


class Pace:
    """The limit of one model in one worker. ``most``: its ``--concurrency``."""

    def __init__(self, most: int, clock: Clock) -> None:
        self._most = float(most)
        self._limit = min(FIRST, self._most)
        self._clock = clock
        self._backed_off = float("-inf")
        self._failures = 0  # in a row
        self._in_vain = 0  # in a row, since the last answer or rest
        self._rests = 0  # since the last answer
        self._rests_until = float("-inf")  # monotonic seconds
        self.is_held = False  # whether it may not grow: interactive calls wait too long

    @property
    def limit(self) -> int:
        """Requests that may run at once; none while it rests."""
        return 0 if self._clock.monotonic() < self._rests_until else int(self._limit)

    def went_well(self) -> None:
        """Note an answer: a whole limit of them raises it by one."""
        self._failures = self._in_vain = self._rests = 0
        if not self.is_held:
            self._limit = min(self._most, self._limit + 1 / self._limit)

    def failed(self) -> None:
        """Note that an upstream failed: the second failure in a row counts as congestion."""
        self._failures += 1
        if self._failures > 1:
            self.was_too_much()

    def give_way(self) -> None:
        """Note that interactive calls wait too long at its target."""
        self._limit = max(LEAST, self._limit * GIVE_WAY)

    def was_too_much(self) -> None:
        """Note a rate limit, an overload or a timeout."""
        now = self._clock.monotonic()
        if now - self._backed_off >= ONCE_IN:
            self._backed_off = now
            self._limit = max(LEAST, self._limit * BACK_OFF)

    def was_in_vain(self) -> None:
        """Note a request that has to be sent again. More of them in a row than run at once: nothing comes through."""
        self._in_vain += 1
        if self._in_vain > self._limit:
            self._rests_until = self._clock.monotonic() + min(LONGEST_REST, FIRST_REST * 2.0**self._rests)
            self._in_vain, self._rests = 0, min(self._rests + 1, 10)
