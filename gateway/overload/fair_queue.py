# A fair queue before a target: calls that wait for a slot, and which team's turn it is. Pure: time is an argument.
#
# What is shared is slot-time: a slot is held for a call's whole length, which is unknown when the call begins. Each
# team has a counter of the slot-seconds that it was served, over its weight, and the turn is the lowest counter's.
# - A call is charged the typical length when it gets its slot, what it uses beyond that as it uses it, and what it did
#   not use is given back at its end. (Virtual Token Counter: Sheng et al., "Fairness in Serving Large Language Models",
#   OSDI 2024, section 4, with slot-seconds for tokens.)
# - A team that begins to wait starts from the queue's virtual time, the counter at which the last slot was given: what
#   it did not use before is no credit. (Start-time Fair Queueing: Goyal, Vin, Cheng, SIGCOMM 1996, section 2.)
#
# Bound: while two teams f and m wait, their counters differ by at most C·D·(1/w_f + 1/w_m), where C slots are held for
# D seconds at the longest. Since a slot goes to the lowest counter, f's is not above m's when f gets one, and until its
# next it rises by what its running calls still use: C of them, D each, over w_f. Meanwhile m's falls by no more than
# what its running calls give back: C of them, D each, over w_m. Where every call has the typical length d, nothing is
# corrected and the bound is that of Start-time Fair Queueing (theorem 1): d/w_f + d/w_m.

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

_served = attrgetter("served")


class Queueable(Protocol):
    """A call that waits."""

    team: str
    weight: float
    lag: float  # seconds that its priority puts it back in its team's queue

    @property
    def rank(self) -> float:
        """Its place in its team's queue: lower goes first."""


Queued = TypeVar("Queued", bound=Queueable)


@dataclass(slots=True, eq=False)
class Share(Generic[Queued]):
    """One team in one queue: what it was served, and its calls that wait, by how far their priority puts them back."""

    weight: float
    served: float = 0.0  # slot-seconds over weight
    waiting: dict[float, dict[Queued, None]] = field(default_factory=dict)  # each in order of coming

    def charge(self, seconds: float) -> None:
        """Add slot-time used, or give back what was not."""
        self.served += seconds / self.weight

    def first(self) -> Queued:
        """Return the call of this team whose turn is next: the earliest, its priority counted."""
        return min((next(iter(calls)) for calls in self.waiting.values()), key=lambda call: call.rank)


class FairQueue(Generic[Queued]):
    """The teams whose calls wait for one target, or have lately used it. Its owner holds the slots."""

    def __init__(self) -> None:
        self.virtual_time = 0.0  # slot-seconds over weight
        self._shares: dict[str, Share[Queued]] = {}  # every team's that was ever here
        self._waiting: dict[str, Share[Queued]] = {}  # those with calls that wait
        self.calls: dict[Queued, None] = {}  # all that wait, in order of coming

    def share_of(self, team: str, weight: float) -> Share[Queued]:
        """Return a team's share, brought forward to now if nothing of it waits."""
        share = self._shares.get(team)
        if share is None:
            share = self._shares[team] = Share(weight, self.virtual_time)
        share.weight = weight
        if not share.waiting and share.served < self.virtual_time:
            share.served = self.virtual_time
        return share

    def begin(self, share: Share[Queued], seconds: float) -> None:
        """A call of this share gets a slot, for about ``seconds``."""
        self.virtual_time = max(self.virtual_time, share.served)
        share.charge(seconds)

    def correct(self, share: Share[Queued], seconds: float) -> None:
        """Charge what a running call used beyond what it was charged, or give back what it did not."""
        share.charge(seconds)
        if not self._waiting:  # what no team waited for counts against no team
            self.virtual_time = max(self.virtual_time, share.served)

    def add(self, call: Queued) -> None:
        """Let a call wait."""
        share = self.share_of(call.team, call.weight)
        share.waiting.setdefault(call.lag, {})[call] = None
        self._waiting[call.team] = share
        self.calls[call] = None

    def remove(self, call: Queued) -> None:
        """Let a call wait no longer."""
        del self.calls[call]
        share = self._waiting[call.team]
        calls = share.waiting[call.lag]
        del calls[call]
        if not calls:
            del share.waiting[call.lag]
        if not share.waiting:
            del self._waiting[call.team]

    def first(self, teams: Collection[str] | None = None) -> Queued | None:
        """Return the call whose turn it is: of the team that was served the least; among equals, that waits longest.
        Of these ``teams``, where some are named."""
        waiting = [share for team, share in self._waiting.items() if teams is None or team in teams]
        return min(waiting, key=_served).first() if waiting else None

    def first_of(self, calls: Iterable[Queued]) -> Queued | None:
        """Return the call whose turn it is among some of those that wait; None where there are none."""
        return min(calls, key=lambda call: (self._waiting[call.team].served, call.rank), default=None)

    def fraction_of(self, team: str, weight: float) -> float:
        """Return which part of the turns is a team's while it waits."""
        others = sum(share.weight for name, share in self._waiting.items() if name != team)
        return weight / (weight + others)

    def count(self, team: str) -> int:
        """Return how many calls of a team wait here."""
        share = self._waiting.get(team)
        return sum(map(len, share.waiting.values())) if share is not None else 0

    def counters(self) -> dict[str, Share[Queued]]:
        """Return the shares of the teams that wait."""
        return dict(self._waiting)
