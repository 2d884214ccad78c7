# An engine's slots as a gateway counts them, from a real front's /load: known at once, none when it drains, not counted
# when nobody answers.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from gateway.core.background import Background
from gateway.core.settings import ProviderSettings, QueueSettings, Timeouts
from gateway.fleet.engines import IDLE_EVERY, EngineWatch
from gateway.fleet.kv_events import KvEvents
from gateway.fleet.told_abilities import ToldAbilities
from gateway.inference.limiter import TargetLimiter
from gateway.telemetry.metrics import Metrics
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.resilience.breaker import State
from gateway.upstreams.resilience.breakers import Breakers
from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamError
from router.catalog.targets import Endpoint, Target
from tests.support.clock import SetClock
from tests.support.fake_engine import FakeEngine
from tests.support.front import running_front, write_small_files
from tests.support.house import model
from tests.support.raw_upstream import serving


@pytest.fixture
async def client() -> AsyncIterator[UpstreamClient]:
    """The way to upstreams."""
    client = UpstreamClient()
    yield client
    await client.close()


async def test_an_engine_says_itself_how_many_calls_it_takes(client: UpstreamClient, tmp_path: Path) -> None:
    """One engine under two names of the catalogue has one count of slots."""
    clock = SetClock()
    with running_front(write_small_files(tmp_path / "tiny"), FakeEngine(), "secret") as url:
        endpoint = Endpoint("local", url + "/v1")
        own = ProviderSettings(
            name="own",
            format="openai",
            api_keys=("secret",),
            self_hosted=True,
            endpoints=(endpoint,),
            timeouts=Timeouts(connect=0.5),
        )
        registry = ProviderRegistry({"own": own})
        targets = [Target(model(name, "own"), endpoint) for name in ("one", "other")]
        limiter = TargetLimiter(registry, targets, cast(Any, None), QueueSettings(), clock, Metrics())
        edition: Any = SimpleNamespace(providers=registry, settings=SimpleNamespace(providers={"own": own}, fleet=None))
        watch = watch_of(edition, limiter, breakers_of(registry, targets, clock), client, clock)
        [room] = limiter.slot_pools()
        before = room.limit
        await watch.look_once()
        looked, capacity = room.limit, room.capacity
        await client_drain(client, url)
        await watch.look_once()
        too_soon = room.limit
        clock.move(IDLE_EVERY)
        await watch.look_once()
        drained = room.limit
    clock.move(IDLE_EVERY)
    await watch.look_once()

    assert before is None
    assert looked is not None and looked == too_soon >= 1 and 1 <= capacity <= looked
    assert drained == 0
    assert room.limit is None


@pytest.mark.parametrize(("settings", "takes"), [({}, False), ({"kv_transfer_address": "127.0.0.1:0"}, True)])
async def test_no_prompt_is_computed_elsewhere_for_an_engine_that_takes_none(
    client: UpstreamClient, tmp_path: Path, settings: dict[str, str], takes: bool
) -> None:
    """One without an address for blocks, as without prefix caching, would compute it again; and so do adapters."""
    call = cast(Any, SimpleNamespace(request=None, cached_as="a"))
    with running_front(write_small_files(tmp_path / "tiny"), FakeEngine(), **settings) as url:
        endpoint = Endpoint("local", url + "/v1")
        own = ProviderSettings(name="own", format="openai", self_hosted=True, endpoints=(endpoint,))
        registry, target = ProviderRegistry({"own": own}), Target(model("tiny", "own"), endpoint)
        limiter = TargetLimiter(registry, [target], cast(Any, None), QueueSettings(), SetClock(), Metrics())
        edition: Any = SimpleNamespace(providers=registry, settings=SimpleNamespace(providers={"own": own}, fleet=None))
        unknown = limiter.prompt_at(call, target)
        breakers = breakers_of(registry, [target], SetClock())
        await watch_of(edition, limiter, breakers, client, SetClock()).look_once()
        [room] = limiter.slot_pools()
        looked = limiter.prompt_at(call, target)
        room.adapters = frozenset({target.model.upstream_model})

    assert unknown == (0, 0) and looked == (unknown if takes else None)
    assert limiter.prompt_at(call, target) is None


async def test_an_engine_that_was_started_again_is_tried_at_once(client: UpstreamClient, tmp_path: Path) -> None:
    """Its breaker stays open for one that is only heard again, and lets probes through to a new process."""
    clock, files = SetClock(), write_small_files(tmp_path / "tiny")
    with running_front(files, FakeEngine()) as url:
        endpoint = Endpoint("local", url + "/v1")
        own = ProviderSettings(name="own", format="openai", self_hosted=True, endpoints=(endpoint,))
        registry, target = ProviderRegistry({"own": own}), Target(model("tiny", "own"), endpoint)
        limiter = TargetLimiter(registry, [target], cast(Any, None), QueueSettings(), clock, Metrics())
        edition: Any = SimpleNamespace(providers=registry, settings=SimpleNamespace(providers={"own": own}, fleet=None))
        breakers = breakers_of(registry, [target], clock)
        watch = watch_of(edition, limiter, breakers, client, clock)
        await watch.look_once()
        for _ in range(own.breaker.min_requests):
            breakers.failed(await breakers.enter(target), UpstreamError("", outcome="connect"), "a", 10)
        await watch.look_once()
        same = breakers.states()
    await watch.look_once()
    with running_front(files, FakeEngine(), port=int(url.rpartition(":")[2])):
        await watch.look_once()

        assert [state for _, state in same] == [State.OPEN]
        assert [state for _, state in breakers.states()] == [State.HALF_OPEN]


async def test_an_engine_that_takes_calls_again_is_tried_at_once(client: UpstreamClient) -> None:
    """The same process, too, whose model was loaded anew: calls that failed meanwhile say nothing of it now."""
    statuses = ["active", "active", "starting", "active", "active"]

    async def play(writer: asyncio.StreamWriter) -> None:
        said = b'{"instance_id": "i", "model_id": "m", "status": "%b"}' % statuses.pop(0).encode()
        head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(said) + said)

    async with serving(play) as url:
        endpoint, clock = Endpoint("local", url + "/v1"), SetClock()
        own = ProviderSettings(name="own", format="openai", self_hosted=True, endpoints=(endpoint,))
        registry, target = ProviderRegistry({"own": own}), Target(model("tiny", "own"), endpoint)
        limiter = TargetLimiter(registry, [target], cast(Any, None), QueueSettings(), clock, Metrics())
        edition: Any = SimpleNamespace(providers=registry, settings=SimpleNamespace(providers={"own": own}, fleet=None))
        breakers = breakers_of(registry, [target], clock)
        watch = watch_of(edition, limiter, breakers, client, clock)
        await watch.look_once()
        for _ in range(own.breaker.min_requests):
            breakers.failed(await breakers.enter(target), UpstreamError("", outcome="connect"), "a", 10)
        seen = []
        for _ in range(3):
            await watch.look_once()
            seen.append(breakers.states()[0][1])
        breakers.failed(await breakers.enter(target), UpstreamError("", outcome="connect"), "a", 10)
        await watch.look_once()
        seen.append(breakers.states()[0][1])  # of one that fails while it says that it is well, as ever

    assert seen == [State.OPEN, State.OPEN, State.HALF_OPEN, State.OPEN]


@pytest.mark.parametrize(("said", "news"), [(b'{"x": ' + b"[" * 60_000, 1), (b'{"server_load": 0}', 1), (b"", 0)])
async def test_what_an_engine_says_ends_no_look(client: UpstreamClient, said: bytes, news: int) -> None:
    """Nor the start of a gateway, which looks once: what nests is no report. One that hangs up may be ours,
    and is asked again at the next look."""
    asked = []

    async def play(writer: asyncio.StreamWriter) -> None:
        asked.append(writer)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(said) + said if said else b"")

    async with serving(play) as url:
        endpoint = Endpoint("local", url + "/v1")
        own = ProviderSettings(name="own", format="openai", self_hosted=True, endpoints=(endpoint,))
        registry, target = ProviderRegistry({"own": own}), Target(model("tiny", "own"), endpoint)
        limiter = TargetLimiter(registry, [target], cast(Any, None), QueueSettings(), SetClock(), Metrics())
        edition: Any = SimpleNamespace(providers=registry, settings=SimpleNamespace(providers={"own": own}, fleet=None))
        breakers, renewed = breakers_of(registry, [target], SetClock()), list[None]()
        watch = EngineWatch(
            edition,
            limiter,
            breakers,
            client,
            SetClock(),
            KvEvents(),
            ToldAbilities(),
            lambda: renewed.append(None),
        )
        await watch.look_once()
        await watch.look_once()

    assert (len(renewed), len(asked)) == (news, 2 - news)


def watch_of(
    edition: Any, limiter: TargetLimiter, breakers: Breakers, client: UpstreamClient, clock: SetClock
) -> EngineWatch:
    return EngineWatch(edition, limiter, breakers, client, clock, KvEvents(), ToldAbilities(), lambda: None)


def breakers_of(registry: ProviderRegistry, targets: list[Target], clock: SetClock) -> Breakers:
    return Breakers(registry, targets, clock, Background(), Redis(port=1))


async def client_drain(client: UpstreamClient, url: str) -> None:
    """Have the engine take no more."""
    request = UpstreamRequest("POST", url + "/drain", {"authorization": "Bearer secret"}, b"")
    answer = await client.send(request, 1.0, 5.0)
    answer.close()
