# Streamed replies of Bedrock's ConverseStream: its events become those of Anthropic's Messages API, which are read as
# any others. Text has no event of its own where it begins, and the count comes behind the reason.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.upstreams.anthropic.events import AnthropicEvents
from gateway.upstreams.anthropic.replies import NOTHING_TOLD, Told
from gateway.upstreams.bedrock.event_stream import Broken, EventStreamDecoder, StreamMessage
from gateway.upstreams.bedrock.replies import as_delta, as_reason, as_usage
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFailure
from gateway.upstreams.wire.reading import NOT_JSON
from protocol.events import Event

Block = dict[str, Any]

FULL = frozenset({"throttlingException", "serviceUnavailableException", "modelNotReadyException"})
STARTS = {"text_delta": ("text", "text"), "thinking_delta": ("thinking", "thinking")}


class BedrockEvents:
    """Reads one streamed reply."""

    def __init__(self, told: Told = NOTHING_TOLD) -> None:
        self._decoder = EventStreamDecoder()
        self._events = AnthropicEvents(told)
        self._begun: set[int] = set()  # blocks that have
        self._reason: object = None  # why the reply ended, until its count comes
        self.failure: UpstreamFailure | None = None

    def feed(self, piece: bytes) -> list[Event]:
        """Take in bytes and return what they complete. Raises ``failure`` when nothing came before it."""
        seen: list[Event] = []
        try:
            for message in self._decoder.feed(piece):
                seen += self._events.feed(b"".join(map(_sse, self._told(message))))
                self.failure = self._events.failure
                if self.failure is not None:
                    return seen
        except Broken as exc:
            self.failure = UpstreamError("The upstream sent bytes that are no event stream.", outcome="malformed")
            self.failure.__cause__ = exc
        except UpstreamFailure as exc:
            self.failure = exc
        if self.failure is not None and not seen:
            raise self.failure
        return seen

    def finish(self) -> list[Event]:
        """The bytes have ended. Return what that completes; raise UpstreamError when the reply is not whole."""
        seen = [] if self._reason is None else self._events.feed(b"".join(map(_sse, self._end(None))))
        return seen + self._events.finish()

    def _told(self, message: StreamMessage) -> Iterator[Block]:
        """Yield the events of Anthropic's that say the same. Raises UpstreamError."""
        if (kind := message.headers.get(":exception-type")) is not None or ":error-code" in message.headers:
            yield {"type": "error", "error": {"type": "overloaded_error" if kind in FULL else "api_error"}}
            return
        try:
            event = msgspec.json.decode(message.payload, type=Block)
        except NOT_JSON as exc:
            raise UpstreamError("The upstream sent an event that is not JSON.", outcome="malformed") from exc
        place = event.get("contentBlockIndex")
        place = place if isinstance(place, int) else 0
        match message.headers.get(":event-type"), event:
            case "contentBlockStart", {"start": {"toolUse": {"toolUseId": ident, "name": name}}}:
                self._begun.add(place)
                block = {"type": "tool_use", "id": ident, "name": name, "input": {}}
                yield {"type": "content_block_start", "index": place, "content_block": block}
            case "contentBlockDelta", {"delta": {"reasoningContent": {"redactedContent": data}}}:
                self._begun.add(place)
                block = {"type": "redacted_thinking", "data": data}
                yield {"type": "content_block_start", "index": place, "content_block": block}
            case "contentBlockDelta", {"delta": dict(said)} if (delta := as_delta(said)) is not None:
                if place not in self._begun and delta["type"] in STARTS:
                    self._begun.add(place)
                    kind, field = STARTS[delta["type"]]
                    begun = {"type": kind, field: ""}
                    yield {"type": "content_block_start", "index": place, "content_block": begun}
                yield {"type": "content_block_delta", "index": place, "delta": delta}
            case "contentBlockStop", _:
                yield {"type": "content_block_stop", "index": place}
            case "messageStop", _:
                self._reason = as_reason(event.get("stopReason")) or "end_turn"
            case "metadata", _:
                yield from self._end(as_usage(event.get("usage")))

    def _end(self, usage: Block | None) -> Iterator[Block]:
        """Yield the end of a reply whose reason has come."""
        if self._reason is not None:
            yield {"type": "message_delta", "delta": {"stop_reason": self._reason}, "usage": usage}
            yield {"type": "message_stop"}
            self._reason = None


def _sse(event: Block) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
