# What the inference routes ask of the pipeline behind them: an app's state has an object of this form. The routes need
# no module of the pipeline.

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

from litestar import Request
from msgspec import Struct

from billing.core.holds import Hold
from billing.core.records import UsageRecord
from gateway.calls.call import Call
from gateway.calls.hooks import KeepEnding
from gateway.core.settings import Settings
from gateway.dialects.endpoint import ReplyFacts
from gateway.idempotency.stored_answers import StoredAnswer
from protocol.errors import ServiceError
from protocol.events import Event
from protocol.inference import WholeReply
from protocol.serving.leaving import Client
from protocol.usage import Usage
from router.catalog.targets import Route

Keep = Callable[[StoredAnswer, UsageRecord], Awaitable[None]]  # stores an answer before its account closes
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

    @property
    def dropped(self) -> Sequence[str]:
        """Fields that its upstream was not sent."""

    def pieces(self) -> AsyncIterator[list[Event]]:
        """Yield the events as they arrive."""

    async def collect(self) -> tuple[WholeReply, Usage]:
        """Return the whole reply."""

    def abandon(self) -> None:
        """Note that its client has left."""

    def close(self) -> None:
        """End it, however far it is."""


class Gauge(Protocol):
    """Calls being answered, as metrics show them."""

    def inc(self) -> None:
        """One more."""

    def dec(self) -> None:
        """One less."""


class AnswersCalls(Protocol):
    """Answers calls."""

    async def answer(self, call: Call, client: Client, keep_ending: KeepEnding[OpenReply] | None) -> OpenReply:
        """Return the open reply to ``call``. ``keep_ending`` is called with its end before its account closes."""


class AnswersOnce(Protocol):
    """Answers calls that have an Idempotency-Key."""

    async def answer(
        self, call: Call, run: RunCall, write_error: Callable[[ServiceError], bytes], scope: Any, send: Send
    ) -> None:
        """Run ``call``, or replay what was stored."""


class EditionPort(Protocol):
    """What a call goes by that begins now."""

    @property
    def settings(self) -> Settings:
        """The configuration."""

    @property
    def inference(self) -> AnswersCalls:
        """The pipeline."""

    @property
    def answered_once(self) -> AnswersOnce:
        """The same, for calls that have an Idempotency-Key."""


class EditionsPort(Protocol):
    """The editions of the configuration."""

    @property
    def current(self) -> EditionPort:
        """That of calls that begin now."""


class InferencePort(Struct, frozen=True, eq=False):
    """The pipeline as its routes see it."""

    editions: EditionsPort
    in_flight: Gauge
    note_refusal: Callable[[dict[str, Any], ServiceError], None]


def inference_of(request: Request[Any, Any, Any]) -> InferencePort:
    """Return the pipeline of the app that serves ``request``."""
    return request.app.state.inference
