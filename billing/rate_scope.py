# What one process knows of one scope's rates: the slice that it has drawn, its running calls, what it has yet to tell.

from __future__ import annotations

import math
from collections.abc import MutableSet

from billing.holds import Remaining, Scope
from billing.rate_shares import Share
from billing.rate_words import NONE, WINDOW, ScopeSaid, ScopeTold

LIFE = 0.2  # seconds in which a slice may be used; less than a bucket, and then it goes back
MEMORY = 0.5  # seconds over which a scope's rate is taken
PLENTY = 1 << 60  # left where there is no limit


class RateScope:
    """A team or key with rates, as this process knows it.

    Cells are changes by bucket: [requests, tokens, tokens held]. A call adds itself to the cell of its bucket; as much
    is subtracted in the slice's own bucket when it is told.
    """

    def __init__(self, scope: Scope, team_id: str, touched: MutableSet[RateScope]) -> None:
        """``touched``: the team's scopes that have something to tell."""
        self.scope, self.team_id = scope, team_id
        self._touched = touched
        self.name = scope.kind if scope.kind == "team" else f"{scope.kind}:{scope.id}"
        self.requests = self.tokens = self.slots = 0  # of the slice, unused
        self.until = 0.0  # monotonic seconds; then the slice is over
        self.live = 0  # running calls of this process
        self.bucket, self.cell = NONE, [0, 0, 0]  # the cell of the newest bucket in which a call began
        self.untold: dict[int, list[int]] = {}
        self.told, self.told_at = ScopeTold(), -math.inf
        self.used: int | None = None  # the last bucket in which a call began
        self.share: Share | None = None  # while Redis is away
        self._given = (0, 0)  # requests and tokens of the slice that Redis counts in its bucket
        self._slice_bucket = 0
        self._weight, self._weighed_at, self._mean_tokens = 0.0, 0.0, 0.0
        self._take_caps()

    def touch(self) -> None:
        """Have the team's next command speak of this scope."""
        self._touched.add(self)

    def adopt(self, scope: Scope) -> None:
        """Go by other limits from now on."""
        if scope.limits != self.scope.limits:
            self._fold(0, 0)
            self.scope, self.until = scope, 0.0
            self._take_caps()
        self.scope = scope

    def change(self, bucket: int, requests: int, tokens: int, held: int) -> None:
        """Note what is to be told of a bucket."""
        self._touched.add(self)
        cell = self.cell_of(bucket)
        cell[0] += requests
        cell[1] += tokens
        cell[2] += held

    def cell_of(self, bucket: int) -> list[int]:
        """Return what has changed in a bucket, and is yet to be told."""
        cell = self.untold.get(bucket)
        if cell is None:
            if len(self.untold) > 2 * WINDOW:  # Redis is away for long
                for old in [at for at in self.untold if at < bucket - WINDOW - 1]:
                    del self.untold[old]
            cell = self.untold[bucket] = [0, 0, 0]
        return cell

    def begin(self, bucket: int) -> None:
        """Count a call that Redis has counted: nothing is to be told."""
        self.used = bucket
        self.live += 1

    def say(self, now: float, bucket: int, needs: int, tokens: int) -> ScopeSaid:
        """State what has changed, and ask for a slice beside so many needs of so many tokens, if there are any.

        With needs, or when its life is over, what is left of the slice goes back.
        """
        began = sum(max(0, cell[0]) for cell in self.untold.values())
        self._weight = self._weight * math.exp(min(0.0, self._weighed_at - now) / MEMORY) + began + needs
        self._weighed_at = now
        more = 0
        if needs:
            self._mean_tokens = (self._mean_tokens + tokens / needs) / 2 if self._mean_tokens else tokens / needs
            more = int(self._weight / MEMORY * LIFE)
        if needs or now >= self.until:
            self._fold(0, 0)
            self.slots = 0
        else:
            self._fold(self.requests if self.caps[0] >= 0 else 0, self.tokens if self.caps[1] >= 0 else 0)
        changes = [
            (at, cell[0], cell[1], cell[2])
            for at, cell in self.untold.items()
            if at >= bucket - WINDOW - 1 and any(cell)
        ]
        self.untold.clear()
        self.bucket = NONE
        requests_cap, tokens_cap, slots_cap = self.caps
        return ScopeSaid(
            requests_cap=requests_cap,
            tokens_cap=tokens_cap,
            slots_cap=slots_cap,
            slots=max(0, self.live + self.slots) if slots_cap >= 0 else 0,
            more_requests=more if requests_cap >= 0 else 0,
            more_tokens=int(more * self._mean_tokens) if tokens_cap >= 0 else 0,
            more_slots=more if slots_cap >= 0 else 0,
            changes=changes if requests_cap >= 0 or tokens_cap >= 0 else [],
        )

    def hear(self, said: ScopeSaid, told: ScopeTold, granted: int, bucket: int, sent_at: float) -> bool:
        """Take over what was drawn; return whether there is a new slice. ``granted`` needs are in ``live`` by now."""
        self.told, self.told_at = told, sent_at
        if self.caps[2] >= 0:
            self.slots = said.slots + granted + told.more_slots - self.live
        if not (told.more_requests or told.more_tokens or told.more_slots):
            return False
        self._fold(0, 0)
        self._given, self._slice_bucket = (told.more_requests, told.more_tokens), bucket + 1
        self.requests, self.tokens = told.more_requests, told.more_tokens
        if self.caps[0] < 0:
            self.requests = PLENTY
        if self.caps[1] < 0:
            self.tokens = PLENTY
        if self.caps[2] < 0:
            self.slots = PLENTY
        self.until = sent_at + LIFE
        return True

    def remaining(self) -> tuple[Remaining | None, Remaining | None]:
        """Return what is left of requests and tokens a minute: as last told, less what this process has begun since."""
        requests_cap, tokens_cap, _ = self.caps
        requests, tokens = (self.requests, self.tokens) if self.until else (0, 0)
        alone_requests, alone_tokens = (0, 0) if self.share is None else self.share.spent
        return (
            _remaining(requests_cap, self.told.requests - requests + alone_requests),
            _remaining(tokens_cap, self.told.tokens - tokens + alone_tokens),
        )

    def stand_alone(self, oldest: int) -> Share:
        """Return this process's share while Redis is away."""
        if self.share is None:
            used = self.used if self.used is not None and self.used >= oldest else None
            self.share = Share(self.caps, self.told, self.told_at, used=used, live=self.live)
        return self.share

    def _take_caps(self) -> None:
        limits = self.scope.limits
        wanted = (limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent_requests)
        requests, tokens, slots = (NONE if cap is None else cap for cap in wanted)
        self.caps = (requests, tokens, slots)

    def _fold(self, requests: int, tokens: int) -> None:
        """Take out of the slice's bucket what is no longer there as a slice: all but this rest."""
        gone = (self._given[0] - requests, self._given[1] - tokens)
        if any(self._given) and any(gone):
            cell = self.cell_of(self._slice_bucket)
            cell[0] -= gone[0]
            cell[1] -= gone[1]
            cell[2] -= gone[1]
        self._given = (requests, tokens) if any(self._given) else (0, 0)
        if not requests and not tokens:
            self.requests = self.tokens = 0
            self.until = 0.0


def _remaining(cap: int, used: int) -> Remaining | None:
    if cap < 0:
        return None
    left = min(cap, max(0, cap - used))
    return Remaining(cap, left, 60.0 if left < cap else 0.0)
