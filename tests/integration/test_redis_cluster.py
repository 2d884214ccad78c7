# Redis Cluster, played by real processes: all that a gateway keeps in Redis lies in one slot for each command, goes to
# the server that has it, and goes on when slots move, a server forgets, or a primary dies.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError

from billing.core.holds import HoldRequest, Leg, Limits, Scope
from billing.quotas.rates import RateLimits
from gateway.cache.kept_answers import Place
from gateway.cache.store import CacheStore
from gateway.core.clock import Clock
from gateway.core.settings import EngineSpec
from gateway.fleet.autoscaling import Autoscaler, read_states
from gateway.fleet.discovery import Discovery, told_in
from gateway.placing.records import Lease, keep_proved, read_proved
from gateway.run.processes import free_port
from protocol.serving.redis_client import open_redis
from tests.integration.test_abuse import test_gateways_add_up_what_they_block as test_abuse_is_counted  # noqa: F401
from tests.integration.test_live_events import test_what_happens_elsewhere_is_told_while_one_watches  # noqa: F401
from tests.integration.test_shared_breakers import gateways, test_probes_are_bounded_over_all_gateways  # noqa: F401
from tests.support.redis_cluster import SLOTS, Cluster, running_cluster
from tests.support.waiting import until_found

TEAMS = [f"team_{number}" for number in range(12)]
SECRET = "a secret of the fleet 0123"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of three primaries, one of which has a replica."""
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
async def redis(cluster: Cluster) -> AsyncIterator[Redis]:
    """A client of the cluster, empty, as processes open it."""
    async with open_redis(cluster.url, timeout=5.0) as redis:
        await redis.flushall()
        yield redis


def home_of(team: str) -> int:
    """Return the number of the primary that had a team's slot first."""
    slot = key_slot(f"{{{team}}}".encode())
    return next(number for number, (first, last) in enumerate(SLOTS) if first <= slot <= last)


async def admitted(rates: RateLimits, team: str) -> bool:
    """Whether a call of a team is counted, which ends at once; it waits for Redis."""
    scope = Scope("team", team, Limits(requests_per_minute=2))
    request = HoldRequest(request_id=Clock().new_id(), team_id=team, scopes=(scope,), legs=(Leg("a", 1, 0),))
    is_in = bool(rates.take(request)) or await rates.ask(request) is None
    if is_in:
        rates.settle(request, 1)
    return is_in


async def test_rates_are_counted_where_their_team_is(redis: Redis, cluster: Cluster) -> None:
    """Over processes, at any of the servers, by one that begins later, too; also by a server that has forgotten the
    script, and one to which a slot has moved."""
    limits = [RateLimits(redis, Clock(), owner=owner, deadline=10.0) for owner in "ab"]
    for each in limits:
        await each.start()
    first = await asyncio.gather(*(admitted(limits[0], team) for team in TEAMS))
    await limits[0].tell()
    async with cluster.server(1) as server:
        await server.script_flush()
    moved = next(team for team in TEAMS if home_of(team) == 2)
    await move_slot(cluster, moved, 2, 1)
    later = [await asyncio.gather(*(admitted(limits[1], team) for team in TEAMS)) for _ in range(2)]
    for each in limits:
        await each.close()

    assert {home_of(team) for team in TEAMS} == {0, 1, 2}
    assert all(first) and all(later[0]) and not any(each.is_away for each in limits)
    assert [team for team, is_in in zip(TEAMS, later[1], strict=True) if is_in] == [moved]  # its minute stayed behind
    await move_slot(cluster, moved, 1, 2)


async def move_slot(cluster: Cluster, team: str, here: int, there: int) -> None:
    """Give a team's slot to another primary; its keys are lost."""
    slot = key_slot(f"{{{team}}}".encode())
    async with cluster.server(here) as source, cluster.server(there) as target:
        whose = await target.execute_command("CLUSTER MYID")
        for key in await source.execute_command("CLUSTER GETKEYSINSLOT", slot, 1000):
            await source.delete(key)
        for server in (target, source):
            await server.execute_command("CLUSTER SETSLOT", slot, "NODE", whose)


async def test_everything_else_has_its_place(redis: Redis, tmp_path: Path) -> None:
    """Answers of the cache, heartbeats and targets of several pools, what they ran last, the controller's lease."""
    settings: Any = SimpleNamespace(settings=SimpleNamespace(fleet=None))
    discovery = Discovery(redis, Clock(), tmp_path / "fleet.json")
    autoscaler = Autoscaler(settings, discovery, cast(Any, None), redis, Clock())
    store, place, pools = CacheStore(redis, Clock()), Place("team:a", "0" * 64), ("own", "other", "third")

    async def is_kept() -> bool:
        return await store.keep(place, b"sealed", ttl=60.0, most=10_000)

    async def found() -> bytes | None:
        return await store.find(place)

    await until_found(is_kept)
    for pool in pools:
        await redis.hset(f"tollgate:fleet:{{{pool}}}", "a", pool)
        await keep_proved(redis, pool, EngineSpec(model=pool), SECRET)
    await asyncio.gather(*(autoscaler.set_target(pool, number) for number, pool in enumerate(pools)))
    lease, other = Lease(redis, "one"), Lease(redis, "other")

    assert await until_found(found) == b"sealed"
    assert [announced for announced, _ in await told_in(redis, pools)] == [{b"a": pool.encode()} for pool in pools]
    assert {pool: one.model for pool, one in (await read_proved(redis, pools, [SECRET])).items()} == {
        pool: pool for pool in pools
    }
    targets = {pool: state.manual for pool, state in (await read_states(redis, pools)).items()}
    assert targets == {"own": 0, "other": 1, "third": 2} and isinstance(redis, RedisCluster)
    assert (await lease.take(), await other.take()) == ("one", "one")


async def test_a_primary_that_dies_is_followed_by_its_replica(redis: Redis, cluster: Cluster) -> None:
    """Until then its process counts by itself; from then on by what the replica has heard."""
    mine = next(team for team in TEAMS if home_of(team) == 0)
    async with open_redis(cluster.url, timeout=0.5) as client:
        rates = RateLimits(client, Clock(), owner="c")
        await rates.start()
        telling = asyncio.create_task(rates.run())
        key = f"tollgate:{{{mine}}}:kept"
        await client.set(key, "here")
        async with cluster.server(0) as server:
            assert await server.wait(1, 10_000) == 1
        cluster.processes[0].kill()
        cluster.processes[0].wait()
        saw_away = await admitted_until(rates, mine, is_away=True)
        async with cluster.server(3) as server:
            await server.execute_command("CLUSTER FAILOVER", "TAKEOVER")  # as it does after `cluster-node-timeout`
        back = await admitted_until(rates, mine, is_away=False)
        kept = await client.get(key)
        telling.cancel()
        await rates.close()

    assert saw_away and back and kept == b"here"


async def admitted_until(rates: RateLimits, team: str, *, is_away: bool) -> bool:
    """Have calls counted until Redis is away, or back."""

    async def look() -> bool:
        await admitted(rates, team)
        return rates.is_away == is_away

    return await until_found(look)


async def test_a_cluster_that_is_not_there_is_a_redis_that_is_away() -> None:
    """redis-py has errors of another family for it."""
    redis = open_redis(f"redis+cluster://127.0.0.1:{free_port()}", timeout=1.0)
    pipeline: Any = redis.pipeline(transaction=False)
    with pytest.raises(RedisConnectionError, match="cannot be connected"):
        await redis.get("a")
    with pytest.raises(RedisConnectionError, match="cannot be connected"):
        await pipeline.get("a").execute()
    await redis.aclose()
