# The only module that calls upstreams: HTTP/1.1 over pooled connections. What fails below becomes an UpstreamFailure.

from __future__ import annotations

import asyncio
import math
import ssl
import zlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from gateway.core.settings import DIRECT
from gateway.upstreams.connection import Connection
from gateway.upstreams.pool import Origin, Pool, place_of
from gateway.upstreams.socket import UpstreamSocket
from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamError, UpstreamTimeout
from protocol.serving.deadlines import running_timeout

LONGEST_REPLY = 64 * 1024 * 1024  # bytes of a plain reply that we read
T = TypeVar("T")
UNPACKED_AT_ONCE = 64 * 1024  # bytes
LONGEST_ERROR = 64 * 1024  # bytes of a failing reply that we read


class UpstreamClient:
    """Sends requests to upstreams over pooled connections. Redirects are not followed, no proxy is used but the one
    that a request names, and no cookie is kept.

    Made inside a running event loop, and used in that one alone. ``tls`` as in Pool.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.pool = Pool(tls)

    async def send(self, request: UpstreamRequest, connect: float, patience: float) -> UpstreamResponse:
        """Send ``request`` and return once the headers of the answer are here.

        ``connect`` and ``patience`` are seconds: for the connection, and for the headers. Raises UpstreamFailure.
        """
        origin, host, target = _origin_of(request)
        head = _head_of(request, host, target)
        due = self._loop.time() + patience
        connection = self.pool.take(origin)
        if connection is None:
            connection = await _in_time(partial(self.pool.connect, origin), connect, patience)
        try:
            connection.send(head, request.body, request.delivery, request.rest)
            await connection.answered(due)
            return UpstreamResponse(connection, self.pool)
        except BaseException:
            connection.abort()
            raise

    async def open_socket(self, request: UpstreamRequest, connect: float, patience: float) -> UpstreamSocket:
        """Ask for a WebSocket and return it once it was answered, also where that refuses it. Its caller closes it.

        Seconds and errors as in ``send``.
        """
        origin, due = _origin_of(request)[0], self._loop.time() + patience
        make = partial(UpstreamSocket, request.url, request.headers)
        socket = await _in_time(partial(self.pool.open, origin, make), connect, patience)
        try:
            async with running_timeout(max(0.0, due - self._loop.time())):
                await socket.opened()
        except TimeoutError as exc:
            socket.abort()
            raise UpstreamTimeout("The upstream did not answer in time.") from exc
        except BaseException:
            socket.abort()
            raise
        return socket

    async def close(self) -> None:
        """Close every connection."""
        self.pool.close()


async def _in_time(connected: Callable[[], Awaitable[T]], connect: float, patience: float) -> T:
    """Return a new connection. Raises UpstreamFailure."""
    try:
        async with running_timeout(min(connect, patience)):
            return await connected()
    except TimeoutError as exc:
        if patience < connect:
            raise UpstreamTimeout("The upstream did not answer in time.") from exc
        raise UpstreamTimeout("The upstream did not take the connection in time.", outcome="connect") from exc
    except (OSError, RuntimeError, UnicodeError) as exc:  # a name's look-up, each address, TLS
        raise UpstreamError("The upstream cannot be reached.", outcome="connect") from exc


def _origin_of(request: UpstreamRequest) -> tuple[Origin, str, str]:
    """Return where a request leads on which way, what to name the host there, and what to ask of it."""
    origin, host, target = place_of(request.url)
    if request.egress is not DIRECT:
        origin = replace(origin, egress=request.egress)
    if request.party:
        origin = replace(origin, party=request.party)
    return origin, host, target


class UpstreamResponse:
    """An answer whose headers are here. Close it, whatever happens; closing early closes the connection.

    ``due`` is the loop's seconds: an answer whose bytes have not come by then is lost, whatever its pieces' patience.
    """

    def __init__(self, connection: Connection, pool: Pool) -> None:
        self._connection: Connection | None = connection
        self._pool = pool
        self.status = connection.status
        self.headers: Mapping[str, str] = connection.headers  # names in lower case
        self.due = math.inf
        encoding = self.headers.get("content-encoding", "identity")
        self._unpacker = None if encoding in ("identity", "") else Unpacker(encoding.lower())

    async def read(self, longest: int = LONGEST_REPLY) -> bytes:
        """Return the whole body. Raises UpstreamError when it is longer than ``longest``."""
        pieces: list[bytes] = []
        length = 0
        while (piece := await self.next_piece()) is not None:
            pieces.append(piece)
            length += len(piece)
            if length > longest:
                raise UpstreamError("The upstream's answer is too long.", outcome="too_long")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def next_piece(self, patience: float = math.inf) -> bytes | None:
        """Return the next bytes of the body, or ``None`` at its end.

        Raises UpstreamTimeout after ``patience`` seconds without any; then the answer is lost, and only to be closed.
        """
        connection = self._connection
        assert connection is not None, "the answer is closed"
        due = self.due if patience == math.inf else min(self.due, connection.now() + patience)
        if self._unpacker is None:
            return await connection.next_piece(due)
        while not (unpacked := self._unpacker.take()):
            if (piece := await connection.next_piece(due)) is None:
                self._unpacker.end()
                return None
            self._unpacker.feed(piece)
        return unpacked

    def close(self) -> None:
        """Close the connection if the body has not come to its end; else it goes back to the pool. Never raises."""
        if self._connection is not None:
            self._pool.give_back(self._connection)
            self._connection = None


async def read_error_body(response: UpstreamResponse) -> bytes:
    """Return what a failing answer says, or nothing when it does not come in a second."""
    try:
        async with running_timeout(1.0):
            return await response.read(LONGEST_ERROR)
    except (TimeoutError, UpstreamError):
        return b""


def _head_of(request: UpstreamRequest, host: str, target: str) -> bytes:
    """Return the head of a request: what the format says, and the two headers that HTTP needs."""
    lines = [f"{name}: {value}\r\n" for name, value in request.headers.items()]
    head = (
        f"{request.method} {target} HTTP/1.1\r\nhost: {host}\r\n{''.join(lines)}"
        f"content-length: {len(request.body) + sum(map(len, request.rest))}\r\n\r\n"
    )
    if head.count("\n") != len(lines) + 4 or head.count("\r") != len(lines) + 4:
        raise ValueError("a header's value may not have several lines")  # and the value is not told: it may be a key
    return head.encode("utf-8", "surrogateescape")


class Unpacker:
    """Unpacks one body of a content-encoding: gzip, or deflate with a header or without. Raises UpstreamError for
    another, and for what is none."""

    def __init__(self, encoding: str) -> None:
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise _broken()
        self._is_gzip = encoding != "deflate"
        self._packed = b""
        self._stream = zlib.decompressobj(zlib.MAX_WBITS | 32)  # either header
        self._has_begun = False

    def feed(self, piece: bytes) -> None:
        """Take in what came."""
        self._packed += piece

    def take(self) -> bytes:
        """Return the next bytes; nothing when more must come first."""
        while self._packed:
            if self._stream.eof:  # gzip may go on with another member
                self._stream = zlib.decompressobj(zlib.MAX_WBITS | 32)
            if not self._has_begun and not self._is_gzip and self._packed[0] & 0x0F != 8:  # no header of zlib's
                self._stream = zlib.decompressobj(-zlib.MAX_WBITS)
            self._has_begun = True
            try:
                out = self._stream.decompress(self._packed, UNPACKED_AT_ONCE)
            except zlib.error as exc:
                raise _broken() from exc
            self._packed = self._stream.unconsumed_tail or self._stream.unused_data
            if out:
                return out
        return b""

    def end(self) -> None:
        """The body has ended: refuse one that is cut."""
        if self._has_begun and not self._stream.eof:
            raise _broken()


def _broken() -> UpstreamError:
    return UpstreamError("The upstream's answer is compressed in a way that cannot be read.", outcome="reset")
