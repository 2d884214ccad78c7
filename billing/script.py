# One Lua script in Redis, called by many at once: calls that come while others are on their way share the next trip.

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from billing.redis_line import Line

MOST = 128  # calls in one trip
LATE = 1.2  # deadlines; a timer that rings later than this tells of a busy process, not of a silent Redis


class _Call:
    __slots__ = ("answer", "command", "trips")

    def __init__(self, command: bytes, answer: asyncio.Future[Any]) -> None:
        self.command, self.answer = command, answer
        self.trips = 0

    def end(self, reply: Any) -> None:
        if self.answer.done():  # nobody waits any more
            return
        if isinstance(reply, Exception):
            self.answer.set_exception(reply)
        else:
            self.answer.set_result(reply)


class Script:
    """A script and the one connection that its calls share. Concurrency costs neither connections nor trips."""

    def __init__(self, redis: Redis, text: str, *, deadline: float) -> None:
        self.redis = redis
        self._text = text
        self._sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self._deadline = deadline
        self._connection: AbstractConnection | None = None
        self._line: Line | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._waiting: list[_Call] = []
        self._trip: list[_Call] = []  # on their way
        self._replies: list[Any] = []  # theirs so far, after that of loading the script
        self._is_loading = False  # the trip is made again, after the script
        self._departed = 0.0
        self._watch: asyncio.TimerHandle | None = None

    async def call(self, keys: str | Sequence[str], *args: Any) -> Any:
        """Run the script on its key or keys and return its answer.

        Raises TimeoutError after the deadline, whatever Redis and the network do, and RedisError or OSError when they
        fail. After any of these it is not known whether the script ran.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        listed = (keys,) if isinstance(keys, str) else keys
        self._waiting.append(_Call(_pack("EVALSHA", self._sha, len(listed), *listed, *args), answer))
        if not self._trip:
            self._depart()
        timer = loop.call_later(self._deadline, _ring, answer, self._deadline, loop.time())
        try:
            return await answer
        finally:
            timer.cancel()
            answer.cancel()

    def reconnect(self) -> None:
        """Go by a new connection from now on: the server behind this one serves no more, such as a demoted primary."""
        if self._line is not None:
            self._line.drop(RedisConnectionError("the server cannot serve now"))

    async def close(self) -> None:
        """Give the connection back. Calls that still run fail."""
        if self._connecting is not None:
            self._connecting.cancel()
        failed, self._trip, self._waiting, self._line = [*self._trip, *self._waiting], [], [], None
        for call in failed:
            call.end(RedisConnectionError("the connection was given back"))
        if self._connection is not None:
            await self._connection.disconnect(nowait=True)
            await self.redis.connection_pool.release(self._connection)
            self._connection = None

    def _depart(self) -> None:
        """Send what waits, over a new connection if none stands."""
        self._waiting = [call for call in self._waiting if not call.answer.done()]
        if not self._waiting:
            return
        if self._line is None:
            if self._connecting is None:
                self._connecting = asyncio.create_task(self._connect())
            return
        self._trip, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
        for call in self._trip:
            call.trips += 1
        self._send()

    def _send(self, *first: bytes) -> None:
        assert self._line is not None
        self._replies, self._is_loading = [], bool(first)
        loop = asyncio.get_running_loop()
        self._departed = loop.time()
        if self._watch is None:
            self._watch = loop.call_later(2 * self._deadline, self._look)
        self._line.write([*first, *(call.command for call in self._trip)])

    def _hear(self, replies: list[Any]) -> None:
        self._replies += replies
        if len(self._replies) < len(self._trip) + self._is_loading:
            return
        replies = self._replies[self._is_loading :]
        if not self._is_loading and any(map(_is_unknown, replies)):
            # The whole trip again: twice is harmless, every verb knows its calls by id.
            self._send(_pack("SCRIPT", "LOAD", self._text))
            return
        trip, self._trip = self._trip, []
        for call, reply in zip(trip, replies, strict=True):
            call.end(reply)
        if self._waiting:
            self._depart()

    def _lose(self, exc: Exception) -> None:
        """Make the trip again over a new connection; what is lost for the second time fails."""
        self._line = None
        trip, self._trip = self._trip, []
        for call in trip:
            if call.trips > 1:
                call.end(exc)
        self._waiting[:0] = trip
        self._depart()

    def _look(self) -> None:
        """Give up a connection on which nothing came while callers waited."""
        self._watch = None
        if not self._trip or self._line is None:
            return
        loop = asyncio.get_running_loop()
        patience = self._departed + 2 * self._deadline - loop.time()
        if patience <= 0 and all(call.answer.done() for call in self._trip):
            self._line.drop(TimeoutError())
        else:
            self._watch = loop.call_later(max(patience, self._deadline / 2), self._look)

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(2 * self._deadline):
                if self._connection is None:
                    self._connection = await self.redis.connection_pool.get_connection()
                else:
                    await self._connection.disconnect(nowait=True)
                    await self._connection.connect()
            self._line = Line(self._connection, self._hear, self._lose)
        except Exception as exc:
            failed, self._waiting = self._waiting, []
            for call in failed:
                call.end(exc)
        finally:
            self._connecting = None
        if not self._trip:
            self._depart()


def _ring(answer: asyncio.Future[Any], deadline: float, began: float, *, again: bool = False) -> None:
    """End a call's wait, unless it was our own loop that stood still."""
    loop = asyncio.get_running_loop()
    if not answer.done():
        if not again and loop.time() - began > LATE * deadline:
            loop.call_later(deadline, lambda: _ring(answer, deadline, began, again=True))
        else:
            answer.set_exception(TimeoutError())


def _is_unknown(reply: Any) -> bool:
    return isinstance(reply, ResponseError) and str(reply).startswith("NOSCRIPT")


def _pack(*words: Any) -> bytes:
    packed: bytes = hiredis.pack_command(words)
    return packed
