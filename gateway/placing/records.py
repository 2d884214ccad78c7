# What controllers leave to each other in Redis: who of them acts, and what each pool ran when it last proved itself,
# which a rollout goes back to. That is a command line to be started, so it counts if the fleet's secret signed it.

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping
from hashlib import sha256
from importlib import resources
from typing import Any

import msgspec
from msgspec import Struct
from redis.asyncio import Redis

from gateway.core.settings import EngineSpec
from protocol.serving.redis_client import read_each

LEASE = "tollgate:fleet-controller"
LASTS = 5.0  # seconds for which a controller that is gone holds up the next one
PURPOSE = b"tollgate engine of a pool 1\n"  # the secret signs nothing else in this form

SCRIPT = resources.files(__package__).joinpath("lease.lua").read_text()


class ProvedEngine(Struct, frozen=True):
    """What a pool's replicas are, once it proved itself."""

    pool: str
    engine: EngineSpec


class Lease:
    """The right to start and stop replicas. Every method raises what ``REDIS_AWAY`` has."""

    def __init__(self, redis: Redis, owner: str) -> None:
        self.owner = owner
        self._script = redis.register_script(SCRIPT)

    async def take(self) -> str:
        """Take it where it is free, or prolong it; return who has it."""
        return await self._held(round(LASTS * 1000))

    async def release(self) -> None:
        """Leave it to another controller, if it is ours."""
        await self._held(1)

    async def _held(self, milliseconds: int) -> str:
        owner: Any = await self._script(keys=[LEASE], args=[self.owner, milliseconds])
        return owner.decode(errors="replace") if isinstance(owner, bytes) else str(owner)


async def keep_proved(redis: Redis, pool: str, engine: EngineSpec, secret: str) -> None:
    """Remember what to go back to. Raises what ``REDIS_AWAY`` has."""
    payload = msgspec.json.encode(ProvedEngine(pool, engine))
    await redis.set(_key(pool), _mac(payload, secret).encode() + b" " + payload)


async def read_proved(redis: Redis, pools: Collection[str], secrets: Collection[str]) -> Mapping[str, EngineSpec]:
    """Return what each pool goes back to, where that is known. Raises what ``REDIS_AWAY`` has."""
    found: dict[str, EngineSpec] = {}
    for pool, value in zip(pools, await read_each(redis, map(_key, pools)), strict=True):
        mac, _, payload = (value or b"").partition(b" ")
        if any(hmac.compare_digest(mac, _mac(payload, secret).encode()) for secret in secrets):
            said = msgspec.json.decode(payload, type=ProvedEngine)
            if said.pool == pool:
                found[pool] = said.engine
    return found


def _key(pool: str) -> str:
    return f"tollgate:fleet-proved:{{{pool}}}"


def _mac(payload: bytes, secret: str) -> str:
    return hmac.new(secret.encode(), PURPOSE + payload, sha256).hexdigest()
