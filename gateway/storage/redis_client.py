# The way to Redis. Where a connection was closed under a command uvloop raises RuntimeError, which redis-py passes on
# and which does not look like a Redis that is away.

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError


def open_redis(url: str, *, timeout: float) -> Redis:
    """Return a client that gives Redis ``timeout`` seconds for each answer and each connection.

    What goes wrong between it and Redis is a RedisError, an OSError or a TimeoutError, on any event loop.
    """
    redis: Redis = Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)
    pool = redis.connection_pool
    pool.connection_class = type("Connection", (_Closable, pool.connection_class), {})
    return redis


class _Closable:
    """A connection that may be closed under a command."""

    async def send_packed_command(self, *command: Any, **options: Any) -> None:
        try:
            await super().send_packed_command(*command, **options)  # type: ignore[misc]
        except RuntimeError as exc:
            raise RedisConnectionError(str(exc)) from exc
