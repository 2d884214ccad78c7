# Walks a route until a target gives a first token, or a whole reply. Until then a failure moves on to the next target;
# from then on the answer is committed.

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from billing.records import Attempt
from gateway.answering.call import Call
from gateway.errors import UpstreamError, UpstreamFailure, UpstreamTimeout
from gateway.providers.base import Asking, EventStream, Request, WholeReply
from gateway.providers.client import UpstreamResponse, read_error_body
from gateway.providers.openai import ENGINE_FIELDS
from gateway.services import Services
from gateway.settings import ProviderSettings
from protocol.chat import ChatRequest
from protocol.embeddings import EmbeddingRequest
from protocol.events import Delta, Event, ReplyEnd
from protocol.usage import Usage
from router.bounds import output_limit
from router.targets import ModelSpec, Route, Target


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

    async def close(self) -> None:
        """Close the upstream; at once if it is still speaking."""
        if self.response is not None:
            await self.response.close()


class AttemptLog:
    """What was tried for one call, and how long was spent waiting for upstreams."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.waited = 0.0  # seconds

    def add(self, target: Target, outcome: str, seconds: float) -> None:
        """Note one attempt."""
        self.attempts.append(Attempt(target.key, outcome, round(seconds * 1000, 3)))
        self.waited += seconds


async def send_along_route(services: Services, call: Call, route: Route, log: AttemptLog) -> Answering:
    """Try the targets in order and return the first that answers. Raises the last UpstreamFailure when none does."""
    failure: UpstreamFailure | None = None
    for target in route.targets:
        started = services.clock.monotonic()
        try:
            answering = await send_once(services, call, target)
        except UpstreamFailure as exc:
            log.add(target, exc.outcome, services.clock.monotonic() - started)
            if not exc.moves_on:
                raise
            failure = exc
        else:
            log.add(target, "ok", services.clock.monotonic() - started)
            return answering
    assert failure is not None, "a route has at least one target"
    raise failure


async def send_once(services: Services, call: Call, target: Target) -> Answering:
    """Ask one target and wait for its first token, or for its whole reply. Raises UpstreamFailure."""
    registry = services.providers
    provider = registry.settings(target.model.provider)
    wire = registry.format(target.model.provider)
    # Our own engine always streams to us: a reply that breaks can then be continued, and is charged by its tokens.
    streams = call.streams or (provider.self_hosted and not isinstance(call.request, EmbeddingRequest))
    asking = Asking(
        request=_within_output(call.request, target.model),
        target=target,
        api_key=registry.next_key(target.model.provider),
        streams=streams,
        self_hosted=provider.self_hosted,
        native=call.native,
        extra=_allowed_extra(call, provider),
        tenant=call.caller.team.id,
        weight=call.caller.team.weight,
        tier=call.wish.tier.value,
        seed=int(call.request_id[-8:], 16),
    )
    patience = provider.timeouts.first_token if streams else provider.timeouts.total
    response = await services.client.send(wire.build_request(asking), provider.timeouts.connect, patience)
    try:
        if response.status >= 400:
            raise wire.read_error(response.status, response.headers, await read_error_body(response))
        async with asyncio.timeout(patience):
            if streams:
                events = wire.open_events(call.request)
                return Answering(target, provider, await _read_first(response, events), events, response)
            whole, usage = wire.read_reply(call.request, await response.read())
        await response.close()
        return Answering(target, provider, [], whole=whole, usage=usage)
    except TimeoutError as exc:
        await response.close()
        raise UpstreamTimeout(f"The upstream did not answer within {patience:g} seconds.") from exc
    except BaseException:
        await response.close()
        raise


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


async def _read_first(response: UpstreamResponse, events: EventStream) -> list[Event]:
    """Return the events up to the first token. A role alone, a ping or a comment is none; an empty reply is whole."""
    seen: list[Event] = []
    while (piece := await response.next_piece()) is not None:
        fresh = events.feed(piece)
        seen += fresh
        if any(isinstance(event, ReplyEnd) or (isinstance(event, Delta) and event.has_content) for event in fresh):
            return seen
        if events.failure is not None:
            raise events.failure
    seen += events.finish()
    if not any(isinstance(event, ReplyEnd) for event in seen):
        raise UpstreamError("The upstream sent nothing.", outcome="empty")
    return seen
