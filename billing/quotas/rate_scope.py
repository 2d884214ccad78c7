# What one process knows of one scope's rates: the slice that it has drawn, its running calls, what it has yet to tell.

from __future__ import annotations

import math
from collections.abc import Iterable, MutableSet
from typing import Any

from billing.core.holds import Headroom, HoldRequest, LimitName, RefusedHold, Remaining, Scope
from billing.quotas.rate_shares import MINUTE, NONE, WINDOW, ScopeTold, Share

LIFE = 0.2  # seconds in which a slice may be used; less than a bucket, and then it goes back
FRESH = 1.0  # seconds for which what Redis told stands as it is
MEMORY = 0.5  # seconds over which a scope's rate is taken
PLENTY = 1 << 60  # left where there is no limit

NAMES = (LimitName.REQUESTS_PER_MINUTE, LimitName.TOKENS_PER_MINUTE, LimitName.CONCURRENT_REQUESTS)


class RateScope:
    """A team or key with rates, as this process knows it."""

    def __init__(self, scope: Scope, team_id: str, touched: MutableSet[RateScope]) -> None:
        """``touched``: the team's scopes that have something to tell."""
        self.scope, self.team_id = scope, team_id
        self.touched = touched
        self.name = scope.kind if scope.kind == "team" else f"{scope.kind}:{scope.id}"
        self.caps = _caps_of(scope)
        self.requests = self.tokens = self.slots = 0  # of the slice, unused
        self.until = 0.0  # monotonic seconds; then the slice is over
        self.live = 0  # running calls of this process
        self.untold: dict[int, list[int]] = {}  # by bucket: change of requests, tokens, tokens held
        self.told, self.told_at = ScopeTold(), -math.inf
        self.used: int | None = None  # the last bucket in which a call began that Redis was asked about
        self.share: Share | None = None  # while Redis is away
        self._slice = (0, 0, 0)  # bucket, calls and tokens for which it is counted by Redis
        self._weight, self._weighed_at, self._mean_tokens = 0.0, 0.0, 0.0

    def adopt(self, scope: Scope) -> None:
        """Go by other limits from now on."""
        if scope.limits != self.scope.limits:
            self.caps = _caps_of(scope)
            self.end_slice()
        self.scope = scope

    def end_slice(self) -> None:
        """Admit nothing more by oneself; what is left goes back when it is next told."""
        self.requests = self.tokens = 0
        self.until = 0.0

    def change(self, bucket: int, requests: int, tokens: int, held: int) -> None:
        """Note what is to be told of a bucket."""
        self.touched.add(self)
        cell = self.untold.get(bucket)
        if cell is None:
            if len(self.untold) > 2 * WINDOW:  # Redis is away for long
                for old in [at for at in self.untold if at < bucket - WINDOW - 1]:
                    del self.untold[old]
            cell = self.untold[bucket] = [0, 0, 0]
        cell[0] += requests
        cell[1] += tokens
        cell[2] += held

    def say(self, now: float, needs: list[int]) -> tuple[Any, ...]:
        """State what has changed (as rates.lua reads it), end the slice, and ask for another beside needs of tokens."""
        began = sum(max(0, cell[0]) for cell in self.untold.values()) + len(needs)
        self._weight = self._weight * math.exp(min(0.0, self._weighed_at - now) / MEMORY) + began
        self._weighed_at = now
        if needs:
            mean = sum(needs) / len(needs)
            self._mean_tokens = (self._mean_tokens + mean) / 2 if self._mean_tokens else mean
        bucket, calls, held = self._slice
        if calls:  # Redis counts it no more; the calls that came out of it have been counted one by one
            self.change(bucket, -calls, -held, -held)
        self._slice = (0, 0, 0)
        self.end_slice()
        changes = [(at, *cell) for at, cell in self.untold.items() if any(cell)]
        self.untold.clear()
        slots = self.live if self.caps[2] >= 0 else 0
        wanted = int(self._weight / MEMORY * LIFE) if needs else 0
        return self.caps, slots, int(self._mean_tokens), wanted, changes

    def hear(self, told: ScopeTold, bucket: int, said_at: float) -> None:
        """Take over what was drawn: room for needs, which have yet to begin, and a slice."""
        self.told, self.told_at, self.share = told, said_at, None
        self.slots = PLENTY if self.caps[2] < 0 else told.own_slots - self.live
        if told.calls:
            self._slice = (bucket + 1, told.calls, told.call_tokens)
            self.requests = PLENTY if self.caps[0] < 0 else told.calls
            self.tokens = PLENTY if self.caps[1] < 0 else told.call_tokens
            self.until = said_at + LIFE
            self.touched.add(self)

    def minute(self, now: float) -> tuple[int, int]:
        """Return requests and tokens of the minute: all owners' as last told, and what this process has begun since.

        What was told a while ago leaves the minute evenly, as far as is known here.
        """
        requests, tokens = self.told.requests - self.requests, self.told.tokens - self.tokens
        if (age := now - self.told_at) > FRESH:
            stays = 1.0 - min(1.0, age / MINUTE)
            requests, tokens = int(requests * stays), int(tokens * stays)
        if self.share is not None:
            requests, tokens = requests + self.share.spent[0], tokens + self.share.spent[1]
        return requests, tokens

    def stand_alone(self, bucket: int) -> Share:
        """Return this process's share while Redis is away."""
        if self.share is None:
            used = self.used if self.used is not None and self.used >= bucket - WINDOW else None
            self.share = Share(self.caps, self.told, self.told_at, used=used, live=self.live)
        return self.share


def remaining_of(scopes: Iterable[RateScope], now: float) -> tuple[Remaining | None, Remaining | None]:
    """Return the tightest limits of requests and of tokens a minute."""
    tightest: list[Remaining | None] = [None, None]
    for scope in scopes:
        used = scope.minute(now)
        for kind, least in enumerate(tightest):
            if (cap := scope.caps[kind]) >= 0:
                left = cap - used[kind]
                left = 0 if left < 0 else cap if left > cap else left
                if least is None or left < least.remaining:
                    tightest[kind] = Remaining(cap, left, MINUTE if left < cap else 0.0)
    return tightest[0], tightest[1]


def refused(
    request: HoldRequest, scopes: Iterable[RateScope], scope: RateScope, limit: int, seconds: float, now: float
) -> RefusedHold:
    """Return what a call hears that finds no room in one limit (from 0), and may try again after so many seconds."""
    told, cap, wanted = scope.told, scope.caps[limit], request.tokens if limit == 1 else 1
    used = (told.requests, told.tokens, told.slots)[limit]
    held = (0, min(told.held, used), used)[limit]
    requests, tokens = remaining_of(scopes, now)
    return RefusedHold(
        scope=scope.scope,
        limit=NAMES[limit],
        cap=cap,
        used=used - held,
        held=held,
        wanted=wanted,
        retry_after=None if wanted > cap else min(MINUTE, seconds),  # a slice is counted a bucket longer
        is_settled=False,
        alone_exceeds=wanted > cap,
        headroom=Headroom(tokens=None if tokens is None else tokens.remaining),
        requests=requests,
        tokens=tokens,
    )


def _caps_of(scope: Scope) -> tuple[int, int, int]:
    limits = scope.limits
    wanted = (limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent_requests)
    requests, tokens, slots = (NONE if cap is None else cap for cap in wanted)
    return requests, tokens, slots
