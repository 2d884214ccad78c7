# Walks a route until a target gives a first token, or a whole reply. Until then a failure moves on: to the target's
# next key, to the model's next endpoint, to the route's next model; or, where there is no other endpoint, to another
# try at the same one. From then on the answer is committed.

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from random import random
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from billing.records import Attempt
from gateway.answering.call import Call
from gateway.answering.unroll import events_of
from gateway.errors import Overloaded, UpstreamBusy, UpstreamError, UpstreamFailure, UpstreamRefused, UpstreamTimeout
from gateway.overload.turns import Slot
from gateway.providers.base import Asking, EventStream, Provider, Request, Resume, WholeReply
from gateway.providers.client import UpstreamResponse, read_error_body
from gateway.providers.manners import Manners
from gateway.providers.openai_request import ENGINE_FIELDS
from gateway.resilience.breakers import Permit
from gateway.resilience.deadline import Deadline
from gateway.resilience.keys import TargetAway
from gateway.resilience.retry import OF_THE_KEY, RetryBudget, next_pause
from gateway.services import Services
from gateway.settings import ProviderSettings
from protocol.chat import ChatRequest
from protocol.embeddings import EmbeddingRequest
from protocol.errors import ServiceError
from protocol.events import Delta, Event, ReplyEnd
from protocol.usage import Usage
from router.bounds import USUAL_TOKEN_BYTES, output_limit, prompt_characters
from router.targets import HEALTHY, ModelSpec, Route, Target, TargetHealth

LESSONS = 2  # that one call may learn of a target's manners
LONGEST_WAIT = 60  # seconds that a client is told to wait, at the most


@dataclass(slots=True)
class Answering:
    """An upstream that has begun to answer: a stream with its first events, or a whole reply."""

    target: Target
    provider: ProviderSettings
    first: list[Event]
    events: EventStream | None = None
    response: UpstreamResponse | None = None
    whole: WholeReply | None = None
    usage: Usage | None = None
    permit: Permit | None = None  # under which it was asked,
    began: float = 0.0  # and when it began to answer, in monotonic seconds
    let_go: Callable[[], None] | None = None  # gives back the slot that it holds

    async def close(self) -> None:
        """Close the upstream, at once if it is still speaking, and give its slot back."""
        if self.response is not None:
            await self.response.close()
        if self.let_go is not None:
            self.let_go()


class AttemptLog:
    """What was tried for one call, and how long was spent waiting: for a turn, and for upstreams."""

    def __init__(self, queued: float = 0.0) -> None:
        self.attempts: list[Attempt] = []
        self.queued = queued  # seconds
        self.waited = 0.0  # seconds

    @property
    def queue_ms(self) -> float | None:
        """Return the milliseconds spent waiting for a turn, ``None`` for a call that had it at once."""
        return round(self.queued * 1000, 3) if self.queued else None

    def add(self, target: Target, outcome: str, seconds: float) -> None:
        """Note one attempt."""
        self.attempts.append(Attempt(target.key, outcome, round(seconds * 1000, 3)))
        self.waited += seconds

    def broke(self, outcome: str) -> None:
        """Note that the answer of the latest attempt broke in mid-stream."""
        if self.attempts:
            self.attempts[-1] = replace(self.attempts[-1], outcome=outcome)


class Trip(Struct, frozen=True):
    """What all attempts of one call share: its deadline, the budget that its extra attempts are on, and what of the
    reply is there already."""

    deadline: Deadline
    budget: RetryBudget
    resume: Resume | None = None


async def send_along_route(
    services: Services, call: Call, route: Route, log: AttemptLog, slot: Slot | None = None
) -> Answering:
    """Try the targets in order and return the first that answers. ``slot`` is the one held at the first of them.

    Raises the last UpstreamFailure when none does; without any, Overloaded or UpstreamBusy: no target may be asked.
    """
    first = services.providers.settings(route.targets[0].model.provider)
    trip = Trip(Deadline(call.started + first.timeouts.total), services.budgets.of(first))
    trip.budget.deposit(services.clock.monotonic())
    return await walk(services, call, route, trip, log, slot)


async def walk(
    services: Services,
    call: Call,
    route: Route,
    trip: Trip,
    log: AttemptLog,
    slot: Slot | None = None,
    failure: UpstreamFailure | None = None,
) -> Answering:
    """Try the targets in order and return the first that answers.

    ``slot`` is held at the first of them, unless there is a ``failure``: what became of the call before.
    Raises as ``send_along_route`` does.
    """
    away: list[TargetAway] = []
    for place, target in enumerate(route.targets):
        if failure is not None and not _may_move_on(services, trip, target):
            break
        try:
            if place > 0 or failure is not None:
                slot = services.gate.take(call, target, goes_on=trip.resume is not None)
            return await send_in_slot(services, call, route, place, trip, log, slot)
        except TargetAway as exc:
            away.append(exc)
        except UpstreamFailure as exc:
            if not exc.moves_on:
                raise
            failure = exc
    raise failure or _nobody(away)


async def send_in_slot(
    services: Services, call: Call, route: Route, place: int, trip: Trip, log: AttemptLog, slot: Slot | None
) -> Answering:
    """Ask the target at ``place``, and keep its slot for as long as it speaks. Raises as ``send_with_retries`` does."""
    try:
        answering = await send_with_retries(services, call, route, place, trip, log)
    except BaseException:
        services.gate.release(slot)
        raise
    if answering.whole is not None:
        services.gate.release(slot)
    elif slot is not None:
        answering.let_go = partial(services.gate.release, slot)
    return answering


async def send_with_retries(
    services: Services, call: Call, route: Route, place: int, trip: Trip, log: AttemptLog
) -> Answering:
    """Ask the target at ``place``: with each of its keys, and again after a fault that may pass, as the budget allows.

    Raises UpstreamFailure, or TargetAway when it may not be asked at all.
    """
    breakers, clock, target = services.breakers, services.clock, route.targets[place]
    retries = services.providers.settings(target.model.provider).retries
    tries = 0
    permit = await breakers.enter(target, _tokens_for_limits(services, call))
    started = clock.monotonic()
    while True:
        try:
            answering = await send_politely(services, call, target, permit, trip, log)
        except UpstreamFailure as exc:
            now = clock.monotonic()
            log.add(target, exc.outcome, now - started)
            breakers.failed(permit, exc, call.caller.team.id, prompt_characters(call.request))
            if not exc.moves_on:
                raise
            failure = exc
        except BaseException:
            log.add(target, "abandoned", clock.monotonic() - started)  # its client left, or we are closing
            breakers.abandoned(permit)
            raise
        else:
            breakers.succeeded(permit)
            answering.permit, answering.began = permit, clock.monotonic()
            log.add(target, "ok", answering.began - started)
            return answering
        if failure.outcome in OF_THE_KEY:
            if not breakers.has_other_key(permit) or not trip.budget.take_move(now):
                raise failure
        else:
            tries += 1
            left, has_sibling = trip.deadline.left(now), _has_sibling(services, route, place)
            pause = next_pause(failure, tries, retries, time_left=left, dice=random(), has_sibling=has_sibling)
            if pause is None or not trip.budget.take_retry(now):
                raise failure
            await asyncio.sleep(pause)
        permit = await _enter_again(services, call, target, failure)
        started = now  # the pause is a part of the attempt that it is for: it is the upstream's doing, not ours


async def send_politely(
    services: Services, call: Call, target: Target, permit: Permit, trip: Trip, log: AttemptLog
) -> Answering:
    """Ask one target, and again where it refuses a field that it can be asked without. Raises UpstreamFailure."""
    known = services.providers.manners
    for _ in range(LESSONS):
        manners, started = known.of(target), services.clock.monotonic()
        try:
            return await send_once(services, call, target, permit, trip, manners)
        except UpstreamRefused as exc:
            is_openai = services.providers.settings(target.model.provider).format == "openai"
            if not is_openai or not known.learn(target, manners, exc):
                raise
            log.add(target, exc.outcome, services.clock.monotonic() - started)
    return await send_once(services, call, target, permit, trip, known.of(target))


async def send_once(
    services: Services, call: Call, target: Target, permit: Permit, trip: Trip, manners: Manners
) -> Answering:
    """Ask one target and wait for its first token, or for its whole reply. Raises UpstreamFailure."""
    registry = services.providers
    provider = registry.settings(target.model.provider)
    wire = registry.format(target.model.provider)
    # Our own engine always streams to us: a reply that breaks can then be continued, and is charged by its tokens.
    streams = call.streams or (provider.self_hosted and not isinstance(call.request, EmbeddingRequest))
    asking = Asking(
        request=_within_output(call.request, target.model),
        target=target,
        api_key=permit.api_key,
        streams=streams,
        self_hosted=provider.self_hosted,
        native=call.native,
        extra=_allowed_extra(call, provider),
        manners=manners,
        tenant=call.caller.team.id,
        weight=call.caller.team.weight,
        tier=call.wish.tier.value,
        fails_over=len(provider.endpoints) > 1,
        seed=int(call.request_id[-8:], 16),
        resume=trip.resume,
    )
    usual = provider.timeouts.first_token if streams else provider.timeouts.total
    patience = trip.deadline.within(usual, services.clock.monotonic())
    ends = asyncio.get_running_loop().time() + patience
    try:
        response = await services.client.send(wire.build_request(asking), provider.timeouts.connect, patience)
        services.breakers.heard(permit, response.headers)
        return await _read_answer(call, target, provider, wire, response, streams=streams, ends=ends)
    except UpstreamTimeout as exc:
        if patience < 0.9 * usual:  # earlier attempts took its time
            exc.outcome = "deadline"
        raise


async def _read_answer(
    call: Call,
    target: Target,
    provider: ProviderSettings,
    wire: Provider,
    response: UpstreamResponse,
    *,
    streams: bool,
    ends: float,
) -> Answering:
    """Read up to the first token, or to the end of a plain reply. Raises UpstreamFailure, the response closed."""
    try:
        if not 200 <= response.status < 300:
            raise wire.read_error(response.status, response.headers, await read_error_body(response))
        async with asyncio.timeout_at(ends):
            begun = await response.next_piece() if streams else b""
            if streams and (begun is None or not begun[:64].lstrip().startswith(b"{")):
                events = wire.open_events(call.request)
                return Answering(target, provider, await _read_first(response, events, begun), events, response)
            whole, usage = wire.read_reply(call.request, (begun or b"") + await response.read())
        await response.close()
        if streams:  # it does not know how to, and answered in JSON
            return Answering(target, provider, events_of(whole, usage))
        return Answering(target, provider, [], whole=whole, usage=usage)
    except TimeoutError as exc:
        await response.close()
        raise UpstreamTimeout("The upstream did not answer in time.") from exc
    except BaseException:
        await response.close()
        raise


def refusal(services: Services, route: Route, health: Mapping[str, TargetHealth]) -> ServiceError | None:
    """Return what to tell a call none of whose targets may be asked now; ``None`` when one may."""
    if not health or not all(health.get(target.key, HEALTHY).is_open for target in route.targets):
        return None
    away = [exc for target in route.targets if (exc := services.breakers.why_away(target)) is not None]
    return _nobody(away) if len(away) == len(route.targets) else None


def _nobody(away: list[TargetAway]) -> ServiceError:
    """Return the honest answer when no target may be asked: the rate limit of all of them, or 503."""
    soonest = min((exc.retry_in for exc in away), default=1.0)
    wait = max(1, math.ceil(min(soonest, LONGEST_WAIT)))
    if away and all(exc.is_busy for exc in away):
        return UpstreamBusy("The upstream's rate limit is reached.", retry_after=wait)
    return Overloaded("Every upstream of this model is failing or at its limit. Try again later.", retry_after=wait)


def _has_sibling(services: Services, route: Route, place: int) -> bool:
    """Whether the model has another endpoint further along the route that may be asked."""
    model = route.targets[place].model
    later = [target for target in route.targets[place + 1 :] if target.model is model]
    return any(services.breakers.why_away(target) is None and not services.gate.is_full(target) for target in later)


def _may_move_on(services: Services, trip: Trip, target: Target) -> bool:
    now = services.clock.monotonic()
    is_full = trip.resume is None and services.gate.is_full(target)
    if is_full or services.breakers.why_away(target) is not None:
        return True  # it costs nothing to pass it by
    return trip.deadline.left(now) > 0 and trip.budget.take_move(now)


async def _enter_again(services: Services, call: Call, target: Target, failure: UpstreamFailure) -> Permit:
    """Return leave for another try at a target. Raises ``failure`` when there is none any more."""
    try:
        return await services.breakers.enter(target, _tokens_for_limits(services, call))
    except TargetAway:
        raise failure from None


def _tokens_for_limits(services: Services, call: Call) -> int:
    """Return about how many tokens a call counts against its upstream's limits; 1 while no key is near one."""
    return 1 + prompt_characters(call.request) // USUAL_TOKEN_BYTES if services.breakers.knows_limits else 1


def _allowed_extra(call: Call, provider: ProviderSettings) -> dict[str, Any]:
    """Return those of the fields unknown to us that this provider may be sent."""
    if not call.extra:
        return {}
    allowed = provider.allow_fields | ENGINE_FIELDS if provider.self_hosted else provider.allow_fields
    return {name: value for name, value in call.extra.items() if name in allowed}


def _within_output(request: Request, model: ModelSpec) -> Request:
    """Return the request with the output limit that its hold covers: a spare may be smaller than the model asked."""
    limit = output_limit(request, model)
    if isinstance(request, EmbeddingRequest) or request.output_limit == limit:
        return request
    if isinstance(request, ChatRequest):
        return replace(request, max_tokens=None, max_completion_tokens=limit)
    return replace(request, max_tokens=limit)


async def _read_first(response: UpstreamResponse, events: EventStream, piece: bytes | None) -> list[Event]:
    """Return the events up to the first token, from the first ``piece`` on.

    A role alone, a ping or a comment is none; an empty reply is whole.
    """
    seen: list[Event] = []
    while piece is not None:
        fresh = events.feed(piece)
        seen += fresh
        if any(isinstance(event, ReplyEnd) or (isinstance(event, Delta) and event.has_content) for event in fresh):
            return seen
        if events.failure is not None:
            raise events.failure
        piece = await response.next_piece()
    seen += events.finish()
    if not any(isinstance(event, ReplyEnd) for event in seen):
        raise UpstreamError("The upstream sent nothing.", outcome="empty")
    return seen
