# A pool of processes that announce themselves as engines do, and controllers before it, for tests of placers.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import Redis

from gateway.core.background import stop_all
from gateway.core.clock import Clock
from gateway.core.settings import EngineSpec, Fleet, Pool, ProviderSettings, Rollout, Scaling, Settings
from gateway.fleet.autoscaler import ScaleState
from gateway.placing.controller import Controller
from gateway.placing.placer import Placer
from protocol.serving.announcements import ACTIVE
from tests.support.house import model, settings_for
from tests.support.waiting import PATIENCE, until_found

SECRET = "a secret of the fleet 0123"
WORDS = ("-m", "tests.support.fake_replica")  # of a Python
OLD = EngineSpec(model="tiny", gpus=0)
NEW = EngineSpec(model="tiny", gpus=0, version="2")
SLEEPER = EngineSpec(model="tiny", gpus=0, arguments=("--sleeps",))
LOADER = EngineSpec(model="tiny", gpus=0, arguments=("--sleeps", "--allow-model-loading"))


class Scene:
    """One pool, and controllers before it."""

    def __init__(self, redis: Redis, redis_url: str, folder: Path, placer: Callable[[], Placer]) -> None:
        self.redis, self.redis_url, self.folder = redis, redis_url, folder
        self.placer = placer  # as a controller that begins opens it
        self.healthy_within = 20.0  # seconds
        self.asleep = 0  # replicas beyond the target that sleep
        self.beside: EngineSpec | None = None  # what replicas of another pool are

    def settings(self, engine: EngineSpec = OLD) -> Settings:
        """Return the configuration with replicas of that kind."""
        own = ProviderSettings(
            name="own", format="openai", self_hosted=True, endpoints=(), api_keys=("a key of engines",)
        )
        rollout = Rollout(healthy_within=self.healthy_within, canary=0.3, stand=0.3, drain=5.0)
        pool = Pool(scaling=Scaling(min=0, max=4, asleep=self.asleep), engine=engine, rollout=rollout)
        more: dict[str, Any] = {"providers": {"own": own}, "models": {"tiny": model("tiny", "own")}, "auto": {}}
        pools = {"own": pool}
        if self.beside is not None:
            pools["beside"] = msgspec.structs.replace(pool, engine=self.beside)
            more["providers"]["beside"] = msgspec.structs.replace(own, name="beside")
            more["models"]["large"] = model("large", "beside")
        fleet = Fleet(secrets=(SECRET,), pools=pools)
        return settings_for("", self.redis_url, "", self.folder, **more, aliases={}, fleet=fleet)

    async def aim(self, target: int, pool: str = "own") -> None:
        """Decide in the gateways' place."""
        state = ScaleState(target=target, reason="", decided_at=0.0, changed_at=0.0)
        await self.redis.set(f"tollgate:fleet-target:{{{pool}}}", msgspec.json.encode(state))

    @asynccontextmanager
    async def controlled(self, engine: EngineSpec = OLD) -> AsyncIterator[Controller]:
        """Run a controller until the end of the block; then it dies, without a word to its replicas."""
        controller = Controller(self.settings(engine), self.placer, self.redis, Clock())
        tasks = [asyncio.create_task(controller.hear()), asyncio.create_task(self._look(controller))]
        try:
            yield controller
        finally:
            await stop_all(tasks)
            await controller.close()

    async def _look(self, controller: Controller) -> None:
        while True:
            await controller.look_once()
            await asyncio.sleep(0.05)


def pids(controller: Controller, pool: str = "own") -> dict[str, int]:
    """Return the processes of replicas that take calls, by their heartbeats."""
    members = controller._members[pool]
    heard = controller._heard(pool).items()
    able = [(name, one) for name, one in heard if members.state_of(one) == ACTIVE and one.refused is None]
    return {name: int(one.said.version or 0) for name, one in able}


async def settled(
    controller: Controller, count: int, but: Callable[[int], bool] = lambda pid: False, within: float = PATIENCE
) -> dict[str, int]:
    """Wait until so many replicas take calls, and no others are there."""

    async def look() -> dict[str, int] | None:
        found, placer = pids(controller), controller._placer
        is_all = placer is not None and set(placer.names()) == found.keys() and len(found) == count
        return (found or {"": 0}) if is_all and not any(map(but, found.values())) else None

    return await until_found(look, within)
