# The way to Redis. Where a connection was closed under a command uvloop raises RuntimeError, which redis-py passes on
# and which does not look like a Redis that is away. Behind sentinels each new connection goes to the primary that they
# know of then; to a cluster, to the server that has the key.

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, cast

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode, ClusterPipeline
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from protocol.serving.deadlines import running_timeout
from protocol.serving.redis_url import Servers, read_servers


def open_redis(url: str, *, timeout: float) -> Redis:
    """Return a client that gives Redis ``timeout`` seconds for each answer and each connection.

    What goes wrong between it and Redis is a RedisError, an OSError or a TimeoutError, on any event loop. ``url`` may
    name sentinels or a cluster (redis_url.py), whose client takes the same commands, each with keys of one slot; raises
    ValueError for one that names neither them nor a Redis.
    """
    patience: dict[str, Any] = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    told = read_servers(url)
    if told is not None and told.service is None:
        return cast(Redis, _cluster(told, patience))
    redis: Redis = Redis.from_url(url, **patience) if told is None else _behind(told, told.service or "", patience)
    pool = redis.connection_pool
    pool.connection_class = _kind_of(pool.connection_class)
    return redis


async def read_each(redis: Redis, keys: Iterable[str]) -> list[Any]:
    """Return what stands at keys, which may lie on several servers of a cluster. Raises what Redis does."""
    reading = redis.pipeline(transaction=False)
    for key in keys:
        reading.get(key)
    return await reading.execute()


def _kind_of(connection: type[Any]) -> type[Any]:
    return type("Connection", (_Connection, connection), {})


class _Connection:
    """A connection that may be closed under a command, and is given up after seconds in which this process ran."""

    socket_timeout: float
    socket_connect_timeout: float | None

    async def _connect(self) -> None:
        patience, self.socket_connect_timeout = self.socket_timeout, None  # the two are one
        async with running_timeout(patience):
            await super()._connect()  # type: ignore[misc]

    async def read_response(self, disable_decoding: bool = False, timeout: float | None = None, **told: Any) -> Any:
        if timeout is not None:  # who listens says how long
            return await super().read_response(disable_decoding, timeout, **told)  # type: ignore[misc]
        try:
            async with running_timeout(self.socket_timeout):
                return await super().read_response(disable_decoding, math.inf, **told)  # type: ignore[misc]
        except TimeoutError as exc:
            raise RedisTimeoutError(f"Redis gave no answer within {self.socket_timeout:g} s.") from exc

    async def send_packed_command(self, *command: Any, **options: Any) -> None:
        try:
            await super().send_packed_command(*command, **options)  # type: ignore[misc]
        except RuntimeError as exc:
            raise RedisConnectionError(str(exc)) from exc


def _options(told: Servers, patience: dict[str, Any]) -> dict[str, Any]:
    """Return all that a URL says but where."""
    options: dict[str, Any] = {**parse_url(told.url), **patience}
    del options["host"]
    options.pop("port", None)
    if options.pop("connection_class", None) is not None:
        options["ssl"] = True
    return options


def _cluster(told: Servers, patience: dict[str, Any]) -> _Cluster:
    nodes = [ClusterNode(host, port) for host, port in told.addresses]
    redis = _Cluster(
        startup_nodes=nodes,
        require_full_coverage=False,
        dynamic_startup_nodes=False,
        retry=Retry(NoBackoff(), 1),
        **_options(told, patience),
    )
    kind = _kind_of(redis.connection_kwargs["connection_class"])
    redis.connection_kwargs["connection_class"] = kind
    for node in redis.startup_nodes:
        node.connection_class = kind
    return redis


class _Cluster(RedisCluster):
    """A cluster that is away is told as one Redis is: redis-py has another family of errors for it."""

    async def initialize(self, *args: Any, **told: Any) -> RedisCluster:
        try:
            return await super().initialize(*args, **told)
        except RedisClusterException as exc:
            raise RedisConnectionError(str(exc)) from exc

    async def execute_command(self, *args: Any, **told: Any) -> Any:
        try:
            return await super().execute_command(*args, **told)
        except RedisClusterException as exc:
            raise RedisConnectionError(str(exc)) from exc

    def pipeline(self, transaction: Any = True, shard_hint: Any = None) -> ClusterPipeline:
        return _Pipeline(self, transaction)  # type: ignore[abstract]  # redis-py sets what it declares


class _Pipeline(ClusterPipeline):
    """Commands to several servers. Where one fails them, the next command asks who has its slots now."""

    async def execute(self, *args: Any, **told: Any) -> list[Any]:
        try:
            return await super().execute(*args, **told)
        except (RedisClusterException, RedisError, OSError, TimeoutError) as exc:
            self.cluster_client._initialize = True
            if isinstance(exc, RedisClusterException):
                raise RedisConnectionError(str(exc)) from exc
            raise


def _behind(told: Servers, service: str, patience: dict[str, Any]) -> Redis:
    options = _options(told, patience)
    theirs = {name: value for name, value in options.items() if name.startswith(("ssl", "socket_"))}
    for name in ("username", "password"):
        theirs[name] = options.pop(f"sentinel_{name}", None)
    theirs["retry"] = Retry(NoBackoff(), 0)  # another one is asked instead
    sentinels = _Sentinels(told.addresses, sentinel_kwargs=theirs, **options)
    return sentinels.master_for(service, connection_pool_class=_Pool)


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
