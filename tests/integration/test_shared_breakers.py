# Breakers of two gateways on one real Valkey: what one learns the other knows, probes are bounded over both, and
# without Redis each goes by what it sees itself.

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from gateway.core.background import Background, stop_all
from gateway.core.settings import BreakerPolicy, ProviderSettings
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.resilience.breaker import State
from gateway.upstreams.resilience.breakers import Breakers, Permit
from gateway.upstreams.resilience.keys import TargetAway
from gateway.upstreams.resilience.shared import PREFIX
from gateway.upstreams.wire.errors import UpstreamBusy, UpstreamError
from router.catalog.targets import Endpoint, Target
from tests.support.clock import SetClock
from tests.support.house import model
from tests.support.redis_proxy import RedisProxy, Way

POLICY = BreakerPolicy(window=30.0, min_requests=4, failure_ratio=0.5, open_for=5.0, probes=2)
US, EU = Endpoint("us", "http://us/v1"), Endpoint("eu", "http://eu/v1")
PROVIDER = ProviderSettings(
    name="upstream", format="openai", api_keys=("sk-one", "sk-two"), endpoints=(US, EU), breaker=POLICY
)
MODEL = model("small")
HERE, THERE = Target(MODEL, US), Target(MODEL, EU)
BROKEN = UpstreamError("", outcome="reset")


class Gateways:
    """Makes gateways' breakers; their clocks are apart from Redis's and from each other's."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.background = Background()
        self.made: list[tuple[Breakers, SetClock]] = []

    def make(self, redis: Redis | None = None, ahead: float = 0.0) -> tuple[Breakers, SetClock]:
        """Return one gateway's breakers and its clock."""
        clock = SetClock(1000.0 + ahead)
        registry = ProviderRegistry({"upstream": PROVIDER})
        breakers = Breakers(registry, [HERE, THERE], clock, self.background, redis or self.redis, deadline=5.0)
        self.made.append((breakers, clock))
        return breakers, clock


@pytest.fixture
async def gateways(redis: Redis) -> AsyncIterator[Gateways]:
    """A house for gateways."""
    gateways = Gateways(redis)
    yield gateways
    await gateways.background.drain(5.0)


async def fail(breakers: Breakers, target: Target, times: int = 1, team: str = "a", size: int = 10) -> None:
    for _ in range(times):
        breakers.failed(await breakers.enter(target), BROKEN, team, size)


def state(breakers: Breakers, clock: SetClock, target: Target) -> State:
    return breakers.watch(target).breaker.state(clock.monotonic())


async def test_all_gateways_know_within_a_second(gateways: Gateways) -> None:
    """The loops of two gateways run as they do in service; one opens, the other leaves the target alone in a second."""
    (one, _), (two, _) = gateways.make(), gateways.make(ahead=777.0)
    loops = [asyncio.create_task(each.run()) for each in (one, two)]
    await asyncio.sleep(0.2)
    await fail(one, HERE, 4)
    began = time.monotonic()
    while HERE.key not in two.health():
        assert time.monotonic() < began + 10
        await asyncio.sleep(0.01)
    took = time.monotonic() - began
    await stop_all(loops)

    assert took < 6.0  # and five more for a machine that stands still for a while
    assert THERE.key not in two.health()
    with pytest.raises(TargetAway):
        await two.enter(HERE)


async def test_failures_of_all_gateways_count_together(gateways: Gateways) -> None:
    """Two failures at each of two gateways are four: enough."""
    (one, clock), (two, _) = gateways.make(), gateways.make(ahead=-50.0)
    await fail(one, HERE, 2)
    await one.sync()
    await fail(two, HERE, 2)
    await two.sync()
    await one.sync()

    assert state(one, clock, HERE) is State.OPEN


async def test_health_elsewhere_keeps_a_target_open_to_all(gateways: Gateways) -> None:
    """One gateway's broken network is not the target's fault: the others' answers weigh as much."""
    (one, clock), (two, _) = gateways.make(), gateways.make()
    for _ in range(50):
        two.succeeded(await two.enter(HERE))
    await two.sync()
    await fail(one, HERE, 1)
    await one.sync()
    await fail(one, HERE, 20)
    await one.sync()

    assert state(one, clock, HERE) is State.CLOSED
    assert one.watch(HERE).breaker.tallies(clock.monotonic())[-1].requests == 71


async def test_probes_are_bounded_over_all_gateways(gateways: Gateways) -> None:
    """Half open at both, two probes in all; their answers close it at both."""
    (one, clock), (two, other) = gateways.make(), gateways.make(ahead=3.0)
    await fail(one, HERE, 4)
    await one.sync()
    await two.sync()
    clock.move(5.1)
    other.move(5.1)
    permits: list[Permit] = []
    refused = 0
    for breakers in (one, two, one, two, two):
        try:
            permits.append(await breakers.enter(HERE))
        except TargetAway:
            refused += 1
    one.succeeded(permits[0])
    two.succeeded(permits[1])
    await gateways.background.drain(5.0)
    for breakers in (one, two, one):
        await breakers.sync()

    assert (len(permits), refused) == (2, 3)
    assert (state(one, clock, HERE), state(two, other, HERE)) == (State.CLOSED, State.CLOSED)


async def test_a_probe_that_fails_opens_at_all(gateways: Gateways) -> None:
    """The other gateway's count of half-open time begins anew, too."""
    (one, clock), (two, other) = gateways.make(), gateways.make()
    await fail(one, HERE, 4)
    await one.sync()
    await two.sync()
    clock.move(5.1)
    other.move(5.1)
    await fail(one, HERE)
    await one.sync()
    await two.sync()

    assert (state(one, clock, HERE), state(two, other, HERE)) == (State.OPEN, State.OPEN)


async def test_forced_open_and_reset_reach_all(gateways: Gateways) -> None:
    """What a person does holds everywhere, also at a gateway whose own breaker has moved more often."""
    (one, clock), (two, other) = gateways.make(), gateways.make()
    for _ in range(3):
        two.watch(HERE).breaker.reset("again")
    await one.force_open(one.watch(HERE), "by hand")
    await two.sync()
    await one.sync()
    other.move(1000.0)
    await one.force_open(one.watch(HERE), "by hand, again")
    await two.sync()
    forced = state(one, clock, HERE), state(two, other, HERE)
    await two.reset(two.watch(HERE), "mended")
    await one.sync()

    assert forced == (State.OPEN, State.OPEN)
    assert (state(one, clock, HERE), state(two, other, HERE)) == (State.CLOSED, State.CLOSED)


async def test_a_rate_limit_sets_one_key_at_one_endpoint_aside_everywhere(gateways: Gateways) -> None:
    """The other key goes on; when both are limited the target is away for as long as the upstream said."""
    (one, _), (two, other) = gateways.make(), gateways.make()
    first = await one.enter(HERE)
    one.failed(first, UpstreamBusy("", retry_after=20.0), "a", 10)
    await one.sync()
    await two.sync()
    keys = {(await two.enter(HERE)).api_key for _ in range(4)}
    second = await two.enter(HERE)
    two.failed(second, UpstreamBusy("", retry_after=9000.0), "a", 10)
    with pytest.raises(TargetAway) as away:
        await two.enter(HERE)
    elsewhere = {(await two.enter(THERE)).api_key for _ in range(4)}
    other.move(20.1)
    back = {(await two.enter(HERE)).api_key for _ in range(4)}
    other.move(40.0)

    assert keys == {second.api_key} != {first.api_key}
    assert away.value.is_busy and 19.0 < away.value.retry_in <= 20.0
    assert elsewhere == {"sk-one", "sk-two"}
    assert back == {first.api_key}
    assert {(await two.enter(HERE)).api_key for _ in range(4)} == {"sk-one", "sk-two"}  # a minute at the most


async def test_a_refused_key_is_in_cooldown_at_all_endpoints(gateways: Gateways) -> None:
    """The provider refuses it, so no endpoint is asked with it; when all are refused one is tried all the same."""
    (one, _), (two, _) = gateways.make(), gateways.make()
    first = await one.enter(HERE)
    one.failed(first, UpstreamError("", outcome="refused_key"), "a", 10)
    await one.sync()
    await two.sync()
    keys = {(await two.enter(target)).api_key for target in (HERE, THERE) for _ in range(3)}
    second = await two.enter(HERE)
    two.failed(second, UpstreamError("", outcome="refused_key"), "a", 10)

    assert first.api_key not in keys
    assert set(two.health()) == {HERE.key, THERE.key}  # they go last
    assert (await two.enter(HERE)).api_key is not None
    assert two.count_refused_keys()["upstream", "refused_key"] == 2


async def test_a_wiped_redis_hears_it_again(gateways: Gateways, redis: Redis) -> None:
    """What is open stays open, and new gateways learn of it."""
    one, clock = gateways.make()
    await fail(one, HERE, 4)
    await one.sync()
    await redis.flushall()
    await one.sync()
    await one.sync()
    late, other = gateways.make()
    await late.sync()

    assert state(one, clock, HERE) is State.OPEN
    assert state(late, other, HERE) is State.OPEN


@pytest.mark.parametrize("report", ["", "[]", "{}", "[0]", "[0,[[9,9,{}]]]", '[0,[["x",0,{}],[0,0,{}],[0,0,{}]]]'])
async def test_what_another_version_reports_disturbs_no_gateway(gateways: Gateways, redis: Redis, report: str) -> None:
    """During an upgrade gateways of two versions share a Redis: what cannot be read is left out."""
    one, clock = gateways.make()
    two, other = gateways.make()
    name = one.watch(HERE).id
    now = (await redis.time())[0]
    await redis.hset(f"{PREFIX}:r:{name}", "stranger", json.dumps({"at": now + 60, "report": report}))  # type: ignore[misc]
    await redis.zadd(f"{PREFIX}:failing", {name: now + 60})
    await fail(one, HERE, 2)
    await one.sync()
    await fail(two, HERE, 2)
    for _ in range(2):
        await two.sync()
        await one.sync()

    assert (one.is_alone, two.is_alone) == (False, False)
    assert state(one, clock, HERE) is state(two, other, HERE) is State.OPEN


async def test_nonsense_in_redis_is_a_redis_that_is_away(gateways: Gateways, redis: Redis) -> None:
    """Each process goes by what it sees itself until somebody has put it right."""
    one, clock = gateways.make()
    await redis.hset(f"{PREFIX}:aside", "x", json.dumps({"until": 9e12, "why": {"no": "text"}}))  # type: ignore[misc]
    await one.sync()
    alone = one.is_alone
    await fail(one, HERE, 4)
    await redis.delete(f"{PREFIX}:aside")
    await one.sync()

    assert (alone, one.is_alone, state(one, clock, HERE)) == (True, False, State.OPEN)


async def test_without_redis_each_process_keeps_its_own(gateways: Gateways, redis_url: str) -> None:
    """A breaker opens, is probed within the process's own bound, closes again, and is shared when Redis is back."""
    proxy = RedisProxy(redis_url)
    await proxy.start()
    cut: Redis = Redis.from_url(proxy.url, socket_timeout=0.5)
    (one, clock), (two, other) = gateways.make(cut), gateways.make()
    await one.sync()
    proxy.turn(Way.CUT)
    await one.sync()
    alone = one.is_alone
    await fail(one, HERE, 4)
    opened = state(one, clock, HERE)
    clock.move(5.1)
    permits = [await one.enter(HERE), await one.enter(HERE)]
    with pytest.raises(TargetAway):
        await one.enter(HERE)
    for permit in permits:
        one.succeeded(permit)
    closed = state(one, clock, HERE)
    await fail(one, HERE, 4)
    proxy.turn(Way.OPEN)
    await one.sync()
    await two.sync()
    await proxy.stop()
    await cut.aclose()

    assert (alone, opened, closed) == (True, State.OPEN, State.CLOSED)
    assert state(two, other, HERE) is State.OPEN
