# Before any upstream hears of a call: set aside the most it could use on its route, against every limit at once.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from billing.errors import refusal_error
from billing.holds import Hold, HoldRequest, Leg, RefusedHold
from billing.prices import most_cost
from gateway.access import Caller
from gateway.answering.account import NOTHING, Account
from gateway.answering.call import Call, scopes_of
from gateway.rate_limits import anthropic_limit_headers, rate_limit_headers
from gateway.services import Services
from router.bounds import usage_most
from router.prompt_bounds import prompt_tokens_most
from router.targets import Route, Tier

OPEN_WITHIN = 5.0  # seconds; a hold that reaches Redis later than this is refused there


async def admit(services: Services, call: Call, route: Route) -> Account:
    """Hold the call's largest cost on ``route`` and return its open books.

    Raises RateLimited or QuotaExhausted when a limit has no room for it.
    """
    request = HoldRequest(
        request_id=call.request_id,
        team_id=call.caller.team.id,
        scopes=call.scopes,
        legs=legs_of(call, route),
        valid_until=services.clock.now() + OPEN_WITHIN,
        is_aside=call.is_aside,
    )
    hold = await _open(services, request, call.endpoint)
    account = Account(hold, services.journal, services.quotas, owes_parts=call.owes_parts)
    services.keeper.add(account)
    return account


@asynccontextmanager
async def counted(services: Services, request_id: str, caller: Caller) -> AsyncIterator[Hold]:
    """Count what runs inside the block as a request that uses and costs nothing, against every limit of its caller.

    Raises RateLimited or QuotaExhausted when a limit has no room for it.
    """
    request = HoldRequest(
        request_id=request_id,
        team_id=caller.team.id,
        scopes=scopes_of(caller),
        legs=(),
        valid_until=services.clock.now() + OPEN_WITHIN,
    )
    hold = await _open(services, request)
    try:
        yield hold
    finally:
        services.background.spawn(services.quotas.settle(hold, NOTHING))


async def _open(services: Services, request: HoldRequest, endpoint: str = "") -> Hold:
    try:
        hold = await services.quotas.open(request)
        if isinstance(hold, RefusedHold) and hold.is_late:  # this process stood still, and its client still waits
            request = replace(request, valid_until=services.clock.now() + OPEN_WITHIN)
            hold = await services.quotas.open(request)
    except asyncio.CancelledError:  # the client left; Redis may hold it all the same
        services.background.spawn(services.quotas.release(Hold(request=request)))
        raise
    if isinstance(hold, RefusedHold):
        error = refusal_error(hold)
        error.headers |= rate_limit_headers(hold)
        if endpoint == "messages":
            error.headers |= anthropic_limit_headers(hold, services.clock.now())
        raise error
    return hold


def legs_of(call: Call, route: Route) -> tuple[Leg, ...]:
    """Return the most that each target of ``route`` could use and cost."""
    prompt = prompt_tokens_most(call.request)
    batch = call.wish.tier is Tier.BATCH
    legs = []
    for target in route.targets:
        most = usage_most(call.request, target.model, prompt)
        cost = most_cost(most, target.model.price, batch=batch, at=call.created_at)
        legs.append(Leg(target.key, most.total_tokens, cost))
    return tuple(legs)
