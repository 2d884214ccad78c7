# Upstream traffic as values: what came over the wire, and what it means. One WireFormat per format; the conformance
# suite runs over all of them.

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from billing.core.prices import Price
from gateway.upstreams.wire.base import Asking, EventStream, Provider
from gateway.upstreams.wire.errors import UpstreamFailure
from protocol.chat import ChatRequest, FinishReason, Message
from protocol.events import Delta, Event, ReplyEnd, UsageReport
from protocol.inference import Request
from protocol.responses import ResponsesRequest
from protocol.usage import Usage
from router.catalog.targets import Capability, Endpoint, ModelSpec, Target

TARGET = Target(
    ModelSpec(
        name="house-model",
        provider="upstream",
        upstream_model="upstream-model",
        price=Price(input=1_000_000_000, output=2_000_000_000),
        context=128_000,
        max_output=4_096,
        capabilities=frozenset(Capability),
    ),
    Endpoint("us", "https://upstream.example/v1"),
)
CHAT = ChatRequest(model="asked-model", messages=(Message("user", "Hello"),))


class Said(Struct, frozen=True):
    """What a reply amounts to, one entry for each choice; calls are (id, name, arguments)."""

    text: tuple[str, ...] = ("",)
    finish: tuple[FinishReason | None, ...] = (FinishReason.STOP,)
    refusal: str = ""
    calls: tuple[tuple[str, str, str], ...] = ()
    usage: Usage | None = None


class Streamed(Struct, frozen=True):
    """A streamed reply. ``outcome`` is the word of the failure in which it ends, if it does."""

    name: str
    request: Request
    stream: bytes
    said: Said
    outcome: str | None = None


class Whole(Struct, frozen=True):
    """A reply in one body."""

    name: str
    request: Request
    body: bytes
    said: Said


class Failing(Struct, frozen=True):
    """An answer with a failing status, and what the client gets when no other target is left."""

    name: str
    status: int
    headers: Mapping[str, str]
    body: bytes
    client_status: int
    code: str | None
    moves_on: bool
    outcome: str


class WireFormat(Struct, frozen=True):
    """One format, and traffic that any implementation of it must read alike."""

    name: str
    make: Callable[[], Provider]
    streamed: tuple[Streamed, ...]
    whole: tuple[Whole, ...]
    nonsense: tuple[bytes, ...]  # bodies under a 200 that are no reply
    failing: tuple[Failing, ...]


def asking(request: Request = CHAT, **more: object) -> Asking:
    """Return an attempt at TARGET."""
    plain: dict[str, object] = {"target": TARGET, "api_key": "sk-house", "streams": False, **more}
    plain.setdefault("response", ResponsesRequest(model="asked-model", input="Hello"))
    return Asking(request=request, **plain)  # type: ignore[arg-type]


def read_stream(events: EventStream, pieces: list[bytes]) -> tuple[list[Event], str | None]:
    """Feed the pieces as a reply's reader does; return the events and the outcome of the failure that ended them."""
    seen: list[Event] = []
    try:
        for piece in pieces:
            seen += events.feed(piece)
            if events.failure is not None:
                raise events.failure
        seen += events.finish()
    except UpstreamFailure as exc:
        return seen, exc.outcome
    return seen, None


def sum_up(events: list[Event], choices: int) -> Said:
    """Return what the events amount to."""
    text, refusal = [""] * choices, ""
    finish: list[FinishReason | None] = [None] * choices
    calls: dict[int, list[str]] = {}
    usage = None
    for event in events:
        match event:
            case Delta():
                text[event.index] += event.text
                refusal += event.refusal
                finish[event.index] = event.finish_reason or finish[event.index]
                for piece in event.tool_calls:
                    call = calls.setdefault(piece.index, ["", "", ""])
                    call[0] += piece.id or ""
                    call[1] += piece.name or ""
                    call[2] += piece.arguments
            case UsageReport():
                usage = event.usage
            case ReplyEnd():
                pass
    made = tuple((call[0], call[1], call[2]) for _, call in sorted(calls.items()))
    return Said(tuple(text), tuple(finish), refusal, made, usage)
