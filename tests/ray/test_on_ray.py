# Replicas on a real Ray cluster of this machine: `make test-ray`.

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from gateway.core.settings import EngineSpec, Rollout
from gateway.dev.stack import CHECKPOINT
from gateway.placing import records
from gateway.placing.placer import new_name, order_for, revision_of
from gateway.run.processes import free_port
from protocol.serving.announcements import ACTIVE, Announcement, pool_key, read_signed
from tests.support.placing import NEW, SECRET, WORDS, Scene, settled
from tests.support.ray_cluster import SETTINGS
from tests.support.waiting import until, until_found

ray = pytest.importorskip("ray", reason="SKIPPED: Ray is not installed: pip install 'tollgate[ray]'")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]

WITHIN = 400.0  # seconds for what takes five on a quiet machine: an actor's process imports Ray and our sources

FILE = f"""
database_url: postgresql://a:b@db/tollgate
redis_url: REDIS
data_dir: FOLDER
admin_keys: [tgadmin-canary-of-the-admins]
key_pepper: "a pepper of the tests, long enough"
providers:
  own: {{format: openai, self_hosted: true, api_keys: ["the engines' own secret 0123"]}}
models:
  demo: {{provider: own, price: {{input: 1, output: 1}}}}
fleet:
  secrets: ["{SECRET}"]
  pools:
    own:
      scaling: {{min: 1, max: 1}}
      engine:
        {{model: {CHECKPOINT}, gpus: 0, arguments: [--served-model-name, demo, --device, cpu, --step-cost, "off"]}}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A cluster with room for four replicas; its address."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in SETTINGS.items():
            patched.setenv(name, value)
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000)
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()


@pytest.fixture(autouse=True)
def left(cluster: str) -> Iterator[None]:
    """What a test that failed has left takes no room of the next one."""
    from gateway.placing.on_ray import RayPlacer

    yield
    placer = RayPlacer()
    for name in placer.names():
        placer.kill(name)


@pytest.fixture
def scene(cluster: str, redis: Redis, redis_url: str, tmp_path: Path) -> Scene:
    """A pool without a replica."""
    from gateway.placing.on_ray import RayPlacer

    scene = Scene(redis, redis_url, tmp_path, lambda: RayPlacer(WORDS))
    scene.healthy_within = WITHIN
    return scene


async def test_replicas_live_in_actors(scene: Scene, redis: Redis) -> None:
    """One whose engine dies, or whose actor, is replaced, and its engine is gone; the next controller finds them by
    their names; another version replaces them; at the end nothing is left."""
    from gateway.placing.on_ray import NAMESPACE

    await scene.aim(2)
    async with scene.controlled() as first:
        before = await settled(first, 2, within=WITHIN)
        name, pid = next(iter(before.items()))
        assert ray.get(ray.get_actor(name, NAMESPACE).check_health.remote()) == pid
        niceness = os.getpriority(os.PRIO_PROCESS, pid)
        os.kill(pid, signal.SIGKILL)
        after = await settled(first, 2, but=lambda one: one == pid, within=WITHIN)
        other, other_pid = next(iter(after.items()))
        ray.kill(ray.get_actor(other, NAMESPACE))
        later = await settled(first, 2, but=lambda one: one == other_pid, within=WITHIN)
    await redis.delete(records.LEASE)
    async with scene.controlled(NEW) as second:
        await until_found(lambda: _is_proved(redis), WITHIN)
        replaced = await settled(second, 2, within=WITHIN)
    await second.end(lambda: False)

    assert niceness == (0 if os.getuid() == 0 else int(SETTINGS["RAY_worker_niceness"]))
    assert pid not in after.values() and other_pid not in later.values()
    assert not replaced.keys() & later.keys()
    assert not scene.placer().names()
    assert not any(Path(f"/proc/{one}").exists() for one in {*before.values(), *later.values(), *replaced.values()})


def test_one_command_starts_engines_on_ray(cluster: str, redis_url: str, tmp_path: Path) -> None:
    """`tollgate fleet up --placer ray`, with the demo model: it is announced at an address of its own, outlives the
    controller that is killed, and ends with the next one."""
    from gateway.placing.on_ray import RayPlacer

    asyncio.run(_forget(redis_url))
    file = tmp_path / "tollgate.yaml"
    file.write_text(FILE.replace("REDIS", redis_url).replace("FOLDER", str(tmp_path)))
    command = [sys.executable, "-m", "gateway.cli", "fleet", "up", "--config", str(file), "--placer", "ray"]

    def control() -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("ab") as log:
            return subprocess.Popen(command, env={**os.environ, "RAY_ADDRESS": cluster}, stdout=log, stderr=log)

    def told(event: str) -> list[dict[str, Any]]:
        lines = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]
        return [one for one in map(json.loads, lines) if one["event"] == event]

    controllers = [control()]
    try:
        said = until(lambda: asyncio.run(_announced(redis_url)), within=WITHIN)
        controllers[0].kill()
        controllers[0].wait()
        controllers.append(control())
        adopted = until(
            lambda: len(told("fleet_controller_acts")) == 2 and told("fleet_controller_acts")[1], within=WITHIN
        )
        stays = asyncio.run(_announced(redis_url))
        controllers[1].send_signal(signal.SIGTERM)
        status = controllers[1].wait(WITHIN)
    finally:
        for each in controllers:
            each.kill()
        print((tmp_path / "log").read_text())

    assert adopted["adopted"] == [said.instance_id.rpartition("-")[0]]
    assert stays is not None and stays.instance_id == said.instance_id
    assert (status, len(told("replica_started")), set(RayPlacer().names())) == (0, 1, set())


@pytest.mark.parametrize("first_to_die", ["leader", "follower", "actor"])
def test_ranks_of_one_engine_start_and_end_together(first_to_die: str, cluster: str) -> None:
    """A placement group has them, each in an actor of its own; the engine answers, whichever ends takes the others
    along, and their room is free. One for which there is no room takes none."""
    from gateway.placing.on_ray import NAMESPACE, RayPlacer

    placer, port = RayPlacer(), free_port()
    arguments = ("--served-model-name", "demo", "--device", "cpu", "--step-cost", "off", "--port", str(port))
    arguments = ("--tensor-parallel-size=2", *arguments)
    engine = EngineSpec(model=str(CHECKPOINT), gpus=0, arguments=arguments)
    large = replace(engine, arguments=("--pipeline-parallel-size", "5"))
    order, too_large = (order_for(new_name("own", revision_of(one)), one, Rollout(), {}) for one in (engine, large))
    placer.start(replace(order, arguments=("--model", str(CHECKPOINT), *arguments)))
    assert (order.ranks, too_large.ranks) == (2, 5)
    url = f"http://127.0.0.1:{port}"
    until(lambda: _answers(url), within=WITHIN)
    chat = {"model": "demo", "messages": [{"role": "user", "content": "What is Tollgate?"}], "max_tokens": 5}
    answer = httpx.post(url + "/v1/chat/completions", json=chat, timeout=60).json()
    leader = ray.get(ray.get_actor(order.name, NAMESPACE).check_health.remote())
    (follower,) = (one.pid for one in psutil.process_iter(["cmdline"]) if _follows(one))
    placer.start(too_large)
    waiting = {each["state"] for each in ray.util.placement_group_table().values() if each["name"] == too_large.name}
    placer.kill(too_large.name)
    if first_to_die == "actor":
        placer.kill(order.name)
    else:
        os.kill({"leader": leader, "follower": follower}[first_to_die], signal.SIGKILL)
    until(lambda: not placer.names() and not any(psutil.pid_exists(pid) for pid in (leader, follower)), within=WITHIN)
    until(lambda: placer.names() == set() and ray.available_resources().get("CPU") == 4, within=WITHIN)

    assert answer["usage"]["completion_tokens"] == 5
    assert waiting == {"PENDING"}


def test_controllers_of_one_cluster_leave_each_others_replicas_alone(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that looks while another, whose turn has just ended, is about to start the ranks of an engine takes no group
    from it; it frees one that stays without an actor. Replicas of a fleet with another Redis are not seen."""
    from gateway.placing import on_ray

    engine = EngineSpec(model=str(CHECKPOINT), gpus=0, arguments=("--tensor-parallel-size=2",))
    order = order_for(new_name("own", revision_of(engine)), engine, Rollout(), {})
    sleeps = ("-c", "import time; time.sleep(600)")
    mine, others, foreign = on_ray.RayPlacer(sleeps), on_ray.RayPlacer(sleeps), on_ray.RayPlacer(fleet="another")
    made = ray.remote

    def states() -> list[str]:
        return [one["state"] for one in ray.util.placement_group_table().values() if one["name"] == order.name]

    with monkeypatch.context() as patched:
        patched.setattr(ray, "remote", lambda kind: (others.names(), made(kind))[1])
        mine.start(order)
    until(lambda: states() == ["CREATED"], within=WITHIN)
    seen = [set(one.names()) for one in (mine, others, foreign)]
    mine.kill(order.name)
    monkeypatch.setattr(on_ray, "IDLE_FOR", 0.0)
    until(lambda: not others.names() and states() == ["REMOVED"], within=WITHIN)

    assert seen == [{order.name}, {order.name}, set()]


def _answers(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _follows(process: psutil.Process) -> bool:
    return "gpu_backend.engine.follower" in (process.info["cmdline"] or ())


async def _announced(redis_url: str) -> Announcement | None:
    """Return the replica that takes calls."""
    redis: Redis = Redis.from_url(redis_url)
    try:
        found = [read_signed(value, [SECRET]) for value in (await redis.hgetall(pool_key("own"))).values()]
    finally:
        await redis.aclose()
    return next((one for one in found if one is not None and one.state == ACTIVE), None)


async def _forget(redis_url: str) -> None:
    """Leave nothing of an earlier test in Redis."""
    redis: Redis = Redis.from_url(redis_url)
    await redis.flushall()
    await redis.aclose()


async def _is_proved(redis: Redis) -> bool:
    return (await records.read_proved(redis, ["own"], [SECRET])).get("own") == NEW
