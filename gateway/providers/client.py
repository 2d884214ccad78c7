# The only module that calls upstreams. aiohttp's errors become ours here; past it nobody knows aiohttp.

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from functools import lru_cache

import aiohttp
from aiohttp.abc import AbstractStreamWriter

from gateway.providers.base import UpstreamRequest
from gateway.providers.errors import UpstreamError, UpstreamFailure, UpstreamTimeout

UNREAD = 64 * 1024  # bytes of an answer that may wait here for a slow client; at twice that its upstream waits
LONGEST_REPLY = 64 * 1024 * 1024  # bytes of a plain reply that we read
LONGEST_ERROR = 64 * 1024  # bytes of a failing reply that we read

BROKEN = (aiohttp.ClientError, OSError)  # TimeoutError is an OSError


class UpstreamClient:
    """Sends requests to upstreams over pooled connections. Redirects are not followed and no cookie is kept.

    Made inside a running event loop, and used in that one alone.
    """

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60, ttl_dns_cache=30),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers={"user-agent", "accept"},
            read_bufsize=UNREAD,
        )

    async def send(self, request: UpstreamRequest, connect: float, patience: float) -> UpstreamResponse:
        """Send ``request`` and return once the headers of the answer are here.

        ``connect`` and ``patience`` are seconds: for the connection, and for the headers. Raises UpstreamFailure.
        """
        try:
            async with asyncio.timeout(patience):
                response = await self._session.request(
                    request.method,
                    request.url,
                    headers=request.headers,
                    data=_Body(request),
                    timeout=_connecting_within(connect),
                    allow_redirects=False,
                )
        except BROKEN as exc:
            raise _as_ours(exc) from exc
        return UpstreamResponse(response)

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()


class _Body(aiohttp.BytesPayload):
    """A request's body, which notes when it is written."""

    def __init__(self, request: UpstreamRequest) -> None:
        super().__init__(request.body)
        self._delivery = request.delivery

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """Write the body, as aiohttp asks once."""
        await super().write_with_length(writer, content_length)
        self._delivery.is_whole = True


class UpstreamResponse:
    """An answer whose headers are here. Close it, whatever happens; closing early closes the connection."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self._loop = asyncio.get_running_loop()
        self._due = math.inf  # the loop's seconds: when whoever waits for bytes has waited long enough
        self._alarm: asyncio.TimerHandle | None = None  # one for many pieces: it is moved when it rings, not before

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
        self._due = self._loop.time() + patience
        if self._alarm is None and patience < math.inf:
            self._alarm = self._loop.call_at(self._due, self._ring)
        try:
            return await self._response.content.readany() or None
        except BROKEN as exc:
            raise _as_ours(exc) from exc
        finally:
            self._due = math.inf

    def _ring(self) -> None:
        self._alarm = None
        if self._due <= self._loop.time():
            late = UpstreamTimeout("The upstream fell silent, or took too long in all.")
            self._response.content.set_exception(late)
        elif self._due < math.inf:
            self._alarm = self._loop.call_at(self._due, self._ring)

    async def close(self) -> None:
        """Close the connection if the body has not come to its end; else it went back to the pool. Never raises."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._response.close()


async def read_error_body(response: UpstreamResponse) -> bytes:
    """Return what a failing answer says, or nothing when it does not come in a second."""
    try:
        async with asyncio.timeout(1.0):
            return await response.read(LONGEST_ERROR)
    except (TimeoutError, UpstreamError):
        return b""


def _as_ours(exc: Exception) -> UpstreamFailure:
    """Return what a failure of aiohttp or of the network means to a call."""
    match exc:
        case aiohttp.ConnectionTimeoutError():
            return UpstreamTimeout("The upstream did not take the connection in time.", outcome="connect")
        case TimeoutError():
            return UpstreamTimeout("The upstream did not answer in time.")
        case aiohttp.ClientConnectorError():
            return UpstreamError("The upstream cannot be reached.", outcome="connect")
        case aiohttp.ServerDisconnectedError():
            return UpstreamError("The upstream closed the connection.", outcome="reset")
    return UpstreamError("The connection to the upstream broke.", outcome="reset")


@lru_cache(64)
def _connecting_within(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, connect=seconds, sock_connect=seconds)
