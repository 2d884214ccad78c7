# What the inference routes ask of the pipeline behind them: an app's state has an object of this form. The routes need
# no module of the pipeline.

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from litestar import Request

from billing.core.holds import Hold
from billing.core.records import UsageRecord
from gateway.calls.call import Call
from gateway.core.clock import Clock
from gateway.core.errors import ContentPolicyViolation
from gateway.dialects.endpoint import ReplyFacts
from gateway.idempotency.stored_answers import StoredAnswer
from protocol.errors import ServiceError
from protocol.events import Event
from protocol.inference import WholeReply
from protocol.serving.leaving import Client
from protocol.usage import Usage
from router.catalog.targets import Route

Ending = list[Event] | tuple[WholeReply, Usage] | ContentPolicyViolation
KeepEnding = Callable[["OpenReply", Ending], Awaitable[None]]
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

    @property
    def account(self) -> Admitted:
        """Its accounting."""

    @property
    def log(self) -> Waits:
        """Where its time went."""

    @property
    def dropped(self) -> Sequence[str]:
        """Fields that its upstream was not sent."""

    def relay(self, write: Callable[[list[Event]], bool]) -> None:
        """Have ``write`` pass words on as they arrive."""

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


class Recalibrated(Protocol):
    """The thresholds that teams' own shadow calls have moved."""

    def of(self, team_id: str) -> Mapping[str, float]:
        """Return a team's, by automatic route."""


class InferencePort(Protocol):
    """The pipeline as its routes see it, in one edition of the configuration."""

    clock: Clock
    keep_alive: float  # seconds of silence on a stream until a comment is sent; 0 for none
    is_traced: bool

    @property
    def in_flight(self) -> Gauge:
        """Counts the calls that are being answered."""

    @property
    def recalibrations(self) -> Recalibrated:
        """Thresholds of automatic routes."""

    @property
    def note_refusal(self) -> Callable[[dict[str, Any], ServiceError], None]:
        """Counts and logs an error that a request was answered with."""

    async def answer(self, call: Call, client: Client, keep_ending: KeepEnding | None) -> OpenReply:
        """Return the open reply to ``call``. ``keep_ending`` is called with its end before its account closes."""

    async def answer_once(
        self, call: Call, run: RunCall, write_error: Callable[[ServiceError], bytes], scope: Any, send: Send
    ) -> None:
        """Answer a call that has an Idempotency-Key: run it, or replay what was stored."""


def inference_of(request: Request[Any, Any, Any]) -> InferencePort:
    """Return the pipeline of the app that serves ``request``."""
    return request.app.state.inference
