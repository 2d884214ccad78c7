# What an engine is told of the fleet that it joins, and by which address gateways reach it.

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_backend.__main__ import read_settings
from gpu_backend.server.client.announcer import Announcer, FleetSettings, base_url_of
from gpu_backend.server.client.engine_client import EngineState
from gpu_backend.server.front import Front
from protocol.serving.announcements import ACTIVE, DRAINING, STARTING, KvEventsAt
from tests.support.fake_engine import READY

SECRET = "a secret of the fleet 0123"
ENVIRONMENT = {"TOLLGATE_FLEET_SECRET": SECRET, "TOLLGATE_FLEET_REDIS": "redis://127.0.0.1:6379/0"}


def fleet(**more: Any) -> FleetSettings:
    """Return settings that work, but for ``more``."""
    return FleetSettings(**{"pool": "own", "redis_url": "redis://127.0.0.1:6379/0", "secret": SECRET} | more)


def test_flags_and_variables_say_which_fleet() -> None:
    """Without a pool an engine announces nothing, whatever its variables; a flag goes before its variable."""
    alone = read_settings(["--model", "m"], ENVIRONMENT)
    flags = [
        "--model",
        "m",
        "--fleet-pool",
        "own",
        "--fleet-redis",
        "rediss://r:1",
        "--fleet-address",
        "http://gpu-0/v1",
    ]
    joined = read_settings(flags, ENVIRONMENT).fleet

    assert alone.fleet is None
    assert joined == FleetSettings("own", "rediss://r:1", SECRET, "http://gpu-0/v1")
    assert SECRET not in repr(joined) and "rediss" not in repr(joined)


@pytest.mark.parametrize(
    ("flags", "environment", "words"),
    [
        (["--fleet-address", "http://gpu-0:8100/v1"], ENVIRONMENT, "say nothing without --fleet-pool"),
        (["--fleet-pool", "own"], {}, "the Redis of the gateways"),
        (["--fleet-pool", "own"], ENVIRONMENT | {"TOLLGATE_FLEET_REDIS": "cache:6379"}, "a URL such as redis://"),
        (["--fleet-pool", "own"], ENVIRONMENT | {"TOLLGATE_FLEET_SECRET": "short"}, "at least 20 characters"),
        (["--fleet-pool", "own", "--api-key", SECRET], ENVIRONMENT, "take another"),
        (["--fleet-pool", "own", "--fleet-address", "gpu-0:8100"], ENVIRONMENT, "of the form http://HOST:PORT/v1"),
        (["--fleet-pool", "own", "--fleet-address", "http://a@gpu-0/v1"], ENVIRONMENT, "of the form"),
    ],
)
def test_what_cannot_work_is_told(
    flags: list[str], environment: dict[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the start, by what would be right; never a secret."""
    with pytest.raises(SystemExit):
        read_settings(["--model", "m", *flags], environment)
    told = capsys.readouterr().err

    assert words in told and SECRET not in told


@pytest.mark.parametrize(
    ("host", "more", "right"),
    [
        ("10.0.0.5", {}, "http://10.0.0.5:8100/v1"),
        ("fd00::5", {}, "http://[fd00::5]:8100/v1"),
        ("0.0.0.0", {}, "http://127.0.0.1:8100/v1"),
        ("::", {"redis_url": "unix:///run/redis.sock"}, "http://127.0.0.1:8100/v1"),
        ("0.0.0.0", {"address": "https://gpu-0.internal/v1"}, "https://gpu-0.internal/v1"),
    ],
)
def test_an_engine_names_an_address_that_leads_to_it(host: str, more: dict[str, Any], right: str) -> None:
    """Where it listens everywhere: this machine's address on the way to Redis."""
    assert base_url_of(fleet(**more), host, 8100) == right


def test_an_engine_that_only_its_own_machine_reaches_is_not_announced_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gateway elsewhere would send prompts to a port of its own machine."""
    with pytest.raises(ValueError, match=r"say --host 0\.0\.0\.0, or by --fleet-address"):
        base_url_of(fleet(), "127.0.0.1", 8100, lambda redis_url: "10.0.0.5")
    assert base_url_of(fleet(), "0.0.0.0", 8100, lambda redis_url: "10.0.0.5") == "http://10.0.0.5:8100/v1"
    assert base_url_of(fleet(address="http://127.0.0.1:8100/v1"), "127.0.0.1", 8100) == "http://127.0.0.1:8100/v1"


def test_an_engine_says_what_it_serves() -> None:
    """Model and version, its state or that it leaves, the size of its blocks once it knows it, where its events are,
    and how its calls ended. It is active for no model that it has no more."""
    events = ["--kv-events-config", '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}']
    settings = read_settings(["--model", "m", "--fleet-pool", "own", *events], ENVIRONMENT)
    adapters = SimpleNamespace(by_name={})
    engine = SimpleNamespace(state=EngineState.STARTING, ready=None, adapters=adapters, model_number=0)
    metrics = SimpleNamespace(answered=5, failed=1)
    given: Any = {"checkpoint": None, "engine": engine, "metrics": metrics}
    given |= {"instance_id": "gpu-0-1", "node_id": "gpu-0"}
    front = Front(replace(settings, served_model_name="tiny", version="2"), **given)
    starting = front.announcement("http://gpu-0/v1", 1, 5.0)
    engine.state, engine.ready = EngineState.ACTIVE, READY
    active, leaving = (
        front.announcement("http://gpu-0/v1", 2, 6.0),
        front.announcement("http://gpu-0/v1", 3, 7.0, DRAINING),
    )
    engine.model_number = 1

    assert (starting.state, starting.block_size, starting.max_model_len) == ("starting", None, None)
    assert (active.state, active.block_size, active.max_model_len) == (ACTIVE, READY.block_size, READY.max_model_len)
    assert (active.pool, active.instance_id, active.base_url) == ("own", "gpu-0-1", "http://gpu-0/v1")
    assert active.names == {"tiny", "tiny@2"} and active.kv_events == KvEventsAt("tcp://*:5557")
    assert (leaving.state, leaving.number, leaving.sent_at) == (DRAINING, 3, 7.0)
    assert (active.answered, active.failed) == (5, 1)
    assert (
        front.announcement("http://gpu-0/v1", 4, 8.0).state == "starting"
    )  # it has another model, of which another tells


def test_an_engine_without_a_way_to_redis_says_so() -> None:
    """And how to do without."""
    with pytest.raises(OSError, match="--fleet-address says where"):
        base_url_of(fleet(redis_url="redis://no-such-host.invalid:6379"), "0.0.0.0", 8100)


async def test_it_ends_although_a_cancellation_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client of Redis may swallow one: the engine would announce itself for ever, and never end."""
    begun, lost = asyncio.Event(), list[str]()

    async def announce() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if lost:
                raise
            lost.append("the first")

    told: Any = SimpleNamespace(pool="own", instance_id="i")
    announcer = Announcer(fleet(redis_url="redis://127.0.0.1:9/0"), lambda *_: told, begun.wait)
    monkeypatch.setattr(announcer, "_announce", announce)
    await announcer.open()
    await begun.wait()
    await asyncio.wait_for(announcer.close(), 20)

    assert lost == ["the first"]


@pytest.mark.parametrize("is_well", [True, False])
async def test_the_warm_up_of_the_model_before_says_nothing_of_the_next(is_well: bool) -> None:
    """An engine that loads another model while it warms up is starting, until it may be called for that one."""
    states, ends = list[str | None](), [asyncio.get_running_loop().create_future() for _ in range(2)]
    told: Any = SimpleNamespace(instance_id="i", base_url="http://gpu-0/v1", pool="own")

    def describe(*said: Any) -> Any:
        states.append(said[-1])
        return told

    announcer = Announcer(fleet(redis_url="redis://127.0.0.1:9/0"), describe, lambda: ends[0])
    await announcer.open()
    following = asyncio.create_task(announcer.follow(describe, lambda: ends[1]))
    await asyncio.sleep(0.01)
    ends[0].set_result(None) if is_well else ends[0].set_exception(RuntimeError("ended"))
    await asyncio.sleep(0.01)
    between = announcer._state
    ends[1].set_result(None)
    await following
    await announcer.close()

    assert (between, announcer._state) == (STARTING, None)
