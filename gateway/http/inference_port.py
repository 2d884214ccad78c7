# What the inference routes ask of the pipeline behind them: an app's state has an object of this form. The routes need
# no module of the pipeline.

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from litestar import Request
from litestar.types import ASGIApp
from msgspec import Struct
from prometheus_client import Gauge

from billing.core.holds import Hold
from billing.core.records import UsageRecord
from gateway.calls.call import Call
from gateway.calls.hooks import Ending, KeepEnding
from gateway.dialects.endpoint import ReplyFacts, ReplyWriter
from gateway.idempotency.stored_answers import StoredAnswer
from protocol.errors import ServiceError
from protocol.events import Event
from protocol.inference import WholeReply
from protocol.serving.leaving import Client
from protocol.usage import Usage
from router.catalog.targets import Route

Keep = Callable[[StoredAnswer, UsageRecord | None], Awaitable[None]]  # stores an answer before its account closes
BeforeEnd = Callable[[ReplyFacts, Ending], Awaitable[None]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
RunCall = Callable[[Call, Send, Keep], Awaitable[None]]


class Admitted(Protocol):
    """The accounting of a call that may run."""

    hold: Hold


class Waits(Protocol):
    """How long a call has waited."""

    waited: float  # seconds, for upstreams
    queued: float  # seconds, for a slot of a target


class OpenReply(ReplyFacts, Protocol):
    """A reply whose first token is there. Its reader closes it."""

    route: Route
    first_token_seconds: float  # since the request came
    cache: str  # "hit", "miss" or "off"

    @property
    def account(self) -> Admitted:
        """Its accounting."""

    @property
    def log(self) -> Waits:
        """Where its time went."""

    def pieces(self) -> AsyncIterator[list[Event]]:
        """Yield the events as they arrive."""

    async def collect(self) -> tuple[WholeReply, Usage]:
        """Return the whole reply."""

    def abandon(self) -> None:
        """Note that its client has left."""

    def close(self) -> None:
        """End it, however far it is."""


AnswerCall = Callable[[Call, Client, KeepEnding[OpenReply] | None], Awaitable[OpenReply]]
AnswerOnce = Callable[[Call, RunCall, Callable[[ServiceError], bytes], Any, Send], Awaitable[None]]

AnswerBehind = Callable[["InferencePort", Call, ReplyWriter], ASGIApp]


class InferencePort(Struct, frozen=True, eq=False):
    """The pipeline as its routes see it, for calls that begin under one edition of the configuration."""

    keep_alive: float  # seconds of silence until a stream says a comment; 0: never
    answer: AnswerCall  # keeps the end of the reply, if told how, before its account closes
    answer_once: AnswerOnce  # calls that have an Idempotency-Key: runs them, or replays what was stored
    answer_behind: AnswerBehind  # calls that run in the background
    warm_up: Callable[[Call], Awaitable[Hold]]  # counts and routes a call that is not made
    in_flight: Gauge
    note_refusal: Callable[[dict[str, Any], ServiceError], None]


def inference_of(request: Request[Any, Any, Any]) -> InferencePort:
    """Return the pipeline of the app that serves ``request``, for a call that begins now."""
    return request.app.state["inference"]
