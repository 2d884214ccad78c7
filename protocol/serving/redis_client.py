# The way to Redis. Where a connection was closed under a command uvloop raises RuntimeError, which redis-py passes on
# and which does not look like a Redis that is away. Behind sentinels each new connection goes to the primary that they
# know of then.

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from protocol.serving.redis_url import Sentinels, read_sentinels


def open_redis(url: str, *, timeout: float) -> Redis:
    """Return a client that gives Redis ``timeout`` seconds for each answer and each connection.

    What goes wrong between it and Redis is a RedisError, an OSError or a TimeoutError, on any event loop. ``url`` may
    name sentinels (redis_url.py); raises ValueError for one that names neither them nor a Redis.
    """
    patience: dict[str, Any] = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    told = read_sentinels(url)
    redis: Redis = Redis.from_url(url, **patience) if told is None else _behind(told, patience)
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


def _behind(told: Sentinels, patience: dict[str, Any]) -> Redis:
    options: dict[str, Any] = {**parse_url(told.url), **patience}
    del options["host"]
    options.pop("port", None)
    if options.pop("connection_class", None) is not None:
        options["ssl"] = True
    theirs = {name: value for name, value in options.items() if name.startswith(("ssl", "socket_"))}
    for name in ("username", "password"):
        theirs[name] = options.pop(f"sentinel_{name}", None)
    theirs["retry"] = Retry(NoBackoff(), 0)  # another one is asked instead
    sentinels = _Sentinels(told.addresses, sentinel_kwargs=theirs, **options)
    return sentinels.master_for(told.service, connection_pool_class=_Pool)


class _Sentinels(Sentinel):
    """All sentinels at once, and the first that knows a living primary decides.

    redis-py asks one after the other: a machine that took its sentinel along would hold up each look for longer than a
    call waits. And it leaves a primary alone that is called down, as sentinels do for a moment with one that was just
    promoted, while processes that have a connection to it go on counting there.
    """

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        asking = [asyncio.create_task(self._ask(one, service_name)) for one in self.sentinels]
        called_down = None
        try:
            for answer in asyncio.as_completed(asking):
                with suppress(RedisError, OSError, TimeoutError, RuntimeError):
                    address, is_up = await answer
                    if is_up:
                        return address
                    called_down = address
            if called_down is not None:
                return called_down
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        raise MasterNotFoundError(f"no sentinel that answers knows a primary of {service_name!r}")

    async def _ask(self, sentinel: Redis, service_name: str) -> tuple[tuple[str, int], bool]:
        known: Any = await sentinel.sentinel_masters()
        state = known.get(service_name)
        if not state or not state["is_master"]:
            raise MasterNotFoundError(service_name)
        return (state["ip"], state["port"]), self.check_master_state(state, service_name)


class _Pool(SentinelConnectionPool):
    """Connections to the primary; those to the sentinels end with them."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:
            await self.sentinel_manager.aclose()
