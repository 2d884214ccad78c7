# A controller with real processes and a real Redis: replicas come, go, die, are adopted and replaced. The processes
# announce themselves as engines do, and answer nothing.

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from gateway.core.background import stop_all
from gateway.core.clock import Clock
from gateway.core.settings import EngineSpec, Fleet, Pool, ProviderSettings, Rollout, Scaling, Settings
from gateway.fleet.autoscaler import ScaleState
from gateway.placing import records
from gateway.placing.controller import Controller
from gateway.placing.local import LocalPlacer
from gateway.placing.placer import revision_of
from tests.support.house import model, settings_for
from tests.support.waiting import until_found

SECRET = "a secret of the fleet 0123"
PROGRAM = (sys.executable, "-m", "tests.support.fake_replica")
OLD = EngineSpec(model="tiny", gpus=0)
NEW = EngineSpec(model="tiny", gpus=0, version="2")


class Scene:
    """One pool, and controllers before it."""

    def __init__(self, redis: Redis, redis_url: str, folder: Path) -> None:
        self.redis, self.redis_url, self.folder = redis, redis_url, folder

    def settings(self, engine: EngineSpec = OLD) -> Settings:
        """Return the configuration with replicas of that kind."""
        own = ProviderSettings(name="own", format="openai", self_hosted=True, endpoints=())
        rollout = Rollout(healthy_within=20.0, canary=0.3, drain=5.0)
        pool = Pool(scaling=Scaling(min=0, max=4), engine=engine, rollout=rollout)
        fleet = Fleet(secrets=(SECRET,), pools={"own": pool})
        more: dict[str, Any] = {"providers": {"own": own}, "models": {"tiny": model("tiny", "own")}, "auto": {}}
        return settings_for("", self.redis_url, "", self.folder, **more, aliases={}, fleet=fleet)

    def placer(self) -> LocalPlacer:
        """Return a placer as a controller that begins opens it."""
        return LocalPlacer(self.folder / "fleet", PROGRAM)

    async def aim(self, target: int) -> None:
        """Decide in the gateways' place."""
        state = ScaleState(target=target, reason="", decided_at=0.0, changed_at=0.0)
        await self.redis.set("tollgate:fleet-target:{own}", msgspec.json.encode(state))

    @asynccontextmanager
    async def controlled(self, engine: EngineSpec = OLD) -> AsyncIterator[Controller]:
        """Run a controller until the end of the block; then it dies, without a word to its replicas."""
        controller = Controller(self.settings(engine), self.placer, self.redis, Clock())
        tasks = [asyncio.create_task(controller.hear()), asyncio.create_task(self._look(controller))]
        try:
            yield controller
        finally:
            await stop_all(tasks)

    async def _look(self, controller: Controller) -> None:
        while True:
            await controller.look_once()
            await asyncio.sleep(0.05)


@pytest.fixture
def scene(redis: Redis, redis_url: str, tmp_path: Path) -> Iterator[Scene]:
    """A pool without a replica; none is left behind."""
    scene = Scene(redis, redis_url, tmp_path)
    yield scene
    placer = scene.placer()
    for name in placer.names():
        placer.kill(name)


def pids(controller: Controller) -> dict[str, int]:
    """Return the processes of a controller's replicas that take calls."""
    placer: Any = controller._placer
    if placer is None:
        return {}
    able = {name for name, one in controller._heard("own").items() if one.said.state == "active"}
    late = controller._members["own"]
    able = {name for name in able if late.state_of(controller._heard("own")[name]) == "active"}
    return {name: placer._pids[name] for name in placer.names() if name in able}


async def settled(
    controller: Controller, count: int, *, but: Callable[[int], bool] = lambda pid: False
) -> dict[str, int]:
    """Wait until so many replicas take calls, and no more processes are there."""

    async def look() -> dict[str, int] | None:
        found = pids(controller)
        placed: Any = controller._placer
        is_all = placed is not None and len(placed.names()) == len(found) == count
        return (found or {"": 0}) if is_all and not any(map(but, found.values())) else None

    return await until_found(look)


async def test_replicas_live_and_die(scene: Scene, redis: Redis) -> None:
    """As many as the target says; one that is killed is replaced; a second controller waits, adopts them all once the
    first is gone, and ends them all."""
    await scene.aim(2)
    async with scene.controlled() as first:
        before = await settled(first, 2)
        victim = next(iter(before.values()))
        os.kill(victim, signal.SIGKILL)
        after = await settled(first, 2, but=lambda pid: pid == victim)
        async with scene.controlled() as second:
            await asyncio.sleep(0.3)
            waits = not second.acts
    await redis.delete(records.LEASE)  # as it ends by itself
    async with scene.controlled() as third:
        adopted = await settled(third, 2)
        await scene.aim(1)
        left = await settled(third, 1)
    await third.end(lambda: False)

    assert waits and first.acts and victim not in after.values()
    assert adopted == after and set(left) < set(adopted)
    assert scene.placer().names() == set()
    assert await redis.get(records.LEASE) is None or await redis.pttl(records.LEASE) <= 1


async def test_another_version_is_rolled_out_and_back(scene: Scene, redis: Redis) -> None:
    """By the configuration that is read again; what fails its calls goes, what was there before stays. A controller
    that begins later knows what to go back to."""
    await scene.aim(1)
    async with scene.controlled() as controller:
        await settled(controller, 1)
        controller.follow(scene.settings(NEW))
        new = revision_of(NEW)
        await until_found(lambda: _kept(redis, NEW))
        replaced = await settled(controller, 1)
    await redis.delete(records.LEASE)
    bad = msgspec.structs.replace(NEW, arguments=("--fails",))
    async with scene.controlled(bad) as other:
        await until_found(lambda: _given_up(other))
        stayed = await settled(other, 1)
    await other.end(lambda: False)

    assert {name.split(".")[1] for name in replaced} == {new}
    assert stayed == replaced


async def test_a_target_lies_within_what_the_file_says(scene: Scene) -> None:
    """Whatever stands in Redis."""
    controller = Controller(scene.settings(), scene.placer, scene.redis, Clock())
    pool = controller._pools["own"]
    targets = [controller._observation("own", pool, {}, target).target for target in (10_000, -5, None)]

    assert targets == [4, 0, 0]


async def test_a_record_that_the_secret_did_not_sign_is_no_command(redis: Redis) -> None:
    """It names what a machine is to run."""
    await records.keep_proved(redis, "own", OLD, SECRET)
    known = await records.read_proved(redis, ["own", "other"], [SECRET])
    await records.keep_proved(redis, "own", NEW, "a secret of a stranger 0123")

    assert known == {"own": OLD}
    assert await records.read_proved(redis, ["own"], [SECRET]) == {}


async def _kept(redis: Redis, engine: EngineSpec) -> bool:
    return (await records.read_proved(redis, ["own"], [SECRET])).get("own") == engine


async def _given_up(controller: Controller) -> bool:
    state = controller._states.get("own")
    return state is not None and bool(state.given_up)
