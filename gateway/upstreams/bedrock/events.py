# Streamed replies of Bedrock's ConverseStream: its events become those of Anthropic's Messages API, which are read as
# any others. Text has no event of its own where it begins, and the count comes behind the reason.

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import msgspec
from msgspec import Struct

from gateway.upstreams.anthropic.events import AnthropicEvents
from gateway.upstreams.anthropic.replies import NOTHING_TOLD, Told
from gateway.upstreams.bedrock.replies import as_delta, as_reason, as_usage
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFailure
from gateway.upstreams.wire.reading import OBJECTS, decoded
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
        event = decoded(message.payload, OBJECTS, "The upstream sent an event that is not JSON.")
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


# Amazon's event stream: messages of headers and a payload, each with its lengths and two checksums before and behind.
# https://docs.aws.amazon.com/transcribe/latest/dg/event-stream.html
PRELUDE = struct.Struct(">III")  # length of all, of the headers, and the checksum of both
LEAST = PRELUDE.size + 4
LONGEST = 16 * 1024 * 1024  # bytes of a message
TEXT = 7  # the type of headers that are texts
SIZES = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}  # bytes of a header's value, by its type
MEASURED = (6, TEXT)  # types whose values have their length before them


class Broken(ValueError):
    """The bytes are no event stream."""


class StreamMessage(Struct, frozen=True):
    """A message, its headers as far as they are texts."""

    headers: dict[str, str]
    payload: bytes


class EventStreamDecoder:
    """Reads messages from bytes, however they are cut."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> Iterator[StreamMessage]:
        """Take in bytes and yield the messages that they complete. Raises Broken."""
        self._bytes += piece
        while len(self._bytes) >= PRELUDE.size:
            length, headers, checksum = PRELUDE.unpack_from(self._bytes)
            if crc32(self._bytes[:8]) != checksum or not LEAST + headers <= length <= LONGEST:
                raise Broken("the beginning of a message is none")
            if len(self._bytes) < length:
                return
            message = bytes(self._bytes[:length])
            del self._bytes[:length]
            if crc32(message[:-4]) != int.from_bytes(message[-4:]):
                raise Broken("a message is not as it was sent")
            end = PRELUDE.size + headers
            yield StreamMessage(_headers(message[PRELUDE.size : end]), message[end:-4])


def _headers(data: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    place = 0
    try:
        while place < len(data):
            size = data[place]
            name = data[place + 1 : place + 1 + size].decode()
            kind = data[place + 1 + size]
            place += 2 + size
            if kind in MEASURED:
                length = int.from_bytes(data[place : place + 2])
                if kind == TEXT:
                    found[name] = data[place + 2 : place + 2 + length].decode()
                place += 2 + length
            else:
                place += SIZES[kind]
    except (IndexError, KeyError, UnicodeDecodeError) as exc:
        raise Broken("the headers of a message are none") from exc
    return found
