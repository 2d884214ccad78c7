# What a wire format must know: how to ask, and how to read what comes back.
# Values in, values out; client.py does the I/O.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import Struct, field

from gateway.core.settings import DIRECT, Egress, HostedTools
from gateway.upstreams.wire.errors import UpstreamFailure
from gateway.upstreams.wire.quirks import Quirks
from protocol.errors import Unshown
from protocol.events import Event
from protocol.inference import Request, WholeReply
from protocol.messages import MessagesRequest
from protocol.responses import ResponsesRequest
from protocol.usage import Usage
from router.catalog.targets import Target


class Resume(Struct, frozen=True):
    """Where a replica of our own engine goes on with a reply: the tokens that another made, and how many characters of
    their text need not be sent again.
    """

    token_ids: tuple[int, ...]
    text_chars: int


class Asking(Unshown, Struct, frozen=True, kw_only=True):
    """One attempt: a request for one target. ``extra`` holds fields unknown to us that this provider may be sent."""

    request: Request
    target: Target
    api_key: str | None
    token: str | None = None  # a bearer token in place of a key
    streams: bool
    self_hosted: bool = False
    native: MessagesRequest | None = None  # the same request in Anthropic's form, where it came so
    response: ResponsesRequest | None = None  # or as a response, where the target is asked for one
    extra: Mapping[str, Any] = {}
    left_out: tuple[str, ...] = ()  # names of such fields that this provider may not be sent
    quirks: Quirks = Quirks()  # which names of fields the target takes
    api_version: str | None = None  # of Azure OpenAI, whose URLs then name deployments
    hosted: HostedTools = HostedTools()  # tools that the provider may run itself
    tenant: str = ""  # told to our own engine only, as are those below
    weight: float = 1.0
    tier: str = "interactive"
    priority: str = "normal"  # of a call among its team's
    time_left: float | None = None  # seconds that the call may still take
    fails_over: bool = False  # there are other replicas to go on with a reply that breaks
    seed: int = 0  # for a request without one, so that another replica can continue the reply
    resume: Resume | None = None
    uploads: tuple[memoryview, ...] = ()  # the recording or the pictures that the request speaks of
    session: str = ""  # a name of the conversation that tells nothing of it
    starts_within: float = math.inf  # seconds in which the first token should come
    marks: str = ""  # of the prompt's beginnings, for a replica that tells which of them it has cached


@dataclass(slots=True)
class Delivery:
    """How far a request has come."""

    is_whole: bool = False  # its last byte was handed to the network


class UpstreamRequest(Unshown, Struct, frozen=True):
    """What goes over the wire. Nothing in it comes from the client's headers.

    ``dropped`` names the fields of the request, in its own dialect, that the upstream lacks and that change no meaning.
    """

    method: str
    url: str
    headers: dict[str, str]
    body: bytes
    delivery: Delivery = field(default_factory=Delivery)
    dropped: tuple[str, ...] = ()
    egress: Egress = DIRECT
    party: str = ""  # a team whose own key goes along: its connections carry no other's calls
    rest: tuple[bytes | memoryview, ...] = ()  # of a long body, behind ``body``: what is not to be copied


class EventStream(Protocol):
    """Reads one streamed reply. It holds the state of that reply and nothing else.

    However the bytes are cut, the events are the same: what came before a fault is returned, and the fault waits in
    ``failure`` for the caller, once it has passed those events on.
    """

    failure: UpstreamFailure | None

    def feed(self, piece: bytes) -> list[Event]:
        """Take in bytes and return what they complete. Raises ``failure`` when nothing came before it."""

    def finish(self) -> list[Event]:
        """The bytes have ended. Return what that completes; raise UpstreamError when the reply is not whole."""


class Provider(Protocol):
    """One wire format."""

    def build_request(self, asking: Asking) -> UpstreamRequest:
        """Return the request as this format has it, and what it left out. Raises UpstreamUnable for what changes the
        meaning of the request and cannot be said."""

    def read_reply(self, request: Request, body: bytes) -> tuple[WholeReply, Usage | None]:
        """Return a whole reply and the upstream's own count. Raises UpstreamError when the body makes no sense."""

    def open_events(self, request: Request) -> EventStream:
        """Return a reader for one streamed reply to ``request``."""

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> UpstreamFailure:
        """Return what an answer with a failing status means to us."""
