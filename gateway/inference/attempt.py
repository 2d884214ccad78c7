# One attempt: asks one target with one key, and waits for its first token or its whole reply. Which target is asked,
# and what follows a failure, attempts.py decides.

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from billing.core.records import Attempt
from gateway.calls.as_events import events_of
from gateway.calls.call import Call
from gateway.core.settings import ProviderSettings
from gateway.inference.services import Services
from gateway.upstreams.client import UpstreamResponse, read_error_body
from gateway.upstreams.openai.request import ENGINE_FIELDS
from gateway.upstreams.resilience.breakers import Permit
from gateway.upstreams.resilience.deadline import Deadline
from gateway.upstreams.resilience.retry import RetryBudget
from gateway.upstreams.wire.base import Asking, EventStream, Provider, Resume
from gateway.upstreams.wire.errors import UpstreamError, UpstreamRefused, UpstreamTimeout
from gateway.upstreams.wire.quirks import Manners
from protocol.embeddings import EmbeddingRequest
from protocol.events import Delta, Event, ReplyEnd
from protocol.inference import WholeReply
from protocol.serving.off_loop import off_loop
from protocol.usage import Usage
from router.catalog.targets import Target
from router.prompt_size.bounds import output_limit, with_output_limit

LESSONS = 2  # that one call may find out of a target's quirks


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
    found: Manners | None = None  # how it was asked, where that is not what is known of its target
    permit: Permit | None = None  # under which it was asked,
    began: float = 0.0  # and when it began to answer, in monotonic seconds
    dropped: tuple[str, ...] = ()  # fields of the request that the upstream was not told
    let_go: Callable[[], None] | None = None  # gives back the slot that it holds

    def close(self) -> None:
        """Close the upstream, at once if it is still speaking, and give its slot back."""
        if self.response is not None:
            self.response.close()
        if self.let_go is not None:
            self.let_go()


class AttemptLog:
    """What was tried for one call, and how long was spent waiting: for a turn, and for upstreams."""

    def __init__(self, queued: float = 0.0) -> None:
        self.attempts: list[Attempt] = []
        self.queued = queued  # seconds
        self.waited = 0.0  # seconds
        self.was_left_waiting = False  # the call was cancelled while an upstream had all of it, and had refused nothing

    @property
    def has_answered(self) -> bool:
        """Whether a first token, or a whole reply, has come."""
        return bool(self.attempts) and self.attempts[-1].outcome == "ok"

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


async def send_politely(
    services: Services, call: Call, target: Target, permit: Permit, trip: Trip, log: AttemptLog
) -> Answering:
    """Ask one target, and again where it refuses a field that it can be asked without. Raises UpstreamFailure."""
    started = services.clock.monotonic()
    manners = known = services.providers.manners.of(target, started)
    for lessons_left in range(LESSONS, -1, -1):
        try:
            answering = await send_once(services, call, target, permit, trip, manners, log)
            break
        except UpstreamRefused as exc:
            is_openai = services.providers.settings(target.model.provider).format == "openai"
            better = manners.bettered_by(exc, call.native is not None) if is_openai and lessons_left else None
            if better is None:
                raise
            manners, now = better, services.clock.monotonic()
            log.add(target, exc.outcome, now - started)
            started = now
    if manners != known:
        answering.found = manners
    return answering


async def send_once(
    services: Services, call: Call, target: Target, permit: Permit, trip: Trip, manners: Manners, log: AttemptLog
) -> Answering:
    """Ask one target and wait for its first token, or for its whole reply. Raises UpstreamFailure."""
    registry = services.providers
    provider = registry.settings(target.model.provider)
    wire = registry.format(target.model.provider)
    # Our own engine always streams to us: a reply that breaks can then be continued, and is charged by its tokens.
    streams = call.streams or (provider.self_hosted and not isinstance(call.request, EmbeddingRequest))
    # What its hold covers: a spare may be smaller than the model asked.
    limit = await off_loop(call.size, lambda: output_limit(call.request, target.model))
    extra = _allowed_extra(call, provider)
    asking = Asking(
        request=with_output_limit(call.request, limit),
        target=target,
        api_key=permit.api_key,
        streams=streams,
        self_hosted=provider.self_hosted,
        native=call.native,
        extra=extra,
        left_out=tuple(name for name in call.extra if name not in extra),
        manners=manners,
        tenant=call.caller.team.id,
        weight=call.caller.team.weight,
        tier=call.routing.tier.value,
        fails_over=len(provider.endpoints) > 1,
        seed=int(call.request_id[-8:], 16),
        resume=trip.resume,
    )
    usual = provider.timeouts.first_token if streams else provider.timeouts.total
    patience = trip.deadline.within(usual, services.clock.monotonic())
    ends = asyncio.get_running_loop().time() + patience
    built, response = await off_loop(call.size, lambda: wire.build_request(asking)), None
    try:
        response = await services.client.send(built, provider.timeouts.connect, patience)
        services.breakers.heard(permit, response.headers)
        answering = await _read_answer(call, target, provider, wire, response, streams=streams, ends=ends)
        answering.dropped = built.dropped
        return answering
    except UpstreamTimeout as exc:
        if patience < 0.9 * usual:  # earlier attempts took its time
            exc.outcome = "deadline"
        raise
    except asyncio.CancelledError:
        log.was_left_waiting = built.delivery.is_whole and (response is None or _is_success(response))
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
        if not _is_success(response):
            raise wire.read_error(response.status, response.headers, await read_error_body(response))
        response.due = ends
        begun = await response.next_piece() if streams else b""
        if streams and (begun is None or not begun[:64].lstrip().startswith(b"{")):
            events = wire.open_events(call.request)
            first = await _read_first(response, events, begun)
            response.due = math.inf
            return Answering(target, provider, first, events, response)
        body = (begun or b"") + await response.read()
        whole, usage = await off_loop(len(body), lambda: wire.read_reply(call.request, body))
        response.close()
        if streams:  # it does not know how to, and answered in JSON
            return Answering(target, provider, events_of(whole, usage))
        return Answering(target, provider, [], whole=whole, usage=usage)
    except BaseException:
        response.close()
        raise


def _is_success(response: UpstreamResponse) -> bool:
    return 200 <= response.status < 300


def _allowed_extra(call: Call, provider: ProviderSettings) -> dict[str, Any]:
    """Return those of the fields unknown to us that this provider may be sent."""
    if not call.extra:
        return {}
    allowed = provider.allow_fields | ENGINE_FIELDS if provider.self_hosted else provider.allow_fields
    return {name: value for name, value in call.extra.items() if name in allowed}


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
