# The way to Redis, which a test can cut, or let only requests or nothing through.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from enum import Enum

from sqlalchemy import make_url


class Way(Enum):
    """What passes."""

    OPEN = "open"  # everything
    CUT = "cut"  # connections break, and none is made
    DEAF = "deaf"  # requests are executed, answers are lost
    SILENT = "silent"  # connections stand, nothing passes
    # Requests are executed, and instead of each answer there comes
    GARBAGE = "garbage"  # what is no protocol,
    ANOTHER = "another"  # a number, whatever was asked,
    HALF = "half"  # the half of it,
    TORN = "torn"  # the half of it, and the end of the connection


class RedisProxy:
    """A TCP proxy on a port of its own."""

    def __init__(self, url: str) -> None:
        self.way = Way.OPEN
        self.late = 0.0  # seconds by which all that passes is late, each way
        self._target = make_url(url)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        """The URL of Redis by this way."""
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        return self._target.set(host="127.0.0.1", port=port).render_as_string(hide_password=False)

    def turn(self, way: Way) -> None:
        """Change what passes. Connections that lost something are broken when the way opens again."""
        if way is Way.CUT or (way is Way.OPEN and self.way is not Way.OPEN):
            for writer in self._writers:
                writer.transport.abort()
        self.way = way

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def stop(self) -> None:
        """Break everything."""
        assert self._server is not None
        self.turn(Way.CUT)
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.way is Way.CUT:
            writer.transport.abort()
            return
        there_reader, there = await asyncio.open_connection(self._target.host, self._target.port)
        self._writers |= {writer, there}
        with suppress(OSError):
            await asyncio.gather(self._carry(reader, there, _as_asked), self._carry(there_reader, writer, _as_answered))
        self._writers -= {writer, there}

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passing: Callable[[Way, bytes], bytes]
    ) -> None:
        try:
            while piece := await reader.read(65536):
                if self.late:
                    await asyncio.sleep(self.late)
                writer.write(passing(self.way, piece))
                if self.way is Way.TORN and passing is _as_answered:
                    break
        finally:
            writer.close()


def _as_asked(way: Way, piece: bytes) -> bytes:
    return b"" if way in (Way.CUT, Way.SILENT) else piece


def _as_answered(way: Way, piece: bytes) -> bytes:
    match way:
        case Way.OPEN:
            return piece
        case Way.GARBAGE:
            return b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n"
        case Way.ANOTHER:
            return b":1000000\r\n"
        case Way.HALF | Way.TORN:
            return piece[: len(piece) // 2]
        case _:
            return b""


@asynccontextmanager
async def redis_proxy(url: str) -> AsyncIterator[RedisProxy]:
    """Run a proxy in front of ``url``."""
    proxy = RedisProxy(url)
    await proxy.start()
    yield proxy
    await proxy.stop()
