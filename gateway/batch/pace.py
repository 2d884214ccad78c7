# How many requests of batches to one model run at once in one worker: more as long as it goes well, fewer at once when
# an upstream says that it is too much. Each model has its own pace: what is broken or busy lowers nobody else's.
#
# Additive increase, multiplicative decrease (Chiu and Jain, "Analysis of the Increase and Decrease Algorithms for
# Congestion Avoidance in Computer Networks", 1989, section 3).

from __future__ import annotations

from gateway.clock import Clock

LEAST = 1.0
MOST_LANES = 1000  # that one worker remembers
FIRST = 8.0
BACK_OFF = 0.7
ONCE_IN = 1.0  # seconds: what was under way at a congestion tells of the same one


class Paces:
    """The paces of one worker, by what its batches ask for."""

    def __init__(self, most: int, clock: Clock) -> None:
        self.most = most
        self._clock = clock
        self._paces: dict[str, Pace] = {}

    def of(self, lane: str) -> Pace:
        """Return the pace of a lane."""
        pace = self._paces.pop(lane, None) or Pace(self.most, self._clock)
        if len(self._paces) >= MOST_LANES:
            del self._paces[next(iter(self._paces))]  # the one that was asked for the longest time ago
        self._paces[lane] = pace
        return pace


class Pace:
    """The limit of one model in one worker. ``most``: its ``--concurrency``."""

    def __init__(self, most: int, clock: Clock) -> None:
        self._most = float(most)
        self._limit = min(FIRST, self._most)
        self._clock = clock
        self._backed_off = float("-inf")

    @property
    def limit(self) -> int:
        """Requests that may run at once."""
        return int(self._limit)

    def went_well(self) -> None:
        """Note an answer: a whole limit of them raises it by one."""
        self._limit = min(self._most, self._limit + 1 / self._limit)

    def was_too_much(self) -> None:
        """Note a rate limit, an overload or a timeout."""
        now = self._clock.monotonic()
        if now - self._backed_off >= ONCE_IN:
            self._backed_off = now
            self._limit = max(LEAST, self._limit * BACK_OFF)
