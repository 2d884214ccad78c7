# One connection to Redis as an asyncio protocol: replies are handed over as they arrive. redis-py makes the connection
# (address, TLS, user and password, database); what is said on it needs neither a task nor a stream, which cost ten
# times as much as the conversation (docs/experiments.md).

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, ResponseError

NOTHING = object()  # what the parser returns when no reply is whole yet


class Line(asyncio.Protocol):
    """A connection in use. An error that Redis answers is handed over as a ``ResponseError`` among the replies."""

    def __init__(
        self, connection: AbstractConnection, hear: Callable[[list[Any]], None], lose: Callable[[Exception], None]
    ) -> None:
        """Take over a connection that stands: ``hear`` is called with replies, ``lose`` once, when it ends.

        Raises redis-py's ConnectionError when it stands no longer.
        """
        self._hear, self._lose = hear, lose
        self._reader = hiredis.Reader(protocolError=InvalidResponse, replyError=ResponseError, notEnoughData=NOTHING)
        if connection._writer is None:
            raise RedisConnectionError("Redis closed the connection")
        self._transport = cast(asyncio.Transport, connection._writer.transport)
        self._before = self._transport.get_protocol()
        self._transport.set_protocol(self)
        self._is_lost = False

    def write(self, commands: list[bytes]) -> None:
        """Send packed commands; ``lose`` is called when the connection turns out to be closed."""
        try:
            self._transport.write(b"".join(commands))
        except RuntimeError as exc:  # uvloop's word for a transport that was closed under us
            self.drop(RedisConnectionError(str(exc)))

    def drop(self, exc: Exception) -> None:
        """End the connection for this reason."""
        if not self._is_lost:
            self._is_lost = True
            self._transport.abort()
            self._lose(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, and hand it over."""
        self._reader.feed(data)
        replies = []
        try:
            while (reply := self._reader.gets()) is not NOTHING:
                if not isinstance(reply, hiredis.PushNotification):
                    replies.append(reply)
        except InvalidResponse as exc:
            self.drop(RedisConnectionError(f"not a reply of Redis: {exc}"))
            return
        if replies and not self._is_lost:
            self._hear(replies)

    def connection_lost(self, exc: Exception | None) -> None:
        """Redis, the network or redis-py has closed the connection."""
        self._before.connection_lost(exc)
        self.drop(RedisConnectionError("Redis closed the connection") if exc is None else exc)
