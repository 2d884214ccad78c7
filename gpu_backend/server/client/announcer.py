# Announces an engine to the gateways of its pool: a signed heartbeat in Redis, five times a second as long as the
# event loop turns. An engine serves whether or not Redis answers; gateways that know it go on asking it.

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from urllib.parse import urlsplit

from redis.exceptions import RedisError

from protocol.serving.announcements import (
    DRAINING,
    EVERY,
    FAILED,
    KEY_LASTS,
    STARTING,
    Announcement,
    fitting,
    pool_key,
    signed,
)
from protocol.serving.redis_client import open_redis
from protocol.serving.redis_url import read_servers

log = logging.getLogger("gpu_backend")

LEAST_SECRET = 20  # characters of a secret that other machines may try
PATIENCE = 0.5  # seconds for Redis to answer
LEAVES_AFTER = 1.0  # seconds for which a draining engine still takes calls: gateways have heard of it by then
AWAY = (RedisError, OSError, TimeoutError, RuntimeError)  # uvloop raises RuntimeError for a connection that was closed


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """To which gateways the engine announces itself. Raises ``ValueError`` for what cannot work."""

    pool: str  # the name of a provider of theirs
    redis_url: str = field(repr=False)
    secret: str = field(repr=False)  # that announcements are signed with; sent nowhere
    address: str | None = None  # base URL by which gateways reach this engine; None: as it listens

    def __post_init__(self) -> None:
        if not self.redis_url:
            raise ValueError("fleet_pool needs TOLLGATE_FLEET_REDIS (or --fleet-redis): the Redis of the gateways")
        try:
            read_servers(self.redis_url)
        except ValueError as exc:
            raise ValueError(f"TOLLGATE_FLEET_REDIS (or --fleet-redis): {exc}") from None
        if len(self.secret) < LEAST_SECRET:
            raise ValueError(
                "fleet_pool needs TOLLGATE_FLEET_SECRET, one of the gateways' fleet.secrets, of at least "
                f"{LEAST_SECRET} characters; make one with `openssl rand -hex 32`"
            )
        if self.address is not None and not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?/v1", self.address):
            raise ValueError(f"fleet_address is {self.address!r}; it is of the form http://HOST:PORT/v1")


class Announcer:
    """Announces one start of an engine, between ``open`` and ``close``.

    ``describe(number, now, state)``: what the engine says of itself now; ``state``: in place of its own. ``warm_up``:
    returns when it may be called; until then it is starting, and failed where that raises.
    """

    def __init__(
        self,
        fleet: FleetSettings,
        describe: Callable[[int, float, str | None], Announcement],
        warm_up: Callable[[], Awaitable[object]],
    ) -> None:
        self._fleet = fleet
        self._describe = describe
        self._warm_up = warm_up
        self._state: str | None = STARTING  # in place of the engine's own
        self._redis = open_redis(fleet.redis_url, timeout=PATIENCE)
        self._number = 0
        self._is_leaving = False
        self._is_away = False
        self._left_out = 0  # adapters
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Begin. It waits for no answer."""
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._warm())]

    async def follow(
        self, describe: Callable[[str, int, float, str | None], Announcement], warm_up: Callable[[], Awaitable[object]]
    ) -> None:
        """Announce at the same address what the engine is now, and what it was no more."""
        before = self._describe(0, time.time(), None)
        self._state, self._warm_up, self._describe = STARTING, warm_up, partial(describe, before.base_url)
        with suppress(*AWAY):
            await self._redis.hdel(pool_key(before.pool), before.instance_id)
        await self._warm()

    async def leave(self) -> None:
        """Say that no more calls should come, and wait until gateways send none."""
        self._is_leaving = True
        await self._announce()
        if not self._is_away:
            await asyncio.sleep(LEAVES_AFTER)

    async def close(self) -> None:
        """End, and take the announcement back."""
        while running := [task for task in self._tasks if not task.done()]:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=0.5)  # the client may swallow a cancellation (Python 3.11)
        said = self._describe(self._number, time.time(), None)
        with suppress(*AWAY):
            await self._redis.hdel(pool_key(said.pool), said.instance_id)
        with suppress(*AWAY):
            await self._redis.aclose()

    async def _run(self) -> None:
        while True:
            await self._announce()
            await asyncio.sleep(EVERY)

    async def _warm(self) -> None:
        warm_up, state = self._warm_up, None
        try:
            await warm_up()
        except Exception:
            log.exception("a prompt to warm up with had no answer: this engine takes no calls")
            state = FAILED
        if self._warm_up is warm_up:  # else it says nothing of what the engine is now
            self._state = state

    async def _announce(self) -> None:
        self._number += 1
        said = fitting(self._describe(self._number, time.time(), DRAINING if self._is_leaving else self._state))
        if said.adapters_left_out != self._left_out:
            self._left_out = said.adapters_left_out
            words = "an announcement has no room for the names of %d adapters: gateways ask this engine for them unseen"
            log.warning(words, self._left_out)
        key = pool_key(said.pool)
        writing = self._redis.pipeline(transaction=False)
        writing.hset(key, said.instance_id, signed(said, self._fleet.secret))
        writing.pexpire(key, KEY_LASTS)
        try:
            await writing.execute()
        except AWAY as exc:
            if not self._is_away:
                log.warning("cannot announce this engine to pool %s: %s; trying again", said.pool, exc)
            self._is_away = True
        else:
            if self._is_away or self._number == 1:
                log.info("announced to pool %s as %s", said.pool, said.base_url)
            self._is_away = False


def base_url_of(fleet: FleetSettings, host: str, port: int, own_address: Callable[[str], str] | None = None) -> str:
    """Return where gateways reach this engine: as told, else where it listens; where that is everywhere, at this
    machine's address on the way to Redis. Raises ``OSError`` if there is no such way, ``ValueError`` for an engine that
    is reached from this machine alone and a Redis on another: its gateways would call themselves."""
    if fleet.address:
        return fleet.address
    is_everywhere, is_here = host in ("0.0.0.0", "::"), ip_address(host).is_loopback
    if is_everywhere or is_here:
        own = (own_address or _own_address)(fleet.redis_url)
        if is_here and not ip_address(own).is_loopback:
            raise ValueError(
                f"the Redis of the fleet is on another machine, and this engine listens on {host}: "
                "say --host 0.0.0.0, or by --fleet-address how gateways reach it"
            )
        host = own if is_everywhere else host
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def _own_address(redis_url: str) -> str:
    several = read_servers(redis_url)
    parts = urlsplit(several.url if several else redis_url)
    if parts.scheme == "unix" or not parts.hostname:
        return "127.0.0.1"
    try:
        family, kind, _, _, address = socket.getaddrinfo(parts.hostname, parts.port or 6379, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(address)  # sends nothing; the system chooses our side
            return str(way.getsockname()[0])
    except OSError as exc:
        raise OSError(f"no way to the Redis of the fleet: {exc}; --fleet-address says where gateways reach us") from exc
