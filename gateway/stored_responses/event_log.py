# What a response in the background says, as its writer writes it, in pieces that are stored one after the other.

from __future__ import annotations

from typing import Any

from gateway.dialects.endpoint import ReplyFacts
from gateway.dialects.responses_writer import ResponsesWriter
from gateway.dialects.table import BY_NAME
from protocol.errors import ServiceError
from protocol.events import Event, ReplyEnd
from protocol.inference import WholeReply
from protocol.usage import Usage

Piece = tuple[int, bytes]  # number of the last event, and events as they are sent


class EventLog:
    """A writer of responses that gathers what it writes, in pieces that are stored one after the other."""

    def __init__(self, writer: ResponsesWriter) -> None:
        self.writer = writer
        self.error_told: ServiceError | None = None  # that broke the reply
        self._fresh: list[bytes] = []
        self._cut: list[Piece] = []  # that are to be stored; one is never another later
        self._next = 0  # number of the next event
        self._end = b""

    def begin(self) -> dict[str, Any]:
        """Return the response as it is queued, which the first events tell."""
        self.writer.is_stored = True
        queued, events = self.writer.queue()
        self.add(events)
        return queued

    def whole(self, reply: ReplyFacts, whole: WholeReply, usage: Usage) -> bytes:
        """Return the body of a plain answer, which no run is asked for: it is read as a stream."""
        return self.writer.whole(reply, whole, usage)

    def pieces(self, reply: ReplyFacts, events: list[Event]) -> bytes:
        """Return the bytes for events, or for the end as it was settled."""
        return self._end if type(events[-1]) is ReplyEnd else self.add(self.writer.pieces(reply, events))

    def settle(self, reply: ReplyFacts, ending: list[Event]) -> dict[str, Any]:
        """Return the response as it is at its end, whose events are written."""
        response = self.writer.settle(reply, ending)
        if reply.dropped:  # the header of the answer came before it was known
            response["dropped"] = BY_NAME[reply.call.endpoint].names_of(reply.dropped)
        self._end = self.add(self.writer.pieces(reply, ending))
        return response

    def error(self, error: ServiceError) -> bytes:
        """Return the bytes that tell that a reply broke."""
        self.error_told = error
        return self.add(self.writer.error(error))

    def add(self, events: bytes) -> bytes:
        """Note events that were written."""
        self._fresh.append(events)
        return events

    def cut(self) -> list[Piece]:
        """Return what is to be stored."""
        if events := b"".join(self._fresh):
            self._next += events.count(b"\n\n")
            self._cut.append((self._next - 1, events))
            self._fresh = []
        return self._cut[:]

    def drop(self, stored: list[Piece]) -> None:
        """Forget what was stored."""
        del self._cut[: len(stored)]
