# Server-sent events: bytes to events across any chunk boundaries, and events to bytes.
# https://html.spec.whatwg.org/multipage/server-sent-events.html, section 9.2.6, without ids and retry times.

from __future__ import annotations

from msgspec import Struct

DONE = b"data: [DONE]\n\n"


class ServerEvent(Struct, frozen=True):
    """One event: its name (empty when none was given) and its data, lines joined by a newline."""

    name: bytes
    data: bytes


class EventStreamTooLong(Exception):
    """One event is longer than the reader keeps."""


class EventReader:
    """Turns the pieces of an event stream into events, however the pieces were cut.

    Lines end in LF, CR LF or CR. Comments and events without data are skipped. ``limit`` bounds the bytes kept of one
    unfinished event.
    """

    def __init__(self, limit: int = 16 * 1024 * 1024) -> None:
        self._limit = limit
        self._rest = b""
        self._name = b""
        self._data: list[bytes] = []
        self._kept = 0

    def feed(self, piece: bytes) -> list[ServerEvent]:
        """Take in a piece and return the events that it completes."""
        text = self._rest + piece if self._rest else piece
        if b"\r" in text:
            return self._feed_lines(*self._split_any(text))
        lines = text.split(b"\n")
        return self._feed_lines(lines[:-1], lines[-1])

    def _split_any(self, text: bytes) -> tuple[list[bytes], bytes]:
        # A CR at the very end may be half of a CR LF: keep it until the next piece tells.
        held = b""
        if text.endswith(b"\r"):
            text, held = text[:-1], b"\r"
        lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        return lines[:-1], lines[-1] + held

    def _feed_lines(self, lines: list[bytes], rest: bytes) -> list[ServerEvent]:
        events: list[ServerEvent] = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(ServerEvent(self._name, b"\n".join(self._data)))
                self._name, self._data, self._kept = b"", [], 0
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
                self._kept += len(line)
            elif line.startswith(b"event:"):
                self._name = line[7:] if line[6:7] == b" " else line[6:]
        self._rest = rest
        if self._kept + len(rest) > self._limit:
            raise EventStreamTooLong(f"an event is longer than {self._limit} bytes")
        return events


def encode_event(data: bytes, name: bytes = b"") -> bytes:
    """Return one event as bytes; ``data`` must hold no newline (JSON never does)."""
    return b"event: " + name + b"\ndata: " + data + b"\n\n" if name else b"data: " + data + b"\n\n"
