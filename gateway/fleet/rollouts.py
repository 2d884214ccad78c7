# What a rollout of a pool is at, as its controller leaves it in Redis for all gateways: which share of conversations
# its new version answers, and why it was rolled back. And how the two versions compare, as gateways leave it for the
# controller: told by the ledger, where the calls of all gateways are.

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ledger.version_calls import read_calls
from gateway.fleet.comparing import Slice, slices_of
from gateway.fleet.membership import Member
from protocol.serving.redis_client import read_each

WINDOW = 600.0  # seconds of calls that are compared
COMPARED_LASTS = 120  # seconds for which a comparison is believed

STANDING: Literal["standing"] = "standing"  # at the share of conversations that it begins with
REPLACING: Literal["replacing"] = "replacing"
ROLLED_BACK: Literal["rolled_back"] = "rolled_back"
STUCK = "stuck"  # whichever of the first two it is at

T = TypeVar("T")


class Rolling(Struct, frozen=True, kw_only=True):
    """A pool's rollout. Times are unix seconds."""

    state: Literal["standing", "replacing", "rolled_back"]
    revision: str  # the new one
    kept: str  # the one before
    share: float  # of conversations that the new one answers, as long as it is there
    since: float
    due_at: float | None  # when the next replica is replaced at the latest, unless it is stuck; None: nothing is due
    reason: str | None = None  # why it was rolled back

    def state_at(self, now: float) -> str:
        """Return what it is at, by a moment."""
        return STUCK if self.due_at is not None and now > self.due_at else self.state

    def why(self, now: float) -> str:
        """Say in words what it is at."""
        if self.state_at(now) == STUCK:
            return f"{self.state}, and nothing has moved for longer than a replacement takes"
        return {STANDING: "stands at its share", REPLACING: "replaces replicas"}.get(self.state, self.reason or "")


class Compared(Struct, frozen=True, kw_only=True):
    """How the calls of a rollout's two versions went, in slices of time in which both were asked."""

    revision: str
    since: float  # of the rollout
    addresses: tuple[str, ...] = ()  # where the new one was found since
    slices: tuple[Slice, ...] = ()


def read_name(name: str) -> tuple[str, str] | None:
    """Return pool and revision of a replica that a controller started; ``None``: it is none."""
    pool, *rest = name.rsplit(".", 2)
    return (pool, rest[0]) if pool and [len(each) for each in rest] == [12, 8] else None


def announced_revision(member: Member) -> str | None:
    """Return the revision of a replica that announces itself; ``None``: no controller started it."""
    meant = read_name(member.said.instance_id.rpartition("-")[0])
    return None if meant is None or meant[0] != member.said.pool else meant[1]


def rollout_key(pool: str) -> str:
    """Return where a controller says what a pool's rollout is at."""
    return f"tollgate:fleet-rollout:{{{pool}}}"


def compared_key(pool: str) -> str:
    """Return where gateways say how the versions of a pool's rollout compare."""
    return f"tollgate:fleet-compared:{{{pool}}}"


async def read_rollouts(redis: Redis, pools: Collection[str]) -> dict[str, Rolling]:
    """Return the rollouts of those pools that have one. Raises what ``REDIS_AWAY`` has."""
    return rollouts_in(pools, await read_each(redis, map(rollout_key, pools)))


def rollouts_in(pools: Collection[str], values: Iterable[Any]) -> dict[str, Rolling]:
    """Return what stood in Redis of each pool's rollout, as far as it can be read."""
    found = {pool: _decoded(value, Rolling) for pool, value in zip(pools, values, strict=True)}
    return {pool: each for pool, each in found.items() if each is not None}


async def read_compared(redis: Redis, pools: Collection[str]) -> dict[str, Compared]:
    """Return how the versions of each pool's rollout compare, where that is known. Raises what ``REDIS_AWAY`` has."""
    values = await read_each(redis, map(compared_key, pools))
    found = {pool: _decoded(value, Compared) for pool, value in zip(pools, values, strict=True)}
    return {pool: each for pool, each in found.items() if each is not None}


async def compare_versions(
    redis: Redis, connection: AsyncConnection, pools: Mapping[str, str], members: Iterable[Member], now: float
) -> None:
    """Compare the versions of every rollout that goes on, and leave it to the controller. ``pools``: their regions.
    Raises what ``REDIS_AWAY`` and ``POSTGRES_AWAY`` have."""
    rollouts = {pool: each for pool, each in (await read_rollouts(redis, pools)).items() if each.reason is None}
    known = await read_compared(redis, rollouts)
    members = list(members)
    for pool, rollout in rollouts.items():
        last = known.get(pool)
        is_same = last is not None and (last.revision, last.since) == (rollout.revision, rollout.since)
        found = set(last.addresses if last is not None and is_same else ())
        new = [one.said for one in members if announced_revision(one) == rollout.revision]
        found |= {said.base_url for said in new if said.pool == pool}
        if not found:
            continue
        places = [f"{pool}/{pools[pool]}/{address}/" for address in sorted(found)]
        cells = await read_calls(connection, pool, places, max(rollout.since, now - WINDOW))
        said = Compared(
            revision=rollout.revision, since=rollout.since, addresses=tuple(sorted(found)), slices=slices_of(cells)
        )
        await redis.set(compared_key(pool), msgspec.json.encode(said), ex=COMPARED_LASTS)


def _decoded(value: bytes | str | None, kind: type[T]) -> T | None:
    try:
        return None if value is None else msgspec.json.decode(value, type=kind)
    except msgspec.MsgspecError:  # another release's
        return None
