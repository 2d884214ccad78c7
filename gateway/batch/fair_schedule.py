# The fair schedule: which batches a worker takes its next requests from. Priorities have shares, so that low ones still
# move; inside a priority teams take turns by their weights; a team's own batches go by their deadlines.
#
# Stride scheduling (Waldspurger and Weihl, "Stride Scheduling: Deterministic Proportional-Share Resource Management",
# MIT/LCS/TM-528, 1995, section 2), once over the priorities and once over the teams of each.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from msgspec import Struct

SHARES = {"high": 8.0, "normal": 4.0, "low": 1.0}


class RunnableBatch(Struct, frozen=True, kw_only=True):
    """A batch with requests that may run now."""

    batch_id: str
    team_id: str
    weight: float  # of its team
    priority: str
    expires_at: float  # unix seconds
    left: int  # requests that have not ended
    concurrency_group: str  # whose limit its requests count against: its model's, or its own when it names several


class StrideScheduler:
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

    def charge(self, name: str, weight: float, count: float) -> None:
        """Charge ``count`` turns to ``name``."""
        self._passes[name] = max(self._passes.get(name, 0.0), self._now) + count / weight

    def refund(self, name: str, weight: float) -> None:
        """Give ``name`` back a turn in which nothing ran."""
        if name in self._passes:
            self._passes[name] -= 1 / weight


class FairSchedule:
    """Whose turn it is at one worker: how many each priority and team has had."""

    def __init__(self) -> None:
        self._priorities = StrideScheduler()
        self._teams: dict[str, StrideScheduler] = defaultdict(StrideScheduler)

    def next(self, waiting: Sequence[RunnableBatch]) -> RunnableBatch:
        """Return the batch that the next request should come from. ``waiting`` is not empty."""
        priority = self._priorities.next({each.priority: SHARES[each.priority] for each in waiting})
        of_priority = [each for each in waiting if each.priority == priority]
        team = self._teams[priority].next({each.team_id: each.weight for each in of_priority})
        of_team = [each for each in of_priority if each.team_id == team]
        return min(of_team, key=lambda each: (each.expires_at, each.batch_id))

    def charge(self, batch: RunnableBatch, count: int) -> None:
        """Charge ``count`` requests to a batch, its team and its priority."""
        self._priorities.charge(batch.priority, SHARES[batch.priority], count)
        self._teams[batch.priority].charge(batch.team_id, batch.weight, count)

    def refund(self, batch: RunnableBatch) -> None:
        """Give back the turn of a request that could not run: it will be claimed again."""
        self._priorities.refund(batch.priority, SHARES[batch.priority])
        self._teams[batch.priority].refund(batch.team_id, batch.weight)
