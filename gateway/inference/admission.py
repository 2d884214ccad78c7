# Before any upstream hears of a call: reserve the most it could use on its route, against every limit at once.

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from msgspec.structs import replace

from billing.core.errors import refusal_error
from billing.core.holds import DOLLAR_LIMITS, TOKEN_LIMITS, Headroom, Hold, HoldRequest, Leg, RefusedHold, Scope
from billing.core.prices import most_cost
from billing.journal.journal import Journal
from billing.quotas.quotas import Quotas
from gateway.calls.accounting import NOTHING, CallAccounting
from gateway.calls.call import Call, scopes_of, value_scopes_of
from gateway.calls.journaling import OpenCalls
from gateway.calls.rate_limits import LimitHeaders, rate_limit_headers
from gateway.core.clock import Clock
from gateway.core.principals import Caller
from protocol.completions import CompletionRequest
from protocol.errors import ServiceError
from protocol.inference import Generation
from protocol.serving.off_loop import off_loop
from router.catalog.targets import Route, Target, Tier
from router.prompt_size.bounds import COMPLETION_LIMIT, limit_within, usage_most, with_output_limit, worthwhile_limit
from router.prompt_size.prompt_bounds import PromptBound, bound_prompt

FITTINGS = 3  # times that a call is made to fit: others may take the room between


class WithoutRoom(Exception):
    """A limit of the team for one model has no room for the call, which may go to the others of its route."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.key)
        self.target = target  # the first one of the model


class Admission:
    """Opens the accounting of calls, and ends it."""

    def __init__(self, quotas: Quotas, journal: Journal, open_calls: OpenCalls, clock: Clock) -> None:
        self._quotas = quotas
        self._journal = journal
        self._open_calls = open_calls
        self._clock = clock

    async def admit(self, call: Call, route: Route) -> tuple[Call, CallAccounting]:
        """Hold the call's largest cost on ``route``; return the call as it goes on, and its open account.

        Where its caller named no output limit and a budget has no room for the model's own, it goes on with the limit
        that fits. Raises RateLimited, ExceedsLimit or QuotaExhausted when a limit has no room for it, or WithoutRoom
        when that is a limit for one model, and the route has others.
        """
        prompt, legs = await off_loop(call.size, partial(_bound, call, route))
        request = _request_of(call, legs)
        hold = await self._quotas.open(request)
        if isinstance(hold, RefusedHold) and not prompt.is_close and hold.limit in TOKEN_LIMITS | DOLLAR_LIMITS:
            prompt = prompt.closely()
            closer = await off_loop(call.size, partial(legs_of, call, route, prompt))
            if closer != legs:
                hold = await self._quotas.open(replace(request, legs=closer))
        for _ in range(FITTINGS):
            if isinstance(hold, Hold) or (fitted := _fitted(call, route, prompt, hold)) is None:
                break
            call = fitted
            legs = await off_loop(call.size, partial(legs_of, call, route, prompt))
            hold = await self._quotas.open(replace(request, legs=legs))
        if isinstance(hold, RefusedHold):
            refusal = self._refusal(hold, call.limit_headers, _limit_within(call, route, prompt, hold.headroom))
            full = {*call.without_room, hold.scope.model}
            if hold.scope.model and any(target.model.name not in full for target in route.targets):
                raise WithoutRoom(next(one for one in route.targets if one.model.name == hold.scope.model)) from refusal
            raise refusal
        account = CallAccounting(hold, self._journal, self._quotas, owes_parts=call.owes_parts, prompt=prompt)
        self._open_calls.add(account)
        return call, account

    async def admit_beside(self, named: Call, call: Call, route: Route, prompt: PromptBound | None) -> CallAccounting:
        """Hold once more what a call could cost on ``route``, for a second attempt that is ``named`` apart from it and
        counts as no request. ``prompt``: what its own hold covers.

        Raises RateLimited, ExceedsLimit or QuotaExhausted when a limit has no room for both.
        """
        legs = await off_loop(call.size, partial(legs_of, call, route, prompt))
        request = replace(_request_of(call, legs), request_id=named.request_id, is_internal=True)
        account = await self.admit_request(request, call.limit_headers)
        account.prompt = prompt
        return account

    async def most_of(self, call: Call, route: Route) -> HoldRequest:
        """Return what a call could use at the most on ``route``, at the price of live calls: what it costs should its
        batch not be answered."""
        at_live = replace(route, targets=tuple(map(_at_live_price, route.targets)))
        _, legs = await off_loop(call.size, partial(_bound, call, at_live))
        return _request_of(call, legs)

    def reserved(self, call: Call, hold: Hold) -> CallAccounting:
        """Return the account of a call whose hold is in a reservation: its row is stored with its answer."""
        account = CallAccounting(hold, self._journal, self._quotas, owes_parts=False)
        self._open_calls.add(account)
        return account

    def owe(self, call: Call, route: Route) -> CallAccounting:
        """Return the open account of a call that its upstream has begun: what it costs is owed, whatever there is room
        for, and nothing is held for it."""
        legs = tuple([replace(leg, tokens=0, cost_nanousd=0) for leg in legs_of(call, route)])
        account = CallAccounting(
            self._quotas.owe(replace(_request_of(call, legs), is_internal=True)),
            self._journal,
            self._quotas,
            owes_parts=call.owes_parts,
        )
        self._open_calls.add(account)
        return account

    async def admit_free(self, call: Call) -> CallAccounting:
        """Count a call that will use and cost nothing as a request, and return its open account.

        Raises RateLimited or QuotaExhausted when a limit has no room for it.
        """
        team = call.caller.team.id
        request = HoldRequest(request_id=call.request_id, team_id=team, scopes=scopes_of(call.caller), legs=())
        return await self.admit_request(request, call.limit_headers, owes_parts=call.owes_parts)

    async def admit_request(
        self, request: HoldRequest, limit_headers: LimitHeaders = rate_limit_headers, *, owes_parts: bool = False
    ) -> CallAccounting:
        """Hold what ``request`` says, and return its open account.

        Raises RateLimited, ExceedsLimit or QuotaExhausted when a limit has no room for it.
        """
        hold = await self._quotas.open(request)
        if isinstance(hold, RefusedHold):
            raise self._refusal(hold, limit_headers)
        account = CallAccounting(hold, self._journal, self._quotas, owes_parts=owes_parts)
        self._open_calls.add(account)
        return account

    @asynccontextmanager
    async def counted(
        self, request_id: str, caller: Caller, limit_headers: LimitHeaders = rate_limit_headers
    ) -> AsyncIterator[Hold]:
        """Count what runs inside the block as a request that uses and costs nothing, against every limit of its caller.

        Raises RateLimited or QuotaExhausted when a limit has no room for it.
        """
        request = HoldRequest(request_id=request_id, team_id=caller.team.id, scopes=scopes_of(caller), legs=())
        hold = await self._quotas.open(request)
        if isinstance(hold, RefusedHold):
            raise self._refusal(hold, limit_headers)
        try:
            yield hold
        finally:
            self._quotas.settle(hold, NOTHING)

    def settle(self, account: CallAccounting) -> None:
        """Settle the hold of a call whose account is closed, and stop looking after it."""
        account.settle()
        self._open_calls.remove(account)

    def _refusal(self, refused: RefusedHold, limit_headers: LimitHeaders, fits: int | None = None) -> ServiceError:
        error = refusal_error(refused, fits)
        error.headers |= limit_headers(refused, self._clock.now())
        return error


def _request_of(call: Call, legs: tuple[Leg, ...]) -> HoldRequest:
    return HoldRequest(
        request_id=call.request_id,
        team_id=call.caller.team.id,
        scopes=scopes_of(call.caller, legs) + value_scopes_of(call),
        legs=legs,
        is_internal=call.is_internal,
    )


def _at_live_price(target: Target) -> Target:
    model = target.model
    return Target(replace(model, price=replace(model.price, batch_discount=1.0)), target.endpoint, target.own)


def _bound(call: Call, route: Route) -> tuple[PromptBound, tuple[Leg, ...]]:
    """Return what the prompt comes to, looked at closely where it is long and counts, and what each target may use."""
    prompt = bound_prompt(call.request)
    team = call.caller.team
    has_more = team.model_limits or team.user_limits or team.tag_limits
    if not prompt.is_short and (has_more or any(map(_is_metered, scopes_of(call.caller)))):
        prompt = prompt.closely()
    return prompt, legs_of(call, route, prompt)


def _is_metered(scope: Scope) -> bool:
    """Whether it matters to a scope how many tokens a call holds."""
    limits = scope.limits
    caps = (limits.tokens_per_minute, limits.tokens_per_day, limits.nanousd_per_day, limits.nanousd_per_month)
    return any(cap is not None for cap in caps)


def _fitted(call: Call, route: Route, prompt: PromptBound, refused: RefusedHold) -> Call | None:
    """Return the call with the largest output limit for which the refusal says there is room, or with the least that is
    worthwhile: what has no room for that is refused for its sake, not for that of an answer that was not asked for.

    ``None`` where the limit is the caller's to say, is not what is in the way, or cannot be smaller. A call that no
    client waits for takes no less than the whole while waiting may bring it.
    """
    request = call.request
    if not isinstance(request, Generation) or request.output_limit not in (None, call.fitted_output):
        return None
    may_wait = (call.is_batch_item or call.is_internal) and not (refused.is_settled or refused.alone_exceeds)
    if may_wait or refused.limit not in TOKEN_LIMITS | DOLLAR_LIMITS:
        return None
    limit = _limit_within(call, route, prompt, refused.headroom)
    assert limit is not None
    models = [target.model for target in route.targets]
    usual = COMPLETION_LIMIT if isinstance(request, CompletionRequest) else max(each.usual_output for each in models)
    limit = min(max(limit, worthwhile_limit(request, models)), usual)
    if limit == call.fitted_output:
        return None
    return replace(call, request=with_output_limit(request, limit), fitted_output=limit)


def _limit_within(call: Call, route: Route, prompt: PromptBound, headroom: Headroom) -> int | None:
    """Return the largest output limit for which there is room on every target of ``route``; ``None``: it has none."""
    if not isinstance(call.request, Generation):
        return None
    models = {(target.model.name, target.model.provider): target.model for target in route.targets}
    batch = call.routing.tier is Tier.BATCH
    return limit_within(call.request, models.values(), headroom, prompt, batch=batch, at=call.created_at)


def legs_of(call: Call, route: Route, prompt: PromptBound | None = None) -> tuple[Leg, ...]:
    """Return the most that each target of ``route`` could use and cost. ``prompt`` as in ``usage_most``."""
    prompt = bound_prompt(call.request) if prompt is None else prompt
    batch = call.routing.tier is Tier.BATCH
    legs = []
    for target in route.targets:
        most = usage_most(call.request, target.model, prompt)
        if call.shown is not None and call.shown.context_management:  # what is compacted is read twice
            most = replace(most, input_tokens=2 * most.input_tokens)
        cost = most_cost(most, target.model.price, batch=batch, at=call.created_at)
        legs.append(Leg(target.key, most.total_tokens, cost, target.model.name))
    return tuple(legs)
