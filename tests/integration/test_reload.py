# Everything that hangs on the configuration follows it, and nothing of the old one is left behind.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.config.tree import ConfigFaults, Fault
from gateway.core.clock import Clock
from gateway.core.draining import Drain
from gateway.core.parts import Parts
from gateway.core.settings import BreakerPolicy, QuotaSettings, Retention, Retries, Settings
from gateway.idempotency.store import IdempotencyStore
from gateway.inference.edition import Edition, Editions
from gateway.inference.limiter import TargetLimiter
from gateway.run.process import open_process
from gateway.run.reload import Reloader
from gateway.telemetry.metrics import Metrics
from gateway.upstreams.resilience.breakers import Breakers
from gateway.upstreams.resilience.retry_budget import RetryBudgets
from router.catalog.targets import Endpoint
from tests.support.house import model, settings_for


@pytest.fixture
def settings(tmp_path: Path, database_url: str, redis_url: str) -> Settings:
    """Two models at one endpoint."""
    return settings_for(database_url, redis_url, "http://127.0.0.1:9/v1", tmp_path)


@pytest.fixture
async def parts(settings: Settings) -> AsyncIterator[Parts]:
    """The parts of a gateway that no client calls."""
    async with open_process(settings, Clock(), Drain()) as parts:
        yield parts


def reloader_of(parts: Parts, *files: Settings | ConfigFaults) -> Reloader:
    """Return what reloads a gateway: with each of ``files`` in its turn."""
    left = list(files)

    def read() -> Settings:
        found = left.pop(0)
        if isinstance(found, ConfigFaults):
            raise found
        return found

    reloader = Reloader(read)
    reloader.begin(parts.get(Editions), parts.get(Metrics), parts.get(Clock))
    return reloader


async def test_all_that_is_shared_follows(parts: Parts, settings: Settings) -> None:
    """Breakers, retry budgets, rooms, shares and retention are those of the new file; the old edition is as it was."""
    there = Endpoint("there", "http://127.0.0.1:10/v1")
    moved = replace(
        settings.providers["upstream"],
        endpoints=(there,),
        breaker=BreakerPolicy(min_requests=3, window=7.0),
        retries=Retries(budget=0.5),
        concurrency=4,
    )
    changed = replace(
        settings,
        providers={"upstream": moved},
        models={"small": model("small")},
        auto={},
        aliases={},
        quotas=QuotaSettings(standalone_share=0.9),
        retention=Retention(idempotency=60.0),
    )
    budget = parts.get(RetryBudgets).of(settings.providers["upstream"])
    breakers, editions = parts.get(Breakers), parts.get(Editions)
    before = editions.current
    old_target = before.catalog.targets()[0]
    reloader = reloader_of(parts, changed)

    assert await reloader.reload()
    (watched,) = breakers.all()
    assert watched.target.endpoint == there
    assert (watched.breaker.policy.min_requests, watched.breaker.window.seconds) == (3, 7.0)
    assert budget.share == 0.5
    assert [room.limit for room in parts.get(TargetLimiter).slot_pools()] == [4]
    assert parts.get(IdempotencyStore)._retention == 60.0
    assert list(before.catalog.models) == ["small", "large"] and list(editions.current.catalog.models) == ["small"]
    permit = await breakers.enter(old_target)  # a call that began before may still ask
    breakers.succeeded(permit)
    assert permit.api_key == "sk-upstream"
    breakers.health()


async def test_a_target_that_is_gone_leaves_no_open_breaker(parts: Parts, settings: Settings) -> None:
    """A call that fails at it later changes nothing for the others."""
    target, breakers = parts.get(Editions).current.catalog.targets()[0], parts.get(Breakers)
    watched = breakers.watch(target)
    await breakers.force_open(watched, "by a test")
    reloader = reloader_of(parts, replace(settings, models={"large": settings.models["large"]}, auto={}))

    assert breakers.health()
    assert await reloader.reload()
    await breakers.reset(watched, "by a test")
    assert not breakers.health()
    assert [each.target.model.name for each in breakers.all()] == ["large"]


async def test_a_faulty_file_is_refused_whole(parts: Parts, settings: Settings) -> None:
    """The edition stays the very same object."""
    edition = parts.get(Editions).current
    reloader = reloader_of(parts, ConfigFaults(Path("tollgate.yaml"), [Fault(3, "models", "empty")]))

    assert not await reloader.reload()
    assert parts.get(Editions).current is edition


async def test_what_cannot_be_followed_is_no_edition(parts: Parts, settings: Settings) -> None:
    """Calls go on by the edition before, and the next reload is told what it changes against that."""
    editions = parts.get(Editions)
    edition = editions.current

    def refuse(_: Edition) -> None:
        raise RuntimeError("this cannot be followed")

    editions.follow(refuse)

    with pytest.raises(RuntimeError):
        editions.change(replace(settings, models={"large": settings.models["large"]}, auto={}))
    assert editions.current is edition


async def test_reloads_leave_no_task_behind(parts: Parts, settings: Settings) -> None:
    """Twenty reloads, models and endpoints coming and going: as many tasks run as before."""
    files = [
        replace(
            settings,
            models=settings.models | {f"model-{number}": model(f"model-{number}")},
            providers={
                "upstream": replace(
                    settings.providers["upstream"], endpoints=(Endpoint("local", f"http://127.0.0.1:{number + 1}/v1"),)
                )
            },
        )
        for number in range(20)
    ]
    reloader = reloader_of(parts, *files)
    await asyncio.sleep(0.2)
    before = len(asyncio.all_tasks())

    for _ in files:
        assert await reloader.reload()
    async with asyncio.timeout(10):
        while len(asyncio.all_tasks()) > before:  # a loop may be in the middle of a round
            await asyncio.sleep(0.05)
    assert len(parts.get(Breakers).all()) == 3
