# Everything that hangs on the configuration follows it, and nothing of the old one is left behind.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from gateway.config.tree import ConfigFaults, Fault
from gateway.core.clock import Clock
from gateway.core.draining import Drain
from gateway.core.settings import BreakerPolicy, QuotaSettings, Retention, Retries, Settings
from gateway.inference.services import Services
from gateway.run.app import open_services
from gateway.run.reload import Reloader
from router.catalog.targets import Endpoint
from tests.support.house import model, settings_for


@pytest.fixture
def settings(tmp_path: Path, database_url: str, redis_url: str) -> Settings:
    """Two models at one endpoint."""
    return settings_for(database_url, redis_url, "http://127.0.0.1:9/v1", tmp_path)


@pytest.fixture
async def services(settings: Settings) -> AsyncIterator[Services]:
    """The services of a gateway that nobody calls."""
    async with open_services(settings, Clock(), Drain()) as services:
        yield services


def reloader_of(services: Services, *files: Settings | ConfigFaults) -> tuple[SimpleNamespace, Reloader]:
    """Return the app's state, and what reloads it: with each of ``files`` in its turn."""
    left = list(files)

    def read() -> Settings:
        found = left.pop(0)
        if isinstance(found, ConfigFaults):
            raise found
        return found

    state, reloader = SimpleNamespace(services=services), Reloader(read)
    reloader.state = state
    return state, reloader


async def test_all_that_is_shared_follows(services: Services, settings: Settings) -> None:
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
    budget = services.budgets.of(settings.providers["upstream"])
    old_target = services.catalog.targets()[0]
    state, reloader = reloader_of(services, changed)

    assert await reloader.reload()
    edition: Services = state.services
    (watched,) = edition.breakers.all()
    assert watched.target.endpoint == there
    assert (watched.breaker.policy.min_requests, watched.breaker.window.seconds) == (3, 7.0)
    assert budget.share == 0.5
    assert [room.limit for room in edition.gate.rooms()] == [4]
    assert edition.idempotency.retention == 60.0
    assert list(services.catalog.models) == ["small", "large"] and list(edition.catalog.models) == ["small"]
    permit = await edition.breakers.enter(old_target)  # a call that began before may still ask
    edition.breakers.succeeded(permit)
    assert permit.api_key == "sk-upstream"
    edition.breakers.health()


async def test_a_target_that_is_gone_leaves_no_open_breaker(services: Services, settings: Settings) -> None:
    """A call that fails at it later changes nothing for the others."""
    target = services.catalog.targets()[0]
    watched = services.breakers.watch(target)
    await services.breakers.force_open(watched, "by a test")
    state, reloader = reloader_of(services, replace(settings, models={"large": settings.models["large"]}, auto={}))

    assert services.breakers.health()
    assert await reloader.reload()
    await state.services.breakers.reset(watched, "by a test")
    assert not state.services.breakers.health()
    assert [each.target.model.name for each in state.services.breakers.all()] == ["large"]


async def test_a_faulty_file_is_refused_whole(services: Services, settings: Settings) -> None:
    """The edition stays the very same object."""
    state, reloader = reloader_of(services, ConfigFaults(Path("tollgate.yaml"), [Fault(3, "models", "empty")]))

    assert not await reloader.reload()
    assert state.services is services


async def test_reloads_leave_no_task_behind(services: Services, settings: Settings) -> None:
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
    state, reloader = reloader_of(services, *files)
    await asyncio.sleep(0.2)
    before = len(asyncio.all_tasks())

    for _ in files:
        assert await reloader.reload()
    async with asyncio.timeout(10):
        while len(asyncio.all_tasks()) > before:  # a loop may be in the middle of a round
            await asyncio.sleep(0.05)
    assert len(state.services.breakers.all()) == 3
