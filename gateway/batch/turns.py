# The fair queue: which batches a worker takes its next requests from. Priorities have shares, so that low ones still
# move; inside a priority teams take turns by their weights; a team's own batches go by their deadlines.
#
# Stride scheduling (Waldspurger and Weihl, "Stride Scheduling: Deterministic Proportional-Share Resource Management",
# MIT/LCS/TM-528, 1995, section 2), once over the priorities and once over the teams of each.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from msgspec import Struct

SHARES = {"high": 8.0, "normal": 4.0, "low": 1.0}


class Waiting(Struct, frozen=True, kw_only=True):
    """A batch with requests that may run now."""

    batch_id: str
    team_id: str
    weight: float  # of its team
    priority: str
    expires_at: float  # unix seconds
    left: int  # requests that have not ended
    lane: str  # the name of its concurrency limit: its model, or its own id when it names several


class Strides:
    """Proportional shares among names that come and go: a late one gets no credit for the time before."""

    def __init__(self) -> None:
        self._passes: dict[str, float] = {}
        self._now = 0.0

    def next(self, weights: dict[str, float]) -> str:
        """Return the name whose turn it is among these."""
        passes = {name: max(self._passes.get(name, 0.0), self._now) for name in weights}
        chosen = min(passes, key=lambda name: (passes[name], name))
        self._now = passes[chosen]
        return chosen

    def took(self, name: str, weight: float, count: float) -> None:
        """Note that ``name`` took ``count`` turns."""
        self._passes[name] = max(self._passes.get(name, 0.0), self._now) + count / weight

    def gave_back(self, name: str, weight: float) -> None:
        """Note that a turn that ``name`` took ran nothing."""
        if name in self._passes:
            self._passes[name] -= 1 / weight


class Turns:
    """How many turns each priority and team had at one worker."""

    def __init__(self) -> None:
        self._priorities = Strides()
        self._teams: dict[str, Strides] = defaultdict(Strides)

    def next(self, waiting: Sequence[Waiting]) -> Waiting:
        """Return the batch that the next request should come from. ``waiting`` is not empty."""
        priority = self._priorities.next({each.priority: SHARES[each.priority] for each in waiting})
        of_priority = [each for each in waiting if each.priority == priority]
        team = self._teams[priority].next({each.team_id: each.weight for each in of_priority})
        of_team = [each for each in of_priority if each.team_id == team]
        return min(of_team, key=lambda each: (each.expires_at, each.batch_id))

    def took(self, batch: Waiting, count: int) -> None:
        """Note that ``count`` requests of ``batch`` were taken."""
        self._priorities.took(batch.priority, SHARES[batch.priority], count)
        self._teams[batch.priority].took(batch.team_id, batch.weight, count)

    def gave_back(self, batch: Waiting) -> None:
        """Note that a request of ``batch`` was taken and could not run: it will be taken again."""
        self._priorities.gave_back(batch.priority, SHARES[batch.priority])
        self._teams[batch.priority].gave_back(batch.team_id, batch.weight)
