# Tries the targets of a route until one gives a first token, or a whole reply. Until then a failure moves on: to the
# target's next key, to the model's next endpoint, to the route's next model; or, where there is no other endpoint, to
# another try at the same one. From then on the answer is committed.

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from random import random

from msgspec import Struct
from msgspec.structs import replace

from billing.core.records import CACHED
from gateway.cache.cached_answers import answering_of
from gateway.cache.kept_answers import KeptAnswer
from gateway.calls.answering import Answering
from gateway.calls.call import Call
from gateway.calls.parallel_replies import answered_at_once, check_number
from gateway.calls.remote_prefill import FIELD, RemotePrefills
from gateway.calls.unanswered import Tried, failed_at, none_may_be_asked, told_of_all
from gateway.core.clock import Clock
from gateway.core.settings import ProviderSettings
from gateway.inference.attempt import AttemptContext, AttemptLog, asking_of, is_success, read_answer, streams_from
from gateway.inference.limiter import TargetLimiter
from gateway.moderation.tied_ids import opened
from gateway.overload.slots import Slot
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.registry import RESPONSES, ProviderRegistry
from gateway.upstreams.resilience.breakers import Breakers, Permit
from gateway.upstreams.resilience.first_tokens import FirstTokens
from gateway.upstreams.resilience.keys import TargetAway
from gateway.upstreams.resilience.retry import OF_THE_KEY, Deadline, next_pause
from gateway.upstreams.resilience.retry_budget import RetryBudgets
from gateway.upstreams.wire.base import Resume, UpstreamRequest
from gateway.upstreams.wire.errors import (
    UpstreamFailure,
    UpstreamRefused,
    UpstreamTimeout,
    UpstreamTooLong,
    UpstreamUnable,
)
from gateway.upstreams.wire.quirks import Quirks
from protocol.errors import ServiceError
from protocol.media.images import ImageRequest
from protocol.serving.off_loop import off_loop
from router.catalog.targets import Route, Target, Tier
from router.prompt_size.bounds import output_limit, requests_made
from router.prompt_size.prompt_bounds import USUAL_TOKEN_BYTES, PromptBound
from router.prompt_size.prompt_lengths import prompt_characters

# What is told of a key that a team brought.
OF_OWN_KEYS = {
    "refused_key": "The team's own key for {} was refused there.",
    "spend_cap": "The team's own account at {} is used up.",
    "rate_limited": "The rate limit of the team's own key for {} is reached.",
}
LESSONS = 2  # that one call may find out of a target's quirks


class Dispatcher(Struct, eq=False):
    """Sends calls to upstreams, in three rungs: along the route, with retries at one target, once."""

    _providers: ProviderRegistry
    _client: UpstreamClient
    _breakers: Breakers
    _budgets: RetryBudgets
    _limiter: TargetLimiter
    _prefills: RemotePrefills
    _first_tokens: FirstTokens
    _clock: Clock

    def begin(
        self,
        call: Call,
        route: Route,
        log: AttemptLog,
        prompt: PromptBound | None = None,
        enter: Callable[[], None] = lambda: None,
    ) -> AttemptContext:
        """Return what the attempts of a call share. ``prompt``: what its hold covers of it."""
        first = self._providers.settings(route.targets[0].model.provider)
        deadline = Deadline(call.started + first.timeouts.total)
        return AttemptContext(call, route, log, deadline, self._budgets.of(first), prompt=prompt, enter=enter)

    def go_on(
        self, context: AttemptContext, route: Route, provider: ProviderSettings, resume: Resume
    ) -> AttemptContext:
        """Return what the attempts share that go on with a broken reply of ``provider`` along the rest of its route."""
        deadline = Deadline(context.call.started + provider.timeouts.total)
        return replace(context, route=route, deadline=deadline, budget=self._budgets.of(provider), resume=resume)

    def opened(self, call: Call) -> Call:
        """Return a call with ids of what a provider keeps as that knows them. Raises BadRequest for another team's."""
        return opened(call, partial(self._providers.untied, call.caller.team.id))

    def tie_of(self, call: Call) -> Callable[[str], str]:
        """Return what makes such ids of the provider's the team's."""
        return partial(self._providers.tied, call.caller.team.id)

    async def build(self, call: Call, route: Route) -> UpstreamRequest:
        """Return what the first target of a route would be sent. Raises UpstreamFailure for what it cannot say."""
        context, target = self.begin(self.opened(call), route, AttemptLog()), route.targets[0]
        provider, now = self._providers.settings_at(target), self._clock.monotonic()
        quirks = replace(self._providers.quirks.of(target, now), responses=False)  # a line is a chat
        limit = await off_loop(call.size, lambda: output_limit(call.request, target.model))
        asking = asking_of(context, target, provider, None, quirks, limit, now)
        wire = self._providers.format(target.model.provider)
        return await off_loop(call.size, lambda: wire.build_request(asking))

    async def give_kept(self, context: AttemptContext, kept: KeptAnswer) -> Answering:
        """Return what the cache has in the place of the first target's answer."""
        context.enter()
        target = context.route.targets[0]
        context.log.add(target, CACHED, 0.0)
        return answering_of(kept, target, self._providers.settings(target.model.provider))

    async def try_targets(
        self, context: AttemptContext, first_slot: Slot | None = None, failure: UpstreamFailure | None = None
    ) -> Answering:
        """Try the targets in order and return the first that answers.

        ``first_slot`` is held at the first of them, unless there is a ``failure``: what became of the call before.
        Raises the last UpstreamFailure when none answers, which then tells of all; without any, Overloaded or
        AllLimited: no target may be asked.
        """
        if failure is None:  # else it goes on with a reply that broke: one call, counted once
            context.budget.deposit(self._clock.monotonic())
        tried: list[Tried] = []
        unable: set[tuple[str, str]] = set()  # models of a provider that lack a parameter, at whichever endpoint
        too_short = 0  # tokens of the longest context that the prompt did not fit into
        for place, target in enumerate(context.route.targets):
            place_of_model = target.model.name, target.model.provider
            if place_of_model in unable or target.model.context <= too_short:
                continue
            if failure is not None and not self._may_move_on(context, target, failure):
                break
            is_first = place == 0 and failure is None
            held = first_slot if is_first else None
            try:
                if not is_first:
                    held = self._limiter.take(context.call, target, goes_on=context.resume is not None)
                return self._in_slot(await self._send_with_retries(context, place), held)
            except UpstreamFailure as exc:
                self._limiter.release(held)
                exc.facts = failed_at(context.call, target)
                if not exc.moves_on:
                    raise
                if isinstance(exc, UpstreamUnable):
                    unable.add(place_of_model)
                if isinstance(exc, UpstreamTooLong):
                    too_short = max(too_short, target.model.context)
                tried.append((target, exc))
                failure = exc
            except TargetAway as exc:
                self._limiter.release(held)
                tried.append((target, exc))
            except BaseException:
                self._limiter.release(held)
                raise
        raise none_may_be_asked(context.call, tried) if failure is None else told_of_all(context.call, tried, failure)

    async def try_beside(self, context: AttemptContext) -> Answering:
        """Ask the one target of a route beside another attempt of the call. Raises UpstreamFailure or TargetAway."""
        slot = self._limiter.take(context.call, context.route.targets[0])
        try:
            return self._in_slot(await self._send_with_retries(context, 0), slot)
        except BaseException:
            self._limiter.release(slot)
            raise

    def can_ask(self, target: Target) -> bool:
        """Whether a target may be asked now."""
        return not (self.is_away(target) or self._limiter.is_full(target))

    def is_away(self, target: Target) -> bool:
        """Whether its breaker is open, or its keys are at their limits."""
        return self._breakers.why_away(target) is not None

    async def _send_with_retries(self, context: AttemptContext, place: int) -> Answering:
        """Ask the target at ``place``: with each of its keys, without a field that it refuses, and again after a fault
        that may pass, as the budget allows.

        Raises UpstreamFailure, or TargetAway when it may not be asked at all.
        """
        call, breakers, clock = context.call, self._breakers, self._clock
        target = context.route.targets[place]
        tries = lessons = 0
        permit = await breakers.enter(target, self._tokens_for_limits(call))
        started = clock.monotonic()
        quirks = known = self._providers.quirks.of(target, started)
        while True:
            try:
                answering = await self._send_once(context, target, permit, quirks)
            except UpstreamFailure as exc:
                failure, ended = exc, clock.monotonic()
            except BaseException:
                context.log.add(target, "abandoned", clock.monotonic() - started)  # its client left, or we are closing
                breakers.abandoned(permit)
                raise
            else:
                breakers.succeeded(permit)
                ended = clock.monotonic()
                context.log.add(target, "ok", ended - started)
                if answering.events is not None and not tries and call.routing.tier is Tier.INTERACTIVE:
                    self._first_tokens.note(target, ended - started)
                return replace(answering, permit=permit, began=ended, found=None if quirks == known else quirks)
            context.log.add(target, failure.outcome, ended - started)
            if lessons < LESSONS and (better := self._adapted(quirks, failure, target, call)) is not None:
                quirks, lessons = better, lessons + 1
            else:
                breakers.failed(permit, failure, call.caller.team.id, prompt_characters(call.request))
                if pause := self._pause_before_next(context, place, permit, failure, tries, ended):
                    await asyncio.sleep(pause)
                tries += failure.outcome not in OF_THE_KEY
                permit = await self._enter_again(call, target, failure)
            started = ended  # the pause is a part of the attempt that it is for: it is the upstream's doing, not ours

    def _pause_before_next(
        self, context: AttemptContext, place: int, permit: Permit, failure: UpstreamFailure, tries: int, now: float
    ) -> float:
        """Return the seconds until the target at ``place`` is asked again: none for another key, some after a fault
        that may pass. Raises ``failure`` where it is not. ``tries``: those of before that such faults ended."""
        if not failure.moves_on:
            raise failure
        if failure.outcome in OF_THE_KEY:
            if self._breakers.has_other_key(permit) and context.budget.take_move(now):
                return 0.0
            raise failure
        pause = next_pause(
            failure,
            tries + 1,
            self._providers.settings(context.route.targets[place].model.provider).retries,
            time_left=context.deadline.left(now),
            dice=random(),
            has_sibling=self._has_sibling(context.route, place),
        )
        if pause is None or not context.budget.take_retry(now):
            raise failure
        return pause

    async def _send_once(self, context: AttemptContext, target: Target, permit: Permit, quirks: Quirks) -> Answering:
        """Ask one target and wait for its first token, or its whole reply. Raises UpstreamFailure, or JournalFull."""
        context.enter()
        call = context.call
        provider = self._providers.settings(target.model.provider)
        streams = streams_from(call, provider)
        # What its hold covers: a spare may be smaller than the model asked.
        limit = output_limit(call.request, target.model, context.prompt)
        token = await self._providers.token_for(target, self._client, self._clock.monotonic())
        now = self._clock.monotonic()
        asking = asking_of(context, target, provider, permit.api_key, quirks, limit, now, token)
        if marks := self._limiter.header_for(call, target):
            asking = replace(asking, marks=marks)
        comes_soon = streams and not isinstance(call.request, ImageRequest)
        usual = provider.timeouts.first_token if comes_soon else provider.timeouts.total
        patience = context.deadline.within(usual, now)
        if provider.prefill is not None and not context.log.attempts:
            began = now
            told, context.log.prefill = await self._prefills.params_for(call, asking, patience)
            if told:
                asking = replace(asking, extra={**asking.extra, FIELD: told})
            patience -= (now := self._clock.monotonic()) - began
            asking = replace(asking, time_left=context.deadline.left(now))
        ends = asyncio.get_running_loop().time() + patience
        if (number := requests_made(call.request, target.model)) > 1:
            check_number(number)
            asking = replace(asking, request=replace(asking.request, n=None))
        wire = self._providers.format(provider.name) if asking.response is None else RESPONSES
        built, response = await off_loop(call.size, lambda: wire.build_request(asking)), None
        built = self._providers.dress(built, target)
        read = partial(read_answer, target=target, provider=provider, wire=wire, streams=streams, ends=ends)
        try:
            if number > 1:
                send = partial(self._client.send, connect=provider.timeouts.connect, patience=patience)
                hear = partial(self._breakers.heard, permit)
                answering = await answered_at_once(number, built, send, hear, partial(read, asking.request))
            else:
                response = await self._client.send(built, provider.timeouts.connect, patience)
                self._breakers.heard(permit, response.headers)
                answering = await read(call.request, response)
            return replace(answering, dropped=built.dropped) if built.dropped else answering
        except UpstreamTimeout as exc:
            if patience < 0.9 * usual:  # earlier attempts took its time
                exc.outcome = "deadline"
            raise
        except UpstreamFailure as exc:
            if token is not None and exc.outcome == "refused_key":
                self._providers.refuse_token(target, token)
            if target.own is not None and exc.outcome in OF_OWN_KEYS:
                exc.message = OF_OWN_KEYS[exc.outcome].format(provider.name)
            raise
        except asyncio.CancelledError:
            context.log.left(is_received=built.delivery.is_whole and (response is None or is_success(response)))
            raise

    def refusal(self, call: Call, route: Route) -> ServiceError | None:
        """Return what to tell a call none of whose targets may be asked now; ``None`` when one may."""
        away: list[Tried] = []
        for target in route.targets:
            if (why := self._breakers.why_away(target)) is None:
                return None
            away.append((target, why))
        return none_may_be_asked(call, away)

    def note_broken(self, context: AttemptContext, answering: Answering, failure: UpstreamFailure) -> None:
        """Put down whose answer it was that broke."""
        context.log.broke(failure.outcome)
        failure.facts = failed_at(context.call, answering.target)
        if answering.permit is not None:
            team, size = context.call.caller.team.id, prompt_characters(context.call.request)
            self._breakers.broke(answering.permit, answering.began, failure, team, size)

    def _in_slot(self, answering: Answering, slot: Slot | None) -> Answering:
        """Have an answer keep its slot for as long as it comes."""
        if slot is None:
            return answering
        expected = self._limiter.note_first_token(slot)
        if answering.whole is not None:
            self._limiter.release(slot)
            return answering
        return replace(answering, let_go=partial(self._limiter.release, slot), expected_hit=expected)

    def _has_sibling(self, route: Route, place: int) -> bool:
        """Whether the model has another endpoint further along the route that may be asked."""
        model = route.targets[place].model
        later = [target for target in route.targets[place + 1 :] if target.model.name == model.name]
        return any(map(self.can_ask, later))

    def _may_move_on(self, context: AttemptContext, target: Target, failure: UpstreamFailure) -> bool:
        now = self._clock.monotonic()
        if context.log.is_hedged:
            return False  # another attempt is under way
        is_full = context.resume is None and self._limiter.is_full(target)
        if is_full or self.is_away(target):
            return True  # it costs nothing to pass it by
        # The budget is against storms on what is ill; a model that lacks a parameter, or tokens of context, is well.
        return context.deadline.left(now) > 0 and (
            isinstance(failure, UpstreamRefused) or context.budget.take_move(now)
        )

    async def _enter_again(self, call: Call, target: Target, failure: UpstreamFailure) -> Permit:
        """Return leave for another try at a target. Raises ``failure`` when there is none any more."""
        try:
            return await self._breakers.enter(target, self._tokens_for_limits(call))
        except TargetAway:
            raise failure from None

    def _tokens_for_limits(self, call: Call) -> int:
        """Return about how many tokens a call counts against its upstream's limits; 1 while no key is near one."""
        return 1 + prompt_characters(call.request) // USUAL_TOKEN_BYTES if self._breakers.knows_limits else 1

    def _adapted(self, quirks: Quirks, refusal: UpstreamFailure, target: Target, call: Call) -> Quirks | None:
        """Return how a target can be asked that refuses a field, where it can be asked without."""
        provider = self._providers.settings(target.model.provider)
        if provider.responses and quirks.responses and call.shown is not None:
            return quirks.adapted_to_failed_response(refusal)
        if provider.format != "openai" or not isinstance(refusal, UpstreamRefused):
            return None
        return quirks.adapted_to(refusal, call.as_message is not None)
