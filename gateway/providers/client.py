# The only module that calls upstreams. httpx's errors become ours here; past it nobody knows httpx.

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from gateway.errors import UpstreamError, UpstreamTimeout
from gateway.providers.base import UpstreamRequest

LONGEST_REPLY = 64 * 1024 * 1024  # bytes of a plain reply that we read
LONGEST_ERROR = 64 * 1024  # bytes of a failing reply that we read


class UpstreamClient:
    """Sends requests to upstreams over pooled connections. Redirects are not followed and no cookie is kept."""

    def __init__(self) -> None:
        self._transport = AiohttpTransport(client=_new_session, trust_env=False)

    async def send(self, request: UpstreamRequest, connect: float, patience: float) -> UpstreamResponse:
        """Send ``request`` and return once the headers of the answer are here.

        ``connect`` and ``patience`` are seconds: for the connection, and for the headers. Raises UpstreamFailure.
        """
        limits = {"connect": connect, "pool": connect}
        outgoing = httpx.Request(
            request.method,
            _parsed(request.url),
            headers=request.headers,
            content=request.body,
            extensions={"timeout": limits},
        )
        with _errors_become_ours():
            async with asyncio.timeout(patience):
                return UpstreamResponse(await self._transport.handle_async_request(outgoing))

    async def close(self) -> None:
        """Close every connection."""
        await self._transport.aclose()


class UpstreamResponse:
    """An answer whose headers are here. Close it, whatever happens; closing early closes the connection."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._pieces = aiter(response.stream)  # type: ignore[arg-type]
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers

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

    async def next_piece(self) -> bytes | None:
        """Return the next bytes of the body, or ``None`` at its end."""
        with _errors_become_ours():
            return await anext(self._pieces, None)

    async def close(self) -> None:
        """Give the connection back, or close it when the body was not read to its end. Never raises."""
        try:
            await self._pieces.aclose()  # type: ignore[attr-defined]
            await self._response.stream.aclose()  # type: ignore[union-attr]
        except (httpx.HTTPError, aiohttp.ClientError, OSError, RuntimeError):
            pass


async def read_error_body(response: UpstreamResponse) -> bytes:
    """Return what a failing answer says, or nothing when it does not come in a second."""
    try:
        async with asyncio.timeout(1.0):
            return await response.read(LONGEST_ERROR)
    except (TimeoutError, UpstreamError):
        return b""


@contextmanager
def _errors_become_ours() -> Iterator[None]:
    try:
        yield
    except TimeoutError as exc:
        raise UpstreamTimeout("The upstream did not answer in time.") from exc
    except httpx.ConnectError as exc:
        raise UpstreamError("The upstream cannot be reached.", outcome="connect") from exc
    except httpx.TimeoutException as exc:
        # aiohttp's transport also names a lost connection this way; only a real timeout has TimeoutError behind it.
        if isinstance(exc.__cause__, TimeoutError):
            raise UpstreamTimeout("The upstream did not answer in time.") from exc
        raise UpstreamError("The upstream closed the connection.", outcome="reset") from exc
    except (httpx.HTTPError, aiohttp.ClientError, OSError) as exc:
        raise UpstreamError("The connection to the upstream broke.", outcome="reset") from exc


@lru_cache(1024)
def _parsed(url: str) -> httpx.URL:
    return httpx.URL(url)


def _new_session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60, ttl_dns_cache=30)
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers={"user-agent", "accept"},
        read_bufsize=256 * 1024,
    )
