# One Lua script in Redis, called by many at once: calls that come while others are on their way share the next trip.

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from typing import Any

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError

MOST = 128  # calls in one trip
LATE = 1.2  # deadlines; a timer that rings later than this tells of a busy process, not of a silent Redis

UNREACHABLE = (RedisError, OSError, TimeoutError)  # what a call may raise
# Errors of a Redis that cannot serve now and may later. Any other error is about the command alone.
NOT_NOW = re.compile(
    r"(^|-)(OOM|READONLY|LOADING|MISCONF|BUSY|NOSCRIPT|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOREPLICAS|NOAUTH|MOVED|ASK)\b"
)


def is_refusal(exc: BaseException) -> bool:
    """Whether Redis answered, and would answer the same again: an overflow, a key of another type, a faulty script."""
    return type(exc) is ResponseError and NOT_NOW.search(str(exc)) is None


class Script:
    """A script and the one connection that its calls share. Concurrency costs neither connections nor trips."""

    def __init__(self, redis: Redis, text: str, *, deadline: float) -> None:
        self.redis = redis
        self._connection: AbstractConnection | None = None
        self._text = text
        self._sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self._deadline = deadline
        self._waiting: list[tuple[tuple[Any, ...], asyncio.Future[Any]]] = []
        self._courier: asyncio.Task[None] | None = None

    async def call(self, key: str, *args: Any) -> Any:
        """Run the script on ``key`` and return its answer.

        Raises TimeoutError after the deadline, whatever Redis and the network do, and RedisError or OSError when they
        fail. After any of these it is not known whether the script ran.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append(((key, *args), answer))
        if self._courier is None or self._courier.done():
            self._courier = asyncio.create_task(self._carry())
        try:
            start = loop.time()
            await asyncio.wait((answer,), timeout=self._deadline)
            if not answer.done() and loop.time() - start > LATE * self._deadline:
                await asyncio.wait((answer,), timeout=self._deadline)  # it was our own loop that stood still
            if not answer.done():
                raise TimeoutError
            return answer.result()
        finally:
            answer.cancel()

    async def close(self) -> None:
        """Give the connection back."""
        if self._connection is not None:
            await self._connection.disconnect(nowait=True)
            await self.redis.connection_pool.release(self._connection)
            self._connection = None

    async def _carry(self) -> None:
        while self._waiting:
            trip, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            trip = [(args, answer) for args, answer in trip if not answer.done()]  # nobody waits for the others
            try:
                async with asyncio.timeout(2 * self._deadline):
                    replies = await self._deliver([args for args, _ in trip])
            except Exception as exc:
                replies = [exc] * len(trip)
            for (_, answer), reply in zip(trip, replies, strict=True):
                if answer.done():
                    continue
                if isinstance(reply, Exception):
                    answer.set_exception(reply)
                else:
                    answer.set_result(reply)

    async def _deliver(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        """Send calls, again over a new connection when the old one turns out to be closed, and bring the replies."""
        commands = [("EVALSHA", self._sha, 1, *args) for args in calls]
        try:
            replies = await self._send(commands)
        except (RedisConnectionError, OSError):
            replies = await self._send(commands)  # twice is harmless: every verb knows its calls by id
        if any(isinstance(reply, NoScriptError) for reply in replies):
            await self._send([("SCRIPT", "LOAD", self._text)])
            replies = await self._send(commands)
        return replies

    async def _send(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        connection = self._connection
        if connection is None:
            connection = self._connection = await self.redis.connection_pool.get_connection()
        try:
            if not connection.is_connected:
                await connection.connect()
            packed = b"".join(map(hiredis.pack_command, commands))
            await connection.send_packed_command(packed, check_health=False)
            return [await self._read(connection) for _ in commands]
        except BaseException as exc:
            await connection.disconnect(nowait=True)  # replies may still be on their way to nobody
            if isinstance(exc, RuntimeError):  # uvloop's word for a transport that was closed under us
                raise RedisConnectionError(str(exc)) from exc
            raise

    async def _read(self, connection: AbstractConnection) -> Any:
        try:
            return await connection.read_response(timeout=math.inf)  # the deadline is around the whole trip
        except ResponseError as exc:
            return exc
