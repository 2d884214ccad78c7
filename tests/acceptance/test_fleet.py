# Replicas that come and go: engines announce themselves in Redis, and a gateway that knows their pool alone asks them.

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from redis import Redis
from typer.testing import CliRunner

import gateway.cli
from gateway.core.settings import Fleet, Pool, ProviderSettings, Scaling, Timeouts
from gateway.fleet.rollouts import Rolling, rollout_key
from gpu_backend.server.client.announcer import FleetSettings
from gpu_backend.step.messages import Command, Event, Generate, LoadModel, NewTokens, Sleep, SleepAnswer
from gpu_backend.step.sequence import FinishReason
from tests.support.audits import lasting_differences
from tests.support.fake_engine import READY, TIMINGS, FakeEngine, speaking
from tests.support.front import CHAT, running_front, write_small_files
from tests.support.house import NEVER_OPENS, House, model, running_house, settings_for
from tests.support.tiny_model import TinyModel
from tests.support.waiting import until

# A secret of this file's own: heartbeats of replicas that tests before it have killed lie in Redis for a second yet.
PAUSE = 1200  # milliseconds: twice as long as a heartbeat may be late
SECRET, ENGINE_SECRET = "a secret of the fleet that calls are sent to", "the engines' own secret"


@dataclass
class Scene:
    """A gateway before a pool, and engines that come and go."""

    house: House
    folder: Path
    fleet: FleetSettings
    running: dict[str, contextlib.ExitStack] = field(default_factory=dict)

    def start(
        self,
        engine: FakeEngine | None = None,
        warm_up: tuple[str, ...] = (),
        name: str = "front-1",
        allow_model_loading: bool = False,
        **more: Any,
    ) -> str:
        """Start an engine that announces itself and return its URL."""
        fleet = FleetSettings(**{"pool": "own", "redis_url": self.fleet.redis_url, "secret": SECRET} | more)
        stack = contextlib.ExitStack()
        engine = engine or FakeEngine(speaking([70, 71, 72]), max_model_len=512)
        told: dict[str, Any] = {"warm_up": warm_up, "instance_id": name, "allow_model_loading": allow_model_loading}
        front = running_front(self.folder, engine, ENGINE_SECRET, fleet=fleet, **told)
        url = stack.enter_context(front)
        self.running[url] = stack
        return url

    def stop(self, url: str) -> None:
        """End an engine as SIGTERM does."""
        self.running.pop(url).close()

    def call(self, text: str = "hi", model: str = "tiny") -> int:
        """Make a call and return its status."""
        body = CHAT | {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 3}
        with self.house.client() as client:
            return client.post("/v1/chat/completions", json=body).status_code

    def replicas(self) -> dict[str, dict[str, Any]]:
        """Return what /admin/instances shows, by address."""
        with self.house.client(self.house.admin_key) as admin:
            shown = admin.get("/admin/instances").raise_for_status().json()["instances"]
        return {one["base_url"].removesuffix("/v1"): one for one in shown}

    def asked(self) -> set[str]:
        """Return the addresses that are asked."""
        return {url for url, one in self.replicas().items() if one["takes_calls"]}


@pytest.fixture(scope="module")
def scene(databases: Any, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A gateway whose one provider has no address but those that announce themselves."""
    tmp_path = tmp_path_factory.mktemp("fleet")
    with Redis.from_url(redis_url) as client:
        client.flushall()  # targets of the same pool, too
    own = ProviderSettings(
        name="own",
        format="openai",
        api_keys=(ENGINE_SECRET,),
        self_hosted=True,
        endpoints=(),
        timeouts=Timeouts(connect=10.0, first_token=20.0, between_tokens=20.0, total=30.0),
        breaker=NEVER_OPENS,
    )
    more: dict[str, Any] = {"providers": {"own": own, "beside": replace(own, name="beside")}, "auto": {}, "aliases": {}}
    more["models"] = {"tiny": model("tiny", "own"), "large": model("large", "beside")}
    pools = {"own": Pool(region="here", scaling=Scaling(min=1, max=3)), "beside": Pool(region="here")}
    more["fleet"] = Fleet(secrets=(SECRET,), pools=pools)
    with databases.lend() as url, running_house(settings_for(url, redis_url, "", tmp_path / "data", **more)) as house:
        fleet = FleetSettings(pool="own", redis_url=redis_url, secret=SECRET)
        scene = Scene(house, write_small_files(tmp_path / "tiny"), fleet)
        yield scene
        for stack in scene.running.values():
            stack.close()


def test_replicas_come_and_go(scene: Scene) -> None:
    """No reload: a pool without a replica is a 503, one that comes is asked, and one that drains is not. An engine that
    ends as SIGTERM has it fails no call."""
    before = scene.call()
    first = scene.start()
    until(lambda: scene.asked() == {first})
    second = scene.start()
    until(lambda: scene.asked() == {first, second})
    with ThreadPoolExecutor(1) as beside:
        ending, statuses = beside.submit(scene.stop, second), set[int]()
        while not ending.done() or second in scene.replicas():
            statuses.add(scene.call(f"hi {time.monotonic()}"))  # by its words each goes to one of both
            time.sleep(0.03)
    with scene.house.client(ENGINE_SECRET) as client:
        client.post(first + "/drain").raise_for_status()
    until(lambda: scene.asked() == set())
    drained, after_drain = scene.replicas()[first]["state"], scene.call()
    scene.stop(first)
    until(lambda: first not in scene.replicas())

    assert (before, statuses, drained, after_drain) == (503, {200}, "draining", 503)


def test_a_replica_is_asked_once_it_is_warm(scene: Scene) -> None:
    """Not while a prompt that it is to answer first has no answer; never, if that cannot be answered."""
    slow = FakeEngine(max_model_len=512)
    url = scene.start(slow, warm_up=("hi",))
    slow.process.wait_for(lambda command: isinstance(command, Generate))
    until(lambda: url in scene.replicas())
    before = scene.replicas()[url]
    slow.process.say(NewTokens("warm-up-0", 0, (70,), finish_reason=FinishReason.STOP, timings=TIMINGS))
    until(lambda: scene.replicas()[url]["takes_calls"])
    broken = scene.start(FakeEngine(speaking([70], FinishReason.ERROR)), warm_up=("hi",))
    state = until(lambda: (one := scene.replicas().get(broken)) and one["state"] != "starting" and one["state"])
    for each in (url, broken):
        scene.stop(each)

    assert (before["state"], before["takes_calls"]) == ("starting", False)
    assert state == "failed"


def test_an_engine_that_sleeps_becomes_a_replica_of_another_pool(scene: Scene, tmp_path: Path) -> None:
    """With another model, for which it is asked once it serves that and has answered what it is to warm up with; until
    then it is announced as what it was, and takes no calls."""

    def script(command: Command) -> list[tuple[Event, ...]]:
        if isinstance(command, LoadModel):
            return []
        return [(SleepAnswer(command.number),)] if isinstance(command, Sleep) else speaking([70, 71, 72])(command)

    engine, name = FakeEngine(script, max_model_len=512), f"beside.{'0' * 12}.00000000"
    url = scene.start(engine, allow_model_loading=True)
    until(lambda: scene.asked() == {url})
    folder = write_small_files(tmp_path / "large", config=TinyModel().config())
    body: dict[str, Any] = {
        "instance_id": name,
        "model": str(folder),
        "served_model_name": "large",
        "warm_up": ["hi"],
        "fleet_pool": "beside",
    }
    with scene.house.client(ENGINE_SECRET) as client, ThreadPoolExecutor(1) as beside:
        client.post(url + "/sleep").raise_for_status()
        until(lambda: scene.asked() == set())
        loading = beside.submit(client.post, url + "/load_model", json=body, timeout=30)
        engine.process.wait_for(lambda command: isinstance(command, LoadModel))
        until(lambda: scene.replicas()[url]["state"] == "starting")
        meanwhile, before = scene.replicas()[url], scene.call(model="large")
        engine.process.say(dataclasses.replace(READY, max_model_len=512))
        loaded = loading.result()
    until(lambda: scene.asked() == {url})
    after, answered, by_old_name = scene.replicas()[url], scene.call(model="large"), scene.call()
    first = next(command.request_id for command in engine.process.commands if isinstance(command, Generate))
    scene.stop(url)

    assert (meanwhile["pool"], meanwhile["model_id"], before) == ("own", "tiny", 503)
    assert (loaded.status_code, answered, by_old_name) == (200, 200, 503)
    assert (after["pool"], after["model_id"], after["revision"]) == ("beside", "large", "0" * 12)
    assert first == "warm-up-0"


def test_a_strangers_address_is_never_asked(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with another secret is not even shown, one with the right one is, by `tollgate fleet status` too: pool,
    address, state, version and heartbeat."""
    monkeypatch.setenv("TOLLGATE_URL", scene.house.url)
    monkeypatch.setenv("TOLLGATE_KEY", scene.house.admin_key)
    if not any(group.name == "fleet" for group in gateway.cli.app.registered_groups):
        gateway.cli.add_commands()
    stranger = scene.start(secret="a secret of a stranger 0123")
    url = scene.start()
    until(lambda: url in scene.asked())
    shown = scene.replicas()
    table = CliRunner().invoke(gateway.cli.app, ["fleet", "status"]).stdout
    targets = CliRunner().invoke(gateway.cli.app, ["fleet", "targets"]).stdout.splitlines()
    with scene.house.client(scene.house.admin_key) as admin:
        metrics = admin.get("/metrics").text
    row = shown[url]

    assert stranger not in shown
    assert (row["pool"], row["state"], row["takes_calls"], row["block_size"]) == ("own", "active", True, 16)
    assert row["heartbeat_at"] and row["version"] is None and row["reason"] is None
    assert table.splitlines()[0].split("\t")[:3] == ["pool", "base_url", "state"]
    assert url in table and stranger not in table
    assert 'tollgate_fleet_replicas{pool="own",state="active"} 1.0' in metrics
    assert targets[0].split("\t")[:5] == ["pool", "target", "ready", "min", "max"]
    assert targets[1].split("\t")[:5] == ["own", "1", "1", "1", "3"]
    assert 'tollgate_fleet_target{pool="own"} 1.0' in metrics


def test_conversations_are_shared_between_versions(scene: Scene) -> None:
    """As a controller says in Redis, at once, and each stays at its version."""
    old, new = "0" * 11 + "1", "0" * 11 + "2"
    engines = [FakeEngine(speaking([70, 71, 72]), max_model_len=512) for _ in range(2)]
    urls = [scene.start(engine, name=f"own.{one}.00000000") for engine, one in zip(engines, (old, new), strict=True)]
    until(lambda: set(urls) <= scene.asked())
    told: dict[str, Any] = {"state": "replacing", "revision": new, "kept": old, "since": time.time(), "due_at": None}
    answered = []
    with Redis.from_url(scene.fleet.redis_url) as redis:
        for share in (0.0, 0.5, 0.5, 1.0):
            redis.set(rollout_key("own"), msgspec.json.encode(Rolling(share=share, **told)))
            until(lambda share=share: scene.replicas()[urls[1]]["share"] == share)
            before = asked_of(engines[1])
            assert {scene.call(f"Tell me of river {number}.") for number in range(12)} == {200}
            answered.append(asked_of(engines[1]) - before)
        redis.delete(rollout_key("own"))
    for url in urls:
        scene.stop(url)

    assert (answered[0], answered[3]) == (0, 12)
    assert 0 < answered[1] == answered[2] < 12


def asked_of(engine: FakeEngine) -> int:
    """Return how often an engine was asked."""
    return sum(isinstance(each, Generate) for each in engine.process.commands)


def test_a_target_is_set_by_hand(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `tollgate fleet scale`, within min and max; every gateway knows it, and the audit log who set it. What was
    rolled back stands beside."""
    monkeypatch.setenv("TOLLGATE_URL", scene.house.url)
    monkeypatch.setenv("TOLLGATE_KEY", scene.house.admin_key)
    if not any(group.name == "fleet" for group in gateway.cli.app.registered_groups):
        gateway.cli.add_commands()
    told: dict[str, Any] = {"revision": "0a1b", "kept": "0c2d", "share": 0.0, "since": time.time(), "due_at": None}
    said = Rolling(state="rolled_back", reason="it failed", **told)
    Redis.from_url(scene.fleet.redis_url).set(rollout_key("own"), msgspec.json.encode(said))
    with scene.house.client(scene.house.admin_key) as admin:
        (rollout,) = until(lambda: admin.get("/admin/instances").json()["rollouts"])
        status = CliRunner().invoke(gateway.cli.app, ["fleet", "status"]).stdout.splitlines()[-2:]
        until(lambda: 'tollgate_fleet_rollout{pool="own",state="rolled_back"} 1.0' in admin.get("/metrics").text)
        said = CliRunner().invoke(gateway.cli.app, ["fleet", "scale", "own", "3"]).stdout
        (shown,) = admin.get("/admin/fleet/targets").json()["targets"]
        refused = admin.post("/admin/fleet/targets/own", json={"target": 4})
        missing = admin.post("/admin/fleet/targets/owm", json={"target": 1})
        CliRunner().invoke(gateway.cli.app, ["fleet", "scale", "own", "auto"])
        acts = admin.get("/admin/audit-log?limit=2").json()["data"]
        (freed,) = admin.get("/admin/fleet/targets").json()["targets"]

    assert said == "own: 3 replicas, set by hand\n"
    assert shown["rolled_back"] == "0a1b: it failed"
    assert (rollout["state"], rollout["revision"], rollout["reason"]) == ("rolled_back", "0a1b", "it failed")
    assert [line.split("\t")[:5] for line in status] == [
        ["pool", "state", "revision", "kept", "share"],
        ["own", "rolled_back", "0a1b", "0c2d", "0.0"],
    ]
    assert (shown["target"], shown["reason"]) == (3, "set by hand") != (freed["target"], freed["reason"])
    assert (refused.status_code, missing.status_code) == (400, 404)
    assert "is a whole number from 1 to 3, or null" in refused.text and "those that have it: own." in missing.text
    assert [(act["action"], act["subject"], act["details"]["target"]) for act in acts] == [
        ("fleet.scaled", "own", None),
        ("fleet.scaled", "own", 3),
    ]


def test_calls_go_on_while_redis_is_silent(scene: Scene) -> None:
    """It takes connections and answers nothing, or it answers and the heartbeats of all come late: the replicas that
    were known are asked, each call is answered, and the books agree."""
    urls = {scene.start(), scene.start()}
    until(lambda: urls <= scene.asked())
    statuses, asked = set[int](), list[bool]()
    with Redis.from_url(scene.fleet.redis_url) as redis:
        for what in (b"ALL", b"WRITE"):
            redis.execute_command("CLIENT PAUSE", PAUSE, what)
            over = time.monotonic() + PAUSE / 1000
            while time.monotonic() < over:
                statuses.add(scene.call(f"hi {time.monotonic()}"))
                time.sleep(0.1)
            asked.append(urls <= scene.asked())
    until(lambda: urls <= scene.asked())
    for url in urls:
        scene.stop(url)

    assert (statuses, asked) == ({200}, [True, True])
    assert lasting_differences(scene.house.settings.database_url) == []
