# The epoch of Redis's books as all owners see it: read, begun, reported to and finished through epoch.lua.

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib import resources
from typing import Any

from msgspec import Struct
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from billing.edges import Clock
from billing.script import Script

EPOCH_KEY = "tollgate:epoch"
DEADLINE = 0.25  # seconds for any call to Redis

SCRIPT = resources.files(__package__).joinpath("epoch.lua").read_text()


class Epoch(Struct, frozen=True, kw_only=True):
    """What the shared hash says. Times are unix seconds by Redis's clock, but for ``read_at``."""

    id: str
    is_ready: bool  # else owners are putting back what they know
    who: str  # rebuilds it
    until: float  # the end of its turn, if it is not ready before
    since: float  # the first try to rebuild these books
    ready_at: float
    read_at: float  # by Postgres's clock: teams made later begin with nothing
    run_id: str  # of the Redis server that it was built in
    wanted: str  # why somebody asks for a new epoch; "" for nobody
    owners: Mapping[str, tuple[bool, float]]  # who puts back: whether all of it is there, and until when it keeps still


class Seen(Struct, frozen=True):
    """One look: the epoch, if there is any, and Redis's time."""

    epoch: Epoch | None
    now: float  # unix seconds


class Epochs:
    """The verbs of epoch.lua. Each raises TimeoutError after 250 ms, and RedisError or OSError when Redis fails."""

    def __init__(
        self, redis: Redis, clock: Clock, *, uses_server_time: bool = True, deadline: float = DEADLINE
    ) -> None:
        self._script = Script(redis, SCRIPT, deadline=deadline)
        self._redis = redis
        self._clock = clock
        self._uses_server_time = uses_server_time
        self._deadline = deadline

    async def look(self) -> Seen:
        """Return the present epoch."""
        now, flat = await self._say("look")
        return Seen(read_epoch(dict(zip(flat[::2], flat[1::2], strict=True))), float(now))

    async def start(self, new: str, after: str, who: str, turn: float) -> bool:
        """Begin a new epoch, if ``after`` is still the present one and nobody else's turn lasts."""
        return bool(await self._say("start", new, after, who, turn))

    async def keep(self, id: str, who: str, turn: float) -> bool:
        """Prolong our turn. False when it is over."""
        return bool(await self._say("keep", id, who, turn))

    async def begin(self, id: str, owner: str, until: float) -> bool:
        """Promise to flush nothing before ``until`` (by Redis's clock); only then may calls be put back."""
        return bool(await self._say("begin", id, owner, until))

    async def done(self, id: str, owner: str) -> bool:
        """Report that everything is put back."""
        return bool(await self._say("done", id, owner))

    async def finish(self, id: str, who: str, read_at: float, run_id: str) -> bool:
        """Let the epoch count. False when a promise ended before, so that the cut may not be exact."""
        return bool(await self._say("finish", id, who, read_at, run_id))

    async def want(self, id: str, why: str) -> bool:
        """Ask for a new epoch. False when ``id`` is not the present one."""
        return bool(await self._say("want", id, why))

    async def run_id(self) -> str:
        """Return the name of the running Redis server, another after each start; "" where it is not told."""
        try:
            async with asyncio.timeout(self._deadline):
                return str((await self._redis.info("server")).get("run_id", ""))
        except ResponseError:
            return ""

    async def close(self) -> None:
        """Give the connection back."""
        await self._script.close()

    async def _say(self, verb: str, *args: Any) -> Any:
        time = "" if self._uses_server_time else repr(self._clock.now())
        return await self._script.call(EPOCH_KEY, verb, time, *args)


def read_epoch(fields: Mapping[Any, Any]) -> Epoch | None:
    """Return the epoch that the hash describes."""
    known: dict[str, str] = {name.decode(): value.decode() for name, value in fields.items()}
    if "id" not in known:
        return None
    owners = {}
    for name, value in known.items():
        if name.startswith("owner:"):
            how, until = value.split(" ")
            owners[name.removeprefix("owner:")] = (how == "PUT", float(until))
    return Epoch(
        id=known["id"],
        is_ready=known.get("state") == "ready",
        who=known.get("who", ""),
        until=float(known.get("until", 0)),
        since=float(known.get("since", 0)),
        ready_at=float(known.get("ready_at", 0)),
        read_at=float(known.get("read_at", 0)),
        run_id=known.get("run_id", ""),
        wanted=known.get("wanted", ""),
        owners=owners,
    )
