# One request and its answer, as ASGI has them, in fewer steps than uvicorn's own: the head of an answer of known length
# leaves with its body, in one piece; what is looked at in each header once is not looked at again; and reading a body
# that is here waits for nothing.

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HEADER_RE, STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

ONE_PIECE = 64 * 1024  # bytes of a body that is copied behind its head
BODILESS = (204, 304)
FRAMING = {b"content-length: ", b"transfer-encoding: ", b"connection: "}  # headers that say where an answer ends
MOST_NAMES = 1000
CONTROLS = bytes([*range(9), *range(10, 32), 127])  # signs that no header may have

_names: dict[bytes, bytes] = {}  # of headers that have been looked at, as they are written


class Exchange(RequestResponseCycle):
    """One request and its answer. ``knows_chunks``: clients of HTTP/1.0 do not, and a body of which no length is said
    ends with the connection."""

    def __init__(self, connection: HttpToolsProtocol, *, keep_alive: bool, knows_chunks: bool) -> None:
        self.scope = connection.scope
        self.transport = connection.transport
        self.flow = connection.flow
        self.logger = connection.logger
        self.message_event = asyncio.Event()
        self.on_response = connection.on_response_complete
        self.disconnected = False
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = connection.expect_100_continue
        self.body = bytearray()
        self.more_body = True
        self.response_started = self.response_complete = False
        self.chunked_encoding: bool | None = None
        self.expected_content_length = 0
        self._state = connection.server_state
        self._knows_chunks = knows_chunks
        self._has_length = True  # the body is as long as is said, or framed by chunks
        self._head = b""  # of the answer, while it waits for its body

    async def receive(self) -> Any:
        """Return what comes next of the request, or that its client has left."""
        if not self.more_body and self.body and not self.disconnected and not self.response_complete:
            body, self.body = bytes(self.body), bytearray()  # the rest is here
            self.message_event.clear()
            return {"type": "http.request", "body": body, "more_body": False}
        return await super().receive()

    async def send(self, message: Any) -> None:
        """Send the head of the answer, or a piece of its body; wait while the client has too much unread."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if not self.response_started:
            self._expect(message, "http.response.start")
            self.response_started, self.waiting_for_100_continue = True, False
            self._head = self._head_of(message["status"], message.get("headers", ()))
            if self.chunked_encoding is not False or not self.expected_content_length:
                self.transport.write(self._head)
                self._head = b""
        elif not self.response_complete:
            self._expect(message, "http.response.body")
            self._send_body(message.get("body", b""), is_last=not message.get("more_body", False))
        else:
            raise RuntimeError(f"Unexpected ASGI message '{message['type']}' after the end of the answer.")

    def _expect(self, message: Any, kind: str) -> None:
        if message["type"] != kind:
            raise RuntimeError(f"Expected ASGI message '{kind}', but got '{message['type']}'.")

    def _head_of(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Return the head of the answer, and note how its body will be framed. Raises RuntimeError for a header that is
        none."""
        lines = [STATUS_LINE[status][:-2]]
        says_close = False
        for given, value in (*self._state.default_headers, *headers):
            name = _names.get(given) or _named(given)
            lines.append(name + value)
            if name not in FRAMING:
                continue
            if name == b"content-length: " and self.chunked_encoding is None:
                self.expected_content_length, self.chunked_encoding = int(value), False
            elif name == b"transfer-encoding: " and value.lower() == b"chunked":
                self.expected_content_length, self.chunked_encoding = 0, True
            elif name == b"connection: " and b"close" in map(bytes.strip, value.lower().split(b",")):
                self.keep_alive, says_close = False, True
        if self.chunked_encoding is None and not self._knows_chunks:
            self.chunked_encoding = self._has_length = self.keep_alive = False
        if not self.keep_alive and not says_close:
            lines.append(b"connection: close")
        if self.chunked_encoding is None and self.scope["method"] != "HEAD" and status not in BODILESS:
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked")
        text = b"".join(lines)
        if len(text.translate(None, CONTROLS)) != len(text):
            raise RuntimeError("Invalid HTTP header value.")
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _send_body(self, body: bytes, *, is_last: bool) -> None:
        head, self._head = self._head, b""
        if self.scope["method"] == "HEAD":
            self.expected_content_length, body = 0, b""
        elif self.chunked_encoding:
            framed = (b"%x\r\n" % len(body), body, b"\r\n") if body else ()
            body = b"".join((*framed, b"0\r\n\r\n" if is_last else b""))
        elif self._has_length:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0:
                raise RuntimeError("Response content longer than Content-Length")
        if head and len(body) > ONE_PIECE:
            self.transport.writelines((head, body))
        elif head or body:
            self.transport.write(head + body)
        if is_last:
            self._end()

    def _end(self) -> None:
        if self.expected_content_length:
            raise RuntimeError("Response content shorter than Content-Length")
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()


def _named(given: bytes) -> bytes:
    """Return the name of a header as it is written. Raises RuntimeError for what is none."""
    if HEADER_RE.search(given):
        raise RuntimeError("Invalid HTTP header name.")
    name = given.lower() + b": "
    if len(_names) < MOST_NAMES:
        _names[given] = name
    return name
