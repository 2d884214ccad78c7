# One attempt's values: what all attempts of a call share and what was tried; and how an answer is read up to its first
# token. Which target is asked, and what follows a failure, dispatcher.py decides.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from billing.core.records import OWN_KEY, Attempt, Prefill
from gateway.calls.answering import Answering
from gateway.calls.as_events import events_of
from gateway.calls.call import Call
from gateway.core.settings import ProviderSettings
from gateway.upstreams.anthropic.request import CLAUDES_FIELDS, is_wish
from gateway.upstreams.client import UpstreamResponse, read_error_body
from gateway.upstreams.openai.request import ENGINE_FIELDS
from gateway.upstreams.resilience.retry import Deadline
from gateway.upstreams.resilience.retry_budget import RetryBudget
from gateway.upstreams.wire.base import Asking, EventStream, Provider, Resume
from gateway.upstreams.wire.errors import UpstreamError
from gateway.upstreams.wire.quirks import Quirks, stores_chats
from gateway.upstreams.wire.reading import count_of
from gateway.upstreams.wire.unsayable import without_fields, without_items
from protocol.chat import ChatRequest
from protocol.events import Delta, Event, ReplyEnd
from protocol.inference import Generation, Request
from protocol.media.audio import SpeechRequest
from protocol.serving.off_loop import off_loop
from protocol.usage import CACHED_TOKENS, PROMPT_TOKENS, Usage
from router.catalog.targets import Route, Target
from router.prompt_size.bounds import with_output_limit
from router.prompt_size.prompt_bounds import PromptBound

# What a response asks for, and a chat cannot.
SAID_IN_RESPONSES = (
    *("truncation", "context_management", "reasoning.summary", "reasoning.context"),
    *("input.prompt_cache_breakpoint", "input.input_file.detail"),
)
TEAM_LIMIT = "team_limit"  # the outcome of a target that was not asked: its model's own limit has no room for the call


class AttemptLog:
    """What was tried for one call, and how long was spent waiting: for a turn, and for upstreams."""

    is_hedged = False  # whether a second attempt is under way beside the first, which moves on to no other target then

    def __init__(self, queued: float = 0.0, without_room: Iterable[str] = ()) -> None:
        self.attempts: list[Attempt] = []
        self._left_out = [Attempt(target, TEAM_LIMIT, 0.0) for target in without_room]
        self.queued = queued  # seconds
        self.waited = 0.0  # seconds
        self.prefill: Prefill | None = None  # for the attempt under way
        self.was_left_waiting = False  # the call was cancelled while an upstream had all of it, and had refused nothing

    @property
    def told(self) -> tuple[Attempt, ...]:
        """What a record tells: the targets that limits of the team left out, and the attempts."""
        return (*self._left_out, *self.attempts)

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
        key = None if target.own is None else OWN_KEY
        self.attempts.append(Attempt(target.key, outcome, round(seconds * 1000, 3), key, self.prefill))
        self.prefill = None
        self.waited += seconds

    @staticmethod
    def is_at(target: Target, attempt: Attempt) -> bool:
        """Whether an attempt was made at a target, with its keys."""
        return attempt.target == target.key and (attempt.key == OWN_KEY) == (target.own is not None)

    def broke(self, outcome: str) -> None:
        """Note that the answer of the latest attempt broke in mid-stream."""
        if self.attempts:
            self.attempts[-1] = replace(self.attempts[-1], outcome=outcome)

    def left(self, *, is_received: bool) -> None:
        """Note that the call was cancelled during an attempt, and whether its upstream had all of it by then."""
        self.was_left_waiting = is_received


class AttemptContext(Struct, frozen=True, eq=False):
    """What all attempts of one call share: what is asked along which route, until when, on which budget its extra
    attempts are, what was tried so far, and what of the reply is there already. ``enter`` writes the call down before
    an upstream hears of it, once."""

    call: Call
    route: Route
    log: AttemptLog
    deadline: Deadline
    budget: RetryBudget
    resume: Resume | None = None
    prompt: PromptBound | None = None
    enter: Callable[[], None] = lambda: None


def asking_of(
    context: AttemptContext,
    target: Target,
    provider: ProviderSettings,
    api_key: str | None,
    quirks: Quirks,
    limit: int | None,
    now: float,
    token: str | None = None,
) -> Asking:
    """Return what one target is asked. ``limit``: the output tokens that the call's hold covers there; ``token``: what
    it is asked with in place of a key."""
    call, extra = context.call, _allowed_extra(context.call, provider)
    asked = with_output_limit(call.request, limit)
    if isinstance(asked, ChatRequest) and asked.store is not None:
        may_not = not asked.store and stores_chats(target.endpoint.base_url)  # it is stored here alone
        asked = replace(asked, store=False if may_not else None)
    request, refused = without_fields(asked, provider.drop_fields)
    left_out = (*refused, *call.unread)
    if call.extra:  # and what of it is not honoured
        left_out = (*[name for name in call.extra if name not in extra and name not in call.understood], *left_out)
    response = call.shown if provider.responses and quirks.responses else None
    if response is not None and context.prompt is not None and context.prompt.recordings:
        response = None  # OpenAI's Responses API has no part for them, its chats have
    if response is not None:
        left_out = tuple(name for name in left_out if name not in SAID_IN_RESPONSES)
    elif call.shown is not None and isinstance(request, ChatRequest):
        request, gone = without_items(request, call.shown)
        left_out += gone
    return Asking(
        request=request,
        target=target,
        api_key=api_key,
        token=token,
        streams=streams_from(call, provider),
        self_hosted=provider.self_hosted,
        native=call.as_message,
        response=response,
        uploads=call.uploads,
        extra=extra,
        left_out=left_out,
        quirks=quirks,
        api_version=provider.api_version,
        hosted=provider.hosted_tools,
        tenant=call.caller.team.id,
        weight=call.caller.team.weight,
        tier=str(call.routing.tier),
        priority=call.priority,
        session=_session_of(call) if provider.self_hosted else "",
        starts_within=call.started + call.placing.starts_within - now,
        time_left=context.deadline.left(now),
        fails_over=len(provider.endpoints) > 1,
        seed=int(call.request_id[-8:], 16),
        resume=context.resume,
    )


def _session_of(call: Call) -> str:
    """Return a name for what the turns of a conversation have in common: a hash, which tells nothing of it."""
    return blake2b(call.beginning.encode("utf-8", "replace"), digest_size=16).hexdigest()


def streams_from(call: Call, provider: ProviderSettings) -> bool:
    """Whether the upstream is asked for a stream. Our own engine always is: a reply that breaks can then be continued,
    and is charged by its tokens."""
    return call.streams or (provider.self_hosted and isinstance(call.request, Generation))


async def read_answer(
    request: Request,
    response: UpstreamResponse,
    *,
    target: Target,
    provider: ProviderSettings,
    wire: Provider,
    streams: bool,
    ends: float,
) -> Answering:
    """Read up to the first token, or to the end of a plain reply. Raises UpstreamFailure, the response closed."""
    try:
        if not is_success(response):
            raise wire.read_error(response.status, response.headers, await read_error_body(response))
        response.due = ends
        begun = await response.next_piece() if streams else b""
        is_json = begun is not None and begun[:64].lstrip().startswith(b"{") and not isinstance(request, SpeechRequest)
        if streams and not is_json:
            events = wire.open_events(request)
            first = await _read_first(response, events, begun)
            response.due = math.inf
            prompt = _told_of_prompt(response.headers) if provider.self_hosted else None
            return Answering(target, provider, first, events, response, prompt=prompt)
        body = (begun or b"") + await response.read()
        whole, usage = await off_loop(len(body), lambda: wire.read_reply(request, body))
        response.close()
        if streams:  # it does not know how to, and answered in JSON
            return Answering(target, provider, events_of(whole, usage))
        return Answering(target, provider, [], whole=whole, usage=usage)
    except BaseException:
        response.close()
        raise


def _told_of_prompt(headers: Mapping[str, str]) -> Usage | None:
    """Return what an engine says of the prompt in the headers of a stream; others than ours say nothing."""
    counts = [headers.get(name, "") for name in (PROMPT_TOKENS, CACHED_TOKENS)]
    if not all(count.isdecimal() and len(count) < 16 for count in counts):
        return None
    tokens, cached = (count_of(int(count)) for count in counts)
    return Usage(tokens, cached_input_tokens=min(cached or 0, tokens)) if tokens else None


def is_success(response: UpstreamResponse) -> bool:
    """Whether an upstream has taken the request."""
    return 200 <= response.status < 300


def _allowed_extra(call: Call, provider: ProviderSettings) -> dict[str, Any]:
    """Return those of the fields unknown to us that this provider may be sent."""
    if not call.extra:
        return {}
    allowed = provider.allow_fields
    if provider.self_hosted:
        allowed |= ENGINE_FIELDS
    found = {name: value for name, value in call.extra.items() if name in allowed}
    if call.service_tier is not None:  # then its targets have a price for it
        found["service_tier"] = call.service_tier
    if provider.format in ("anthropic", "bedrock"):
        found |= {name: value for name, value in call.extra.items() if name in CLAUDES_FIELDS and is_wish(value)}
    return found


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
