# How often a team may read what was booked: a limit of its own, so that reading costs no call its place. Pure.

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from billing.core.errors import RateLimited

A_SECOND = 5.0  # reads, of one team in one process,
AT_ONCE = 20.0  # after a pause
MOST_TEAMS = 10_000  # that are remembered


class ReadLimit:
    """A token bucket for each team."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # reads left, and when

    def take(self, team_id: str) -> None:
        """Count a read. Raises RateLimited."""
        now = self._clock()
        left, then = self._buckets.get(team_id, (AT_ONCE, now))
        left = min(AT_ONCE, left + (now - then) * A_SECOND)
        if left < 1:
            wait = math.ceil((1 - left) / A_SECOND)
            raise RateLimited(
                f"This team reads calls more than {A_SECOND:.0f} times a second. Your rate for calls is not touched.",
                headers={"retry-after": str(wait)},
            )
        self._buckets[team_id] = left - 1, now
        self._buckets.move_to_end(team_id)
        if len(self._buckets) > MOST_TEAMS:
            self._buckets.popitem(last=False)
