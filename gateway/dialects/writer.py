# How replies are written in one dialect.

from __future__ import annotations

from typing import Protocol

from gateway.inference.reply import Reply
from protocol.errors import ServiceError
from protocol.events import Event
from protocol.inference import WholeReply
from protocol.usage import Usage


class Dialect(Protocol):
    """How one API writes replies. One object per call; it may keep what the stream needs to remember."""

    def whole(self, reply: Reply, whole: WholeReply, usage: Usage) -> bytes:
        """Return the body of a plain answer."""

    def pieces(self, reply: Reply, events: list[Event]) -> bytes:
        """Return the bytes of a stream that stand for events which came together."""

    def error(self, error: ServiceError) -> bytes:
        """Return the bytes that tell a client in mid-stream that its reply broke."""
