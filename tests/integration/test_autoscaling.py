# The targets of pools as several gateways decide them: from what replicas reported and the ledger counted, once, in
# Redis; and what stays while Redis is away.

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from redis.asyncio import Redis
from sqlalchemy import text

from billing.ledger.instance_samples import Look, book_look
from gateway.core.settings import Fleet, Pool, ProviderSettings, Scaling
from gateway.fleet.autoscaler import EVERY
from gateway.fleet.autoscaling import TURN, Autoscaler, PoolTarget
from gateway.fleet.discovery import Discovery
from gateway.storage.database import Database
from protocol.serving.engine_load import EngineLoad, StepCost
from protocol.serving.redis_client import open_redis
from tests.support.clock import SetClock
from tests.support.house import model, settings_for
from tests.support.redis_proxy import RedisProxy, Way

COST = StepCost(0.0018, 0.0189, 0.000109, 3.8e-8)
HOUR = text("""
    INSERT INTO usage_series (at, step, team_id, key_id, model_used, provider, status, tier, route_reason, code, calls,
                              input_tokens, output_tokens)
    VALUES (:at, 1, 't', 'k', 'llama', :provider, :status, 'interactive', '', :code, :calls, :prompt, :reply)
""")


class Scene:
    """Gateways beside each other before one pool of replicas in the file."""

    def __init__(self, database: Database, redis: Redis, folder: Path, clock: SetClock) -> None:
        own = ProviderSettings(name="own", format="openai", self_hosted=True, endpoints=())
        fleet = Fleet(secrets=("a secret of the fleet 0123",), pools={"own": Pool(scaling=Scaling(min=0, max=4))})
        more: dict[str, Any] = {"providers": {"own": own}, "models": {"llama": model("llama", "own")}}
        more |= {"auto": {}, "aliases": {"best": "llama"}}
        self.edition: Any = SimpleNamespace(settings=settings_for("", "", "", folder, **more, fleet=fleet))
        self.database, self.redis, self.folder, self.clock = database, redis, folder, clock

    def gateway(self, redis: Redis | None = None) -> Autoscaler:
        """Return another gateway's autoscaler."""
        way = self.redis if redis is None else redis
        discovery = Discovery(way, self.clock, self.folder / "fleet.json")
        return Autoscaler(self.edition, discovery, self.database, way, self.clock)

    async def report(self, replicas: int, **load: Any) -> None:
        """Book a look at so many replicas, ten seconds later."""
        self.clock.move(EVERY)
        async with self.database.begin() as connection:
            for number in range(replicas):
                said = EngineLoad(instance_id=f"r{number}", model_id="llama", max_running=256, step_cost=COST, **load)
                facts: dict[str, Any] = {"model": "llama", "gpus": 1, "gpu_hour_nanousd": None, "busy_us": 0}
                at = {"seen_at": self.clock.now(), "alive_us": round(self.clock.time * 1e6)}
                where = {"instance_id": f"r{number}", "provider": "own", "endpoint": f"here http://r{number}/v1"}
                look = Look(**where, **facts, **at, load=msgspec.to_builtins(said))
                assert await book_look(connection, look)

    async def count(self, calls: int, status: str = "answered", ago: float = 0.0, **tokens: int) -> None:
        """Count calls of a minute in the ledger."""
        refused = status == "refused"
        row = {"status": status, "provider": "" if refused else "own", "code": "overloaded" if refused else ""}
        at = datetime.fromtimestamp((self.clock.now() - ago) // 60 * 60, UTC)
        async with self.database.begin() as connection:
            await connection.execute(HOUR, row | {"at": at, "calls": calls, "prompt": 0, "reply": 0} | tokens)


def told(found: list[PoolTarget]) -> tuple[int, str]:
    """Return the target of the only pool, and why."""
    (one,) = found
    assert one.state is not None
    return one.state.target, one.state.reason


async def test_gateways_decide_once(database: Database, redis: Redis, tmp_path: Path, clock: SetClock) -> None:
    """Whose turn it is decides from reports and ledger, all know it; and of two that decide at once one does."""
    scene = Scene(database, redis, tmp_path, clock)
    one, other = scene.gateway(), scene.gateway()
    await scene.count(100, prompt=110_000, reply=20_000)
    await scene.report(1, running=6, requests_per_second=1.0)
    await one.look_once()
    await redis.persist(TURN)  # however long this machine takes
    await scene.report(1, running=60, requests_per_second=20.0)
    await other.look_once()  # it is not its turn
    before = told(await other.read())
    await asyncio.gather(one.decide_once(), other.decide_once())

    assert before[0] == 1
    assert told(await one.read()) == told(await other.read()) != before
    assert one.targets() == other.targets() == {"own": 4}
    assert told(await one.read())[1].endswith("calls/s")


async def test_a_pool_at_zero_is_woken(database: Database, redis: Redis, tmp_path: Path, clock: SetClock) -> None:
    """By a call that was refused for lack of a replica, though nothing runs that could tell of it."""
    scene = Scene(database, redis, tmp_path, clock)
    gateway = scene.gateway()
    await gateway.decide_once()
    cold = told(await gateway.read())
    await scene.count(1, "refused")
    clock.move(EVERY)
    await gateway.decide_once()
    woken = told(await gateway.read())

    assert cold[0] == 0
    assert woken == (1, "calls found no replica")


async def test_targets_stay_without_redis(
    database: Database, redis: Redis, redis_url: str, tmp_path: Path, clock: SetClock
) -> None:
    """A gateway that no longer reaches Redis tells what it knew, and nothing fails."""
    proxy = RedisProxy(redis_url)
    await proxy.start()
    client = open_redis(proxy.url, timeout=0.25)
    scene = Scene(database, redis, tmp_path, clock)
    gateway = scene.gateway(client)
    await scene.report(2, running=1)
    await gateway.look_once()
    proxy.turn(Way.CUT)
    await gateway.look_once()

    assert told(await gateway.read())[0] == 2
    await client.aclose()
    await proxy.stop()
