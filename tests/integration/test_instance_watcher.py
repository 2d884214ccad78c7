# The watcher against real fronts of the engine: whom it asks, what it keeps, and what it does when nobody answers.

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import asdict
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from billing.ledger.instance_samples import Instance, Look, last_looks
from billing.ledger.instances import idle_costs
from gateway.core.background import stop_all
from gateway.core.clock import Clock
from gateway.core.settings import ProviderSettings, Timeouts
from gateway.fleet.instances import TURN, InstanceWatcher, read_report
from gateway.http.routes.admin.instances import instance_view, listed_view, without_replaced
from gateway.run.processes import free_port
from gateway.storage.database import Database
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.registry import ProviderRegistry
from gpu_backend.step.messages import LoadReport
from protocol.serving.engine_load import EngineLoad
from router.catalog.catalog import Catalog
from router.catalog.targets import Endpoint
from tests.support.clock import SetClock
from tests.support.fake_engine import COST, FakeEngine
from tests.support.front import running_front, write_small_files
from tests.support.house import model

PRICE = 3_500_000_000
BUSY = LoadReport(3, 2, 5, 8, 0.375, 6.0, 7.0, 0.25, gpu_busy_seconds=1.5, roofline_share=0.4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a front reads of a checkpoint."""
    return write_small_files(tmp_path / "tiny")


class Scene:
    """A watcher of the given addresses, with the secret that the fronts demand."""

    def __init__(
        self, database: Database, redis: Any, client: UpstreamClient, *urls: str, clock: Clock, every: float = 0.1
    ) -> None:
        own = ProviderSettings(
            name="own",
            format="openai",
            api_keys=("secret",),
            self_hosted=True,
            endpoints=tuple(Endpoint("local", url + "/v1") for url in urls),
            timeouts=Timeouts(connect=0.5),
        )
        outside = ProviderSettings(name="other", format="openai", endpoints=(Endpoint("us", "http://127.0.0.1:1/v1"),))
        providers = {"own": own, "other": outside}
        priced = model("llama", provider="own", upstream_model="tiny", gpu_hour_nanousd=PRICE)
        unpriced = model("cheap", provider="own", upstream_model="tiny")
        catalog = Catalog(
            {"cheap": unpriced, "llama": priced}, {name: p.endpoints for name, p in providers.items()}, {}, {}, {}
        )
        edition: Any = SimpleNamespace(
            settings=SimpleNamespace(providers=providers), providers=ProviderRegistry(providers), catalog=catalog
        )
        self.catalog = catalog
        self.database = database
        self.watcher = InstanceWatcher(edition, client, database, redis, clock, every=every)

    async def hours(self) -> dict[str, int]:
        """Return the microseconds that were booked for each replica, over all days."""
        async with self.database.begin() as connection:
            lines = await idle_costs(connection, date(2026, 1, 1), date(2100, 1, 1))
        return {line.instance_id: round(line.hours * 3.6e9) for line in lines}

    async def seen(self) -> list[Instance]:
        """Return what the books know of every replica."""
        async with self.database.begin() as connection:
            return await last_looks(connection, 0.0)


@pytest.fixture
async def client() -> AsyncIterator[UpstreamClient]:
    """The way to upstreams."""
    client = UpstreamClient()
    yield client
    await client.close()


async def test_every_replica_is_seen_with_what_it_says(
    database: Database, redis: Redis, client: UpstreamClient, folder: Path
) -> None:
    """The watcher brings the provider's key, asks our own engines alone, and finds the model that has a price."""
    first, second = FakeEngine(), FakeEngine()
    clock = SetClock()
    with running_front(folder, first, "secret") as one, running_front(folder, second, "secret") as two:
        scene = Scene(database, redis, client, one, two, clock=clock)
        first.process.say(BUSY)
        looks = await until_busy(scene)

        seen = {instance.endpoint: instance for instance in await scene.seen()}
        view = instance_view(seen[f"local {one}/v1"], clock.now(), scene.catalog)

    assert len(looks) == 2 and len(seen) == 2
    assert {look.model for look in looks} == {"llama"}
    assert (view["model_id"], view["status"], view["queue_depth"], view["running"]) == ("tiny", "active", 3, 2)
    assert (view["memory_utilization_pct"], view["requests_per_second"], view["prefix_hit_rate"]) == (37.5, 7.0, 0.25)
    assert (view["roofline_share"], view["fairness"]["batch"]) == (0.4, {"gap": 0, "bound": 0})
    assert (str(view["gpu_hour_usd"]), view["seen_at"], view["stale"]) == ("3.50", "2026-04-05T12:00:00Z", False)
    assert (view["busy_seconds"], view["instance_id"][:8]) == (1.5, "front-1-")
    cost = msgspec.convert(seen[f"local {one}/v1"].load, EngineLoad).step_cost
    assert cost is not None and msgspec.to_builtins(cost) == asdict(COST)


async def test_a_replica_that_sleeps_has_its_time_booked(
    database: Database, redis: Redis, client: UpstreamClient, folder: Path
) -> None:
    """It is none of those that are asked, and its GPU is its own; not by its pool's price once it is another's."""

    def with_sleepers(settings: Any) -> Any:
        own = msgspec.structs.replace(settings.providers["own"], endpoints=(Endpoint("local", url + "/v1"),))
        return SimpleNamespace(providers={"own": own})

    scene = Scene(database, redis, client, clock=SetClock())
    scene.watcher._with_sleepers = with_sleepers
    looks = []
    for pool in ("other", "own", "of another fleet"):
        with running_front(folder, FakeEngine(), instance_id=f"{pool}.0123456789ab.01234567") as url:
            looks += await scene.watcher.look_once()

    assert [(look.model, look.instance_id.partition(".")[0]) for look in looks] == [
        ("llama", "own"),
        ("llama", "of another fleet"),
    ]
    assert {*await scene.hours()} == {look.instance_id for look in looks}


async def until_busy(scene: Scene) -> list[Look]:
    """Look until the busy front has said so."""
    async with asyncio.timeout(10):
        while True:
            looks = await scene.watcher.look_once()
            if any(look.busy_us for look in looks):
                return looks


async def test_an_engine_that_is_started_again_is_another_instance(
    database: Database, redis: Redis, client: UpstreamClient, folder: Path
) -> None:
    """Both starts have their hours, as their own counters have them; only the one that is there is shown."""
    clock, port = SetClock(), free_port()
    scene = Scene(database, redis, client, f"http://127.0.0.1:{port}", clock=clock)
    last: dict[str, int] = {}
    for _ in range(2):
        with running_front(folder, FakeEngine(), "secret", port=port):
            for _ in range(3):
                (look,) = await scene.watcher.look_once()
                last[look.instance_id] = look.alive_us
                clock.move(1)
        assert await scene.watcher.look_once() == []  # nobody is there
        clock.move(40)
    seen, hours = await scene.seen(), await scene.hours()

    assert hours == last and len(last) == 2
    assert [one.instance_id for one in without_replaced(seen, clock.now() - 40)] == [look.instance_id]
    assert len(without_replaced(seen, clock.now() + 600)) == 2  # none is there: both are shown as they were
    at, before = f"http://127.0.0.1:{port}/v1", clock.now() - 40
    (left,) = without_replaced(seen, before)
    takes_calls = [listed_view(left, before, (), asked)["takes_calls"] for asked in ((), (at,))]
    assert takes_calls == [False, True]  # one that has left its pool was active at the last look


async def test_two_watchers_count_no_time_twice(
    database: Database, redis: Redis, client: UpstreamClient, folder: Path
) -> None:
    """Two gateways that look at the same moments, one of them new in between: hours are what the engine has."""
    with running_front(folder, FakeEngine(), "secret") as url:
        scenes = [Scene(database, redis, client, url, clock=Clock()) for _ in range(2)]
        for _ in range(10):
            await asyncio.gather(*(scene.watcher.look_once() for scene in scenes for _ in range(2)))
            scenes[1] = Scene(database, redis, client, url, clock=Clock())  # as after a restart
        (seen,) = await scenes[0].seen()

        assert await scenes[0].hours() == {seen.instance_id: seen.alive_us}


async def test_one_that_does_not_answer_keeps_no_other_waiting(
    database: Database, redis: Redis, client: UpstreamClient, folder: Path
) -> None:
    """A dead address, and an engine with another secret: the third is seen all the same; it is said once."""
    with running_front(folder, FakeEngine(), "secret") as url, running_front(folder, FakeEngine(), "other") as closed:
        scene = Scene(database, redis, client, f"http://127.0.0.1:{free_port()}", closed, url, clock=Clock())
        with capture_logs() as logs:
            looks = [await scene.watcher.look_once() for _ in range(3)]

    assert [[look.endpoint for look in some] for some in looks] == [[f"local {url}/v1"]] * 3
    assert sorted(entry["error"] for entry in logs) == ["It answered 401.", "The upstream cannot be reached."]


async def test_gateways_take_turns(database: Database, redis: Redis, client: UpstreamClient, folder: Path) -> None:
    """Whoever comes first looks and the others wait; without Redis everyone looks, which counts nothing twice."""
    with running_front(folder, FakeEngine(), "secret") as url:
        scenes = [Scene(database, redis, client, url, clock=Clock()) for _ in range(3)]
        async with contextlib.AsyncExitStack() as stack:
            lost = await stack.enter_async_context(Redis.from_url("redis://127.0.0.1:1"))
            lonely = Scene(database, lost, client, url, clock=Clock())
            patient = [Scene(database, redis, client, url, clock=Clock(), every=60) for _ in range(3)]
            turns = await asyncio.gather(*(scene.watcher.takes_turn() for scene in patient))
            await redis.set(TURN, "taken")
            await run_until(asyncio.sleep(0.2), *scenes)
            while_taken = await scenes[0].seen()
            await run_until(grown(lonely, 0), lonely)
            await redis.delete(TURN)
            (seen,) = await scenes[0].seen()
            await run_until(grown(scenes[0], seen.alive_us), *scenes)

        assert sorted(turns) == [False, False, True]
        assert while_taken == []
        (last,) = await scenes[0].seen()
        assert await scenes[0].hours() == {last.instance_id: last.alive_us}


async def run_until(enough: Coroutine[Any, Any, None], *scenes: Scene) -> None:
    """Let watchers run until ``enough`` has come."""
    tasks = [asyncio.create_task(scene.watcher.run()) for scene in scenes]
    await enough
    await stop_all(tasks)


async def grown(scene: Scene, alive_us: int) -> None:
    """Wait until a replica was seen that is older than that."""
    async with asyncio.timeout(20):
        while not any(one.alive_us > alive_us for one in await scene.seen()):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"{}",
        b'{"instance_id": "a", "model_id": "m", "uptime_seconds": -1}',
        b'{"instance_id": "a", "model_id": "m", "uptime_seconds": 1e300}',
        b'{"instance_id": "a\\u0000b", "model_id": "m"}',
        b'{"instance_id": "", "model_id": "m"}',
        b'{"instance_id": "a", "model_id": "m", "gpus": 0}',
    ],
)
def test_a_report_that_cannot_be_true_is_none(body: bytes) -> None:
    """Books are not for nonsense: no time runs backwards, and nobody is older than a year or so."""
    with pytest.raises(msgspec.DecodeError):
        read_report(body)
