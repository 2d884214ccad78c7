# Walks a route until a target gives a first token, or a whole reply. Until then a failure moves on: to the target's
# next key, to the model's next endpoint, to the route's next model; or, where there is no other endpoint, to another
# try at the same one. From then on the answer is committed.

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from random import random

from gateway.calls.call import Call
from gateway.calls.unanswered import Tried, none_may_be_asked, told_of_all
from gateway.inference.attempt import Answering, AttemptLog, Trip, send_politely
from gateway.inference.services import Services
from gateway.overload.slots import Slot
from gateway.upstreams.resilience.breakers import Permit
from gateway.upstreams.resilience.deadline import Deadline
from gateway.upstreams.resilience.keys import TargetAway
from gateway.upstreams.resilience.retry import OF_THE_KEY, next_pause
from gateway.upstreams.wire.errors import UpstreamFailure, UpstreamRefused, UpstreamTooLong, UpstreamUnable
from protocol.errors import ServiceError
from router.catalog.targets import HEALTHY, Route, Target, TargetHealth, Tier
from router.prompt_size.prompt_bounds import USUAL_TOKEN_BYTES
from router.prompt_size.prompt_lengths import prompt_characters


async def send_along_route(
    services: Services, call: Call, route: Route, log: AttemptLog, slot: Slot | None = None
) -> Answering:
    """Try the targets in order and return the first that answers. ``slot`` is the one held at the first of them.

    Raises the last UpstreamFailure when none does, which then tells of all; without any, Overloaded or UpstreamBusy: no
    target may be asked.
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
    tried: list[Tried] = []
    unable: set[str] = set()  # models that lack a parameter, at whichever endpoint
    too_short = 0  # tokens of the longest context that the prompt did not fit into
    for place, target in enumerate(route.targets):
        if target.model.name in unable or target.model.context <= too_short:
            continue
        if failure is not None and not _may_move_on(services, trip, target, failure):
            break
        try:
            if place > 0 or failure is not None:
                slot = services.gate.take(call, target, goes_on=trip.resume is not None)
            return await send_in_slot(services, call, route, place, trip, log, slot)
        except TargetAway as exc:
            tried.append((target, exc))
        except UpstreamFailure as exc:
            if not exc.moves_on:
                raise
            if isinstance(exc, UpstreamUnable):
                unable.add(target.model.name)
            if isinstance(exc, UpstreamTooLong):
                too_short = max(too_short, target.model.context)
            tried.append((target, exc))
            failure = exc
    raise none_may_be_asked(call, tried) if failure is None else told_of_all(call, tried, failure)


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
            if answering.events is not None and not tries and call.routing.tier is Tier.INTERACTIVE:
                services.first_tokens.note(target, answering.began - started)
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


def refusal(services: Services, call: Call, route: Route, health: Mapping[str, TargetHealth]) -> ServiceError | None:
    """Return what to tell a call none of whose targets may be asked now; ``None`` when one may."""
    if not health or not all(health.get(target.key, HEALTHY).is_open for target in route.targets):
        return None
    away = [(target, exc) for target in route.targets if (exc := services.breakers.why_away(target)) is not None]
    return none_may_be_asked(call, away) if len(away) == len(route.targets) else None


def _has_sibling(services: Services, route: Route, place: int) -> bool:
    """Whether the model has another endpoint further along the route that may be asked."""
    model = route.targets[place].model
    later = [target for target in route.targets[place + 1 :] if target.model is model]
    return any(services.breakers.why_away(target) is None and not services.gate.is_full(target) for target in later)


def _may_move_on(services: Services, trip: Trip, target: Target, failure: UpstreamFailure) -> bool:
    now = services.clock.monotonic()
    is_full = trip.resume is None and services.gate.is_full(target)
    if is_full or services.breakers.why_away(target) is not None:
        return True  # it costs nothing to pass it by
    # The budget is against storms on what is ill; a model that lacks a parameter, or tokens of context, is well.
    return trip.deadline.left(now) > 0 and (isinstance(failure, UpstreamRefused) or trip.budget.take_move(now))


async def _enter_again(services: Services, call: Call, target: Target, failure: UpstreamFailure) -> Permit:
    """Return leave for another try at a target. Raises ``failure`` when there is none any more."""
    try:
        return await services.breakers.enter(target, _tokens_for_limits(services, call))
    except TargetAway:
        raise failure from None


def _tokens_for_limits(services: Services, call: Call) -> int:
    """Return about how many tokens a call counts against its upstream's limits; 1 while no key is near one."""
    return 1 + prompt_characters(call.request) // USUAL_TOKEN_BYTES if services.breakers.knows_limits else 1
