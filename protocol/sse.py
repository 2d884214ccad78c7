# Server-sent events: bytes to events across any chunk boundaries, and events to bytes.
# https://html.spec.whatwg.org/multipage/server-sent-events.html, section 9.2.6, without ids and retry times.

from __future__ import annotations

from msgspec import Struct

DONE = b"data: [DONE]\n\n"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CR = 13  # looked for as a number: ten times as fast as in bytes


class ServerEvent(Struct, frozen=True):
    """One event: its name (empty when none was given) and its data, lines joined by a newline."""

    name: bytes
    data: bytes


class EventStreamTooLong(Exception):
    """One event is longer than the reader keeps."""


class EventReader:
    """Turns the pieces of an event stream into events, however the pieces were cut.

    Lines end in LF, CR LF or CR; a byte order mark at the start is no part of the first. Comments and events without
    data are skipped. ``limit`` bounds the bytes kept of one unfinished event. The work is linear in the bytes,
    whatever the pieces' size.
    """

    def __init__(self, limit: int = 16 * 1024 * 1024) -> None:
        self._limit = limit
        self._line: list[bytes] = []  # pieces of the unfinished line, joined once it ends
        self._name = b""
        self._data: list[bytes] = []
        self._kept = 0  # bytes in _line and _data
        self._start: bytes | None = b""  # the stream's first bytes, while they may still be a byte order mark
        self._ended_in_cr = False  # the next LF belongs to it

    def feed(self, piece: bytes) -> list[ServerEvent]:
        """Take in a piece and return the events that it completes. Raises EventStreamTooLong."""
        if self._start is not None:
            piece = self._skip_mark(self._start + piece)
        if self._ended_in_cr and piece:
            self._ended_in_cr = False
            piece = piece.removeprefix(b"\n")
        if CR in piece:
            self._ended_in_cr = piece.endswith(b"\r")
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        events: list[ServerEvent] = []
        if not (self._line or self._data or self._name):
            piece = self._read_usual(piece, events)
        lines = piece.split(b"\n")
        rest = lines.pop()
        if lines:
            if self._line:
                self._line.append(lines[0])
                lines[0] = b"".join(self._line)
                self._kept -= len(lines[0]) - len(self._line.pop())
                self._line = []
            self._read_lines(lines, events)
        if rest:
            self._line.append(rest)
            self._kept += len(rest)
        if self._kept > self._limit:
            raise EventStreamTooLong(f"an event is longer than {self._limit} bytes")
        return events

    def _skip_mark(self, start: bytes) -> bytes:
        """Hold the stream's first bytes back until they are, or cannot become, a byte order mark."""
        if len(start) < len(BYTE_ORDER_MARK) and BYTE_ORDER_MARK.startswith(start):
            self._start = start
            return b""
        self._start = None
        return start.removeprefix(BYTE_ORDER_MARK)

    def _read_usual(self, piece: bytes, events: list[ServerEvent]) -> bytes:
        """Read the events that are one line of data each, as nearly all are; return all from the first other one on."""
        *blocks, rest = piece.split(b"\n\n")
        for block in blocks:
            if not block.startswith(b"data: ") or b"\n" in block:
                return b"\n\n".join((*blocks[len(events) :], rest))
            events.append(ServerEvent(b"", block[6:]))
        return rest

    def _read_lines(self, lines: list[bytes], events: list[ServerEvent]) -> None:
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
            elif line == b"data":  # a field without a colon has an empty value
                self._data.append(b"")
            elif line == b"event":
                self._name = b""


def encode_event(data: bytes, name: bytes = b"") -> bytes:
    """Return one event as bytes; ``data`` must hold no newline (JSON never does)."""
    return b"event: %b\ndata: %b\n\n" % (name, data) if name else b"data: %b\n\n" % data  # one copy: it may be long
