# How often a team may read what was booked, and use what is stored for it: limits of their own, so that these cost no
# call its place. Pure.

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from billing.core.errors import RateLimited

MOST_TEAMS = 10_000  # that are remembered


class ReadLimit:
    """A token bucket for each team that reads its calls."""

    what = "reads calls"
    a_second = 5.0  # of one team in one process,
    at_once = 20.0  # after a pause

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # reads left, and when

    def take(self, team_id: str) -> None:
        """Count a read. Raises RateLimited."""
        now = self._clock()
        left, then = self._buckets.get(team_id, (self.at_once, now))
        left = min(self.at_once, left + (now - then) * self.a_second)
        if left < 1:
            wait = math.ceil((1 - left) / self.a_second)
            words = f"This team {self.what} more than {self.a_second:.0f} times a second."
            raise RateLimited(f"{words} Your rate for calls is not touched.", headers={"retry-after": str(wait)})
        self._buckets[team_id] = left - 1, now
        self._buckets.move_to_end(team_id)
        if len(self._buckets) > MOST_TEAMS:
            self._buckets.popitem(last=False)


class CountLimit(ReadLimit):
    """The same for prompts that are counted."""

    what = "counts prompts"
    a_second = 20.0
    at_once = 100.0


class StoredLimit(ReadLimit):
    """The same for all else that lies in Postgres for a team (stored responses, conversations, batches, files, usage,
    what is left of budgets), and for the list of models. A hundred responses in the background may be looked at as
    usual, every two seconds."""

    what = "asks for what is stored"
    a_second = 50.0
    at_once = 200.0
