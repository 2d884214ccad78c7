# The connections to upstreams: idle ones by where they lead, and how new ones are made, through an HTTP proxy too.

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

import aiohappyeyeballs
from msgspec import Struct

from gateway.core.settings import DIRECT, Egress
from gateway.upstreams.connection import Connection

LOOKED_UP_FOR = 30.0  # seconds that an address is believed
NEXT_ADDRESS_AFTER = 0.25  # seconds: an upstream of several addresses may be away at one of them (RFC 8305)
SAFE = "/%:@!$&'()*+,;=~?"  # in a URL's path and query, beside letters, digits, "_.-~"

P = TypeVar("P", bound=asyncio.Protocol)

Address = tuple[Any, Any, int, str, Any]  # as getaddrinfo has it


class Origin(Struct, frozen=True):
    """Where connections lead."""

    host: str
    port: int
    is_secure: bool
    egress: Egress = DIRECT
    party: str = ""  # whose calls alone it carries


@lru_cache(1024)
def place_of(url: str) -> tuple[Origin, str, str]:
    """Return where a URL leads, what to name the host there, and what to ask of it."""
    parts = urlsplit(url)
    host, is_secure = parts.hostname or "", parts.scheme == "https"
    if not host.isascii():
        host = host.encode("idna").decode()
    usual = 443 if is_secure else 80
    port = parts.port or usual
    named = f"[{host}]" if ":" in host else host
    target = quote(parts.path or "/", SAFE) + (f"?{quote(parts.query, SAFE)}" if parts.query else "")
    return Origin(host, port, is_secure), named if port == usual else f"{named}:{port}", target


class Pool:
    """Connections that stand, and those that are made when none is idle; there is no bound on their number.

    ``tls`` is for upstreams under an authority of one's own; else the system's are trusted.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._tls = tls
        self._idle: defaultdict[Origin, list[Connection]] = defaultdict(list)  # the latest used last, and first again
        self._open: dict[Connection, Origin] = {}
        self._addresses: dict[Origin, tuple[float, list[Address]]] = {}  # until when they are believed
        self._looking: dict[Origin, asyncio.Future[list[Address]]] = {}
        self._is_closed = False

    @property
    def idle(self) -> int:
        """How many connections wait for a request."""
        return sum(map(len, self._idle.values()))

    def take(self, origin: Origin) -> Connection | None:
        """Return an idle connection, if there is one."""
        idle = self._idle.get(origin)
        while idle:
            if (connection := idle.pop()).is_usable:
                return connection
        return None

    def give_back(self, connection: Connection) -> None:
        """Take a connection whose answer has been read, or whose rest no call wants."""
        if connection.release() and (origin := self._open.get(connection)) is not None:
            self._idle[origin].append(connection)

    async def connect(self, origin: Origin) -> Connection:
        """Return a new connection. Raises OSError."""
        connection = await self.open(origin, lambda: Connection(self._loop, self._lose))
        self._open[connection] = origin
        return connection

    async def open(self, origin: Origin, make: Callable[[], P]) -> P:
        """Return what ``make`` made to speak over a new connection, which is its caller's. Raises OSError."""
        tls = await self._tls_for(origin) if origin.is_secure else None
        reached = origin if origin.egress.proxy is None else place_of(origin.egress.proxy)[0]
        addresses = await self._look_up(reached)
        try:
            opened = await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=NEXT_ADDRESS_AFTER)
        except OSError:
            self._addresses.pop(reached, None)  # it may have moved
            raise
        try:
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if origin.egress.proxy is not None:
                await open_tunnel(opened, origin.egress.proxy, origin.host, origin.port)
            transport, made = await self._loop.create_connection(
                make,
                sock=opened,
                ssl=tls,
                server_hostname=origin.host.rstrip(".") if origin.is_secure else None,
            )
        except BaseException:
            opened.close()
            raise
        if self._is_closed:
            transport.abort()
            raise ConnectionAbortedError("the pool is closed")
        return made

    def close(self) -> None:
        """Close every connection, also those that answer."""
        self._is_closed = True
        for connection in list(self._open):
            connection.abort()

    def _lose(self, connection: Connection) -> None:
        origin = self._open.pop(connection, None)
        if origin is not None and connection in (idle := self._idle[origin]):
            idle.remove(connection)

    async def _tls_for(self, origin: Origin) -> ssl.SSLContext:
        """Return what trusts the authorities of an origin. Raises OSError."""
        if (file := origin.egress.ca_file) is not None:
            return await self._loop.run_in_executor(None, lambda: _own_tls(file, file.stat().st_mtime_ns))
        if self._tls is None:
            self._tls = await self._loop.run_in_executor(None, _usual_tls)
        return self._tls

    async def _look_up(self, origin: Origin) -> list[Address]:
        """Return the host's addresses, another one first each time. Many calls at once share one look-up."""
        until, known = self._addresses.get(origin, (0.0, []))
        if until <= self._loop.time():
            if (looking := self._looking.get(origin)) is None:
                looking = self._looking[origin] = asyncio.ensure_future(self._resolve(origin))
                looking.add_done_callback(lambda looked: self._looked(origin, looked))
            until, known = self._loop.time() + LOOKED_UP_FOR, await asyncio.shield(looking)
        self._addresses[origin] = until, [*known[1:], *known[:1]]
        return known

    async def _resolve(self, origin: Origin) -> list[Address]:
        return await self._loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)

    def _looked(self, origin: Origin, looked: asyncio.Future[list[Address]]) -> None:
        del self._looking[origin]
        if not looked.cancelled():
            looked.exception()  # its caller may have left


@lru_cache(1)
def _usual_tls() -> ssl.SSLContext:
    """Return what trusts the system's authorities, which take 50 ms to read."""
    tls = ssl.create_default_context()
    tls.set_alpn_protocols(["http/1.1"])
    return tls


@lru_cache(64)
def _own_tls(file: Path, changed_at: int) -> ssl.SSLContext:
    """Return what trusts the authorities in a file as it was ``changed_at`` so many nanoseconds."""
    tls = ssl.create_default_context(cafile=file)
    tls.set_alpn_protocols(["http/1.1"])
    return tls


LONGEST_ANSWER = 16 * 1024  # bytes of a proxy's answer
TAKEN = re.compile(rb"HTTP/1\.[01] 2\d\d[ \r]")


async def open_tunnel(opened: socket.socket, proxy: str, host: str, port: int) -> None:
    """Have the proxy at the other end of a socket connect it to ``host``. Raises OSError when it does not.

    What the proxy says of it is read to its last byte and no further: behind it the upstream speaks.
    """
    loop = asyncio.get_running_loop()
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    lines = [f"CONNECT {place} HTTP/1.1", f"host: {place}", *_credentials(proxy), "", ""]
    await loop.sock_sendall(opened, "\r\n".join(lines).encode())
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        piece = await loop.sock_recv(opened, 4096 if not answer else 1)
        answer += piece
        if not piece or len(answer) > LONGEST_ANSWER or b"\r\n\r\n" in answer[:-4]:
            raise ConnectionRefusedError("the proxy gave no answer that can be read")
    if TAKEN.match(answer) is None:
        raise ConnectionRefusedError("the proxy refused to connect")


def _credentials(proxy: str) -> list[str]:
    parts = urlsplit(proxy)
    if parts.username is None:
        return []
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return [f"proxy-authorization: Basic {b64encode(pair.encode()).decode()}"]
