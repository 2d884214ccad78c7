# One call as the answering path sees it: its caller, its request, its options.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal
from zlib import crc32

from msgspec import Struct

from billing.core.holds import Hold, Leg, Limits, NamedLimits, Scope
from billing.core.prices import Price
from billing.core.records import Served, Status, UsageRecord
from billing.ledger.price_editions import edition_of
from gateway.calls.rate_limits import LimitHeaders, rate_limit_headers
from gateway.core.principals import Caller, Team
from gateway.core.settings import PRICED_TIERS, CacheUse
from protocol.chat import ChatRequest
from protocol.completions import CompletionRequest
from protocol.errors import missing_param
from protocol.inference import NativeRequest, Request
from protocol.messages import MessagesRequest
from protocol.responses import ResponsesRequest
from router.catalog.routing_options import RoutingOptions
from router.catalog.targets import Route, Target

OPENING = 2000  # characters of what a user said first that tell conversations apart, or at either end of a prompt

NO_USER = "This team has limits for each of its end users: say in 'user' for whom the call is, by a name of your own."

TURN = 65_521  # makes a second hash of one: whatever model a conversation has, its replicas are shared

Priority = Literal["low", "normal", "high"]


class Placing(Struct, frozen=True):
    """What a caller says of where its call should go, in the words of gateways of inference fleets."""

    session: str | None = None  # which conversation it belongs to
    addresses: tuple[str, ...] = ()  # host:port of replicas, the one that is wanted most first
    starts_within: float = math.inf  # seconds in which the first token should come


NO_PLACING = Placing()


class Call(Struct, frozen=True, kw_only=True):
    """A request by a known caller. Everything later in the path is a function of this and of the gateway's state."""

    request_id: str  # UUIDv7; the ledger's, to the letter
    caller: Caller
    endpoint: str  # "chat.completions", as gateway.dialects.table names them
    limit_headers: LimitHeaders = rate_limit_headers  # as its endpoint's clients read them
    request: Request
    native: NativeRequest | None = None  # the same request in its dialect's own form, where it has one
    shown: ResponsesRequest | None = None  # a response with all that a model is shown, turns before included
    routing: RoutingOptions
    priority: Priority = "normal"
    placing: Placing = NO_PLACING
    extra: Mapping[str, Any] = {}  # top-level fields that we do not know,
    understood: frozenset[str] = frozenset()  # and those of them that were honoured all the same
    unread: tuple[str, ...] = ()  # names of such fields further inside
    size: int = 0  # bytes of the request as it came
    uploads: tuple[memoryview, ...] = ()  # the recording or the pictures that it speaks of
    client_request_id: str | None = None
    traceparent: str | None = None  # the caller's trace
    fitted_output: int | None = None  # tokens: the output limit that a budget set, where the caller named none
    cache: CacheUse | None = None  # whether it goes by the cache, where the caller or its key says so
    idempotency_key: str | None = None  # the same key and request get the same answer, and pay once
    may_be_lost: Callable[[], bool] | None = None  # with a lease: whether its gateway may be taken for dead
    redacted: Mapping[tuple[str, str], str] | None = None  # what stands for a rule's name and its find, once redacted
    without_room: Mapping[str, str] = {}  # models that limits of its team leave no room at, and a Target.key of each
    is_batch_item: bool = False
    is_background: bool = False  # runs to its end without a client, unless its caller cancels it
    is_internal: bool = False  # made by the gateway, for a team that pays: not an act of its key
    created_at: float  # unix seconds
    started: float  # monotonic seconds

    @property
    def end_user(self) -> str | None:
        """Who asks, as its caller says: ``user``, ``safety_identifier``, or ``metadata.user_id`` of Anthropic's API."""
        return self.request.user or getattr(self.request, "safety_identifier", None)

    @property
    def streams(self) -> bool:
        """Whether the client wants the reply in pieces."""
        return bool(getattr(self.request, "stream", None))

    @property
    def as_message(self) -> MessagesRequest | None:
        """The same request in Anthropic's form, where it came so."""
        return self.native if isinstance(self.native, MessagesRequest) else None

    @property
    def service_tier(self) -> str | None:
        """The tier of its upstream that it asks for, and that has a price of its own."""
        asked = self.extra.get("service_tier")
        return asked if asked in PRICED_TIERS else None

    @property
    def cached_as(self) -> str:
        """Whose prompts this one may find cached at an engine: its team's, or those of them that say the same salt."""
        salt = self.extra.get("cache_salt")
        return f"{self.caller.team.id}\0{salt}" if isinstance(salt, str) else self.caller.team.id

    @property
    def share(self) -> float:
        """A hash in [0, 1) by which equal models share the load: one for all turns of a conversation, at any gateway.

        It is a hash of the caller and the conversation's opening, or the session that it names; or of the prompt of a
        completion.
        """
        match self.request:
            case _ if self.placing.session:
                said = self.placing.session
            case ChatRequest(messages=messages):
                said = next((message.text() for message in messages if message.role == "user"), "")[:OPENING]
            case CompletionRequest(prompt=str(prompt)):  # many begin alike, so the end counts too
                said = prompt[:OPENING] + prompt[-OPENING:]
            case _:
                return int(self.request_id[-8:], 16) / 2**32
        asked = f"{self.caller.team.id}\n{self.request.user or ''}\n{said}"
        return crc32(asked.encode("utf-8", "replace")) / 2**32

    @property
    def draw(self) -> float:
        """Another such hash, by which a pool's versions share conversations: models may share by the first."""
        return self.share * TURN % 1.0

    @property
    def spread(self) -> float:
        """A hash in [0, 1) by which replicas of a model share the load: another for each first turn, whatever it says;
        from then on one for all turns of a conversation, so that its provider finds the prompt cached."""
        if self.placing.session:
            return self.draw
        if isinstance(self.request, ChatRequest) and any(turn.role == "assistant" for turn in self.request.messages):
            return self.draw
        return int(self.request_id[-8:], 16) / 2**32

    @property
    def beginning(self) -> str:
        """What the turns of a conversation have in common: where one was answered, the next one's prompt is cached."""
        match self.request:
            case _ if self.placing.session:
                said = self.placing.session
            case ChatRequest(messages=messages):
                said = next((message.text() for message in messages if message.role == "user"), "")
            case CompletionRequest(prompt=str(prompt)):
                said = prompt
            case _:
                return self.request_id
        return f"{self.caller.team.id}\n{self.request.user or ''}\n{said[:OPENING]}"

    @property
    def owes_parts(self) -> bool:
        """Whether a part of the answer is owed, however the rest fails to come.

        Else what was stored whole is owed, or a part whose end the call itself or its caller brought about.
        """
        return self.can_be_left and not self.is_background

    @property
    def can_be_left(self) -> bool:
        """Whether its caller can end it, and then owes what was used by then."""
        return self.idempotency_key is None and not self.is_batch_item


def scopes_of(caller: Caller, legs: Iterable[Leg] = ()) -> tuple[Scope, ...]:
    """Return the scopes whose limits a request of ``caller`` counts against that may go along these legs."""
    team = caller.team
    scopes = (Scope("team", team.id, team.limits), Scope("key", caller.key_id, caller.key_limits))
    if not team.model_limits:
        return scopes
    models = dict.fromkeys(leg.model for leg in legs if leg.model in team.model_limits)
    return scopes + tuple([Scope("model", f"{team.id}/{name}", team.model_limits[name], name) for name in models])


def value_scopes_of(call: Call) -> tuple[Scope, ...]:
    """Return the scopes of the call's end user and of its tags, as far as its team limits them. What the gateway asks
    by itself has none. Raises BadRequest where its team counts by end users and it names none."""
    team = call.caller.team
    if call.is_internal or not (team.user_limits or team.tag_limits):
        return ()
    scopes = []
    user = call.end_user or ""  # the name of those without one
    if team.user_limits and (user or "*" in team.user_limits):
        if not user and team.calls_without_user == "refuse":
            raise missing_param("user", NO_USER)
        scopes.append(_value_scope("user", team, "", user, team.user_limits))
    metadata = getattr(call.request, "metadata", None) or {}
    for key, limits in team.tag_limits.items():
        if key in metadata:
            scopes.append(_value_scope("tag", team, f"{key}=", metadata[key], limits))
    return tuple([scope for scope in scopes if scope is not None])


def _value_scope(kind: str, team: Team, prefix: str, value: str, limits: Mapping[str, NamedLimits]) -> Scope | None:
    which = team.hash_of(value)
    found = limits.get(which) or limits.get("*")
    return (
        None if found is None or found.limits == Limits() else Scope(kind, f"{team.id}/{prefix}{which}", found.limits)
    )


def record_for(call: Call, hold: Hold, route: Route, target: Target, status: Status, **known: Any) -> UsageRecord:
    """Return the usage record of a call at one target of its route, with whatever else is known."""
    served = served_by(route, target, target.model.price)
    return UsageRecord(
        request_id=call.request_id,
        team_id=call.caller.team.id,
        key_id=call.caller.key_id,
        endpoint=call.endpoint,
        model_asked=call.request.model,
        model_used=served.model_used,
        provider=served.provider,
        provider_endpoint=served.provider_endpoint,
        status=status,
        tier=str(call.routing.tier),  # .value is a property of Python's, ten times as dear
        priority=call.priority,
        route_reason=served.route_reason,
        complexity=route.complexity,
        client_request_id=call.client_request_id,
        user_tag=call.end_user,
        metadata=getattr(call.request, "metadata", None),
        created_at=call.created_at,
        owner=hold.owner,
        held_tokens=hold.request.tokens,
        held_nanousd=hold.request.cost_nanousd,
        price=served.price,
        held_models=tuple([scope.model for scope in hold.request.scopes if scope.model]) or None,
        held_scopes=tuple([scope.name for scope in hold.request.scopes if scope.kind in ("user", "tag")]) or None,
        left_out=route.left_out,
        **known,
    )


def served_by(route: Route, target: Target, price: Price) -> Served:
    """Return a target of a route, and the price that it answers at, as records name them."""
    where = f"{target.endpoint.region} {target.endpoint.base_url}"
    return Served(target.model.name, target.model.provider, where, edition_of(price), route.reason_at(target))
