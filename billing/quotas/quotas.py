# Every limit of every scope of a call, all or nothing: budgets inside this process's leases (leases.py), rates inside
# its slices (rates.py). A call waits for a store only where this process has no room for it.

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from billing.core.holds import Headroom, Hold, HoldRequest, RefusedHold, Settlement
from billing.core.records import bounded_cost, bounded_usage
from billing.quotas.leases import Leases
from billing.quotas.rates import RateLimits


class Quotas:
    """The limits of all teams, as one process keeps them. Settling is without I/O."""

    def __init__(self, leases: Leases, rates: RateLimits) -> None:
        self.leases = leases
        self.rates = rates

    @property
    def is_standalone(self) -> bool:
        """Whether a store is away, so that calls go on inside what this process has."""
        return self.leases.is_away or self.rates.is_away

    @property
    def exceeded(self) -> int:
        """Calls whose upstream billed more than was held."""
        return self.leases.holding.exceeded

    def follow(self, standalone_share: float) -> None:
        """Take another share of what is left into leases from now on."""
        self.leases.share = standalone_share

    async def open(self, request: HoldRequest) -> Hold | RefusedHold:
        """Hold the dearest leg against every limit of every scope, all or nothing."""
        if not self.leases.try_hold(request) and (refused := await self.leases.hold(request)) is not None:
            requests, tokens = self.rates.remaining(request)
            return replace(refused, headroom=_within_minutes(request, refused), requests=requests, tokens=tokens)
        self.rates.owners = self.leases.living
        if not self.rates.take(request):
            try:
                too_fast = await self.rates.ask(request)
            except asyncio.CancelledError:
                self.leases.release(request.request_id)
                raise
            if too_fast is not None:
                self.leases.release(request.request_id)
                return too_fast
        requests, tokens = self.rates.remaining(request)
        return Hold(request=request, owner=self.leases.owner, requests=requests, tokens=tokens)

    def owe(self, request: HoldRequest) -> Hold:
        """Count a call that runs already, whether there is room for it or not."""
        self.leases.holding.force(request)
        return Hold(request=request, owner=self.leases.owner)

    def settle(self, hold: Hold, used: Settlement) -> None:
        """Put what the call really used in place of its hold. Once, however often it is said."""
        request = hold.request
        if request.request_id in self.leases.holding.calls:
            tokens, nanousd = bounded_usage(used.usage).total_tokens, bounded_cost(used.cost_nanousd)
            self.leases.settle(request.request_id, tokens, nanousd, used.model)
            self.rates.settle(request, tokens)

    def release(self, hold: Hold) -> None:
        """Give the whole hold back: the call cost nothing."""
        request = hold.request
        if request.request_id in self.leases.holding.calls:
            self.leases.release(request.request_id)
            self.rates.release(request)


def _within_minutes(request: HoldRequest, refused: RefusedHold) -> Headroom:
    """Return what budgets leave to a call, and no more tokens than any of its minutes ever lets through.

    Not what a minute has left now: of scopes that were silent for a while that is not known here.
    """
    caps = [] if request.is_internal else [scope.limits.tokens_per_minute for scope in request.scopes]
    left = [tokens for tokens in (refused.headroom.tokens, *caps) if tokens is not None]
    return replace(refused.headroom, tokens=min(left, default=None))
