# A small HTTP/1.1 server whose every byte can be commanded: regular answers, and all the ways in which a connection
# dies. Frameworks hide what the scripted upstream must do (a reset, a body without its end, one byte at a time).

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

import httptools

REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 429: "Too Many Requests"}


class HttpRequest:
    """One request, whole. Header names are in lower case."""

    def __init__(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> None:
        self.method = method
        self.path = path
        self.headers = dict(headers)
        self.body = body


class HttpConnection(asyncio.Protocol):
    """One connection of a client. Requests are answered one after the other by ``answer(request, connection)``.

    An answer is ``start``, any number of ``write``, and ``finish``; ``reset`` and ``drop`` end it in a bad way. When
    the client leaves, ``is_lost`` turns true and the answer's task is cancelled.
    """

    def __init__(
        self, answer: Callable[[HttpRequest, HttpConnection], Awaitable[None]], connections: set[HttpConnection]
    ) -> None:
        self._answer = answer
        self._connections = connections  # those that are open
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[HttpRequest] = deque()
        self._task: asyncio.Task[None] | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._is_chunked = False
        self.is_lost = False

    # What the answer commands.

    def start(self, status: int, headers: Mapping[str, str], length: int | None = None) -> None:
        """Send the head. Without a ``length`` the body is chunked."""
        self._is_chunked = length is None
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines.append("transfer-encoding: chunked" if length is None else f"content-length: {length}")
        self._transport.write("\r\n".join([*lines, "", ""]).encode())

    def write(self, data: bytes) -> None:
        """Send a piece of the body at once."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def write_raw(self, data: bytes) -> None:
        """Send bytes that are already as they go over the wire."""
        self._transport.write(data)

    def finish(self) -> None:
        """End the body regularly."""
        if self._is_chunked:
            self._transport.write(b"0\r\n\r\n")

    def reset(self) -> None:
        """Break the connection with a TCP reset; what the kernel still holds is lost."""
        raw: socket.socket = self._transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def drop(self) -> None:
        """Close the connection without ending the body."""
        self._transport.close()

    async def drain(self) -> None:
        """Wait until the client has read enough for more to be sent."""
        await self._can_write.wait()

    # What asyncio and httptools call.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by type
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._connections.discard(self)
        self._can_write.set()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.start(400, {"content-type": "text/plain", "connection": "close"}, 0)
            self.drop()

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers: list[tuple[str, str]] = []
        self._body: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_body(self, piece: bytes) -> None:
        self._body.append(piece)

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode()
        self._waiting.append(HttpRequest(method, self._url.decode("latin-1"), self._headers, b"".join(self._body)))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._answer_all())

    async def _answer_all(self) -> None:
        while self._waiting and not self.is_lost:
            await self._answer(self._waiting.popleft(), self)
        self._task = None
