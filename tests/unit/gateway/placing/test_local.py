# Replicas as processes of this machine: what they are told, and which GPUs they get.

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.core.settings import EngineSpec, Rollout
from gateway.placing.local import LocalPlacer
from gateway.placing.placer import CannotPlace, Order, new_name, order_for, read_name, revision_of
from gpu_backend.__main__ import read_settings
from tests.support.waiting import until

SLEEPS = (sys.executable, "-S", "-c", "import time; time.sleep(600)")
SECRET = "a secret of the fleet 0123"


@pytest.fixture
def placer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalPlacer]:
    """A placer on a machine of three GPUs, whose processes do nothing."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    placer = LocalPlacer(tmp_path, SLEEPS)
    yield placer
    for name in placer.names():
        placer.kill(name)
    until(lambda: not placer.names())


def order(name: str, gpus: int, **environment: str) -> Order:
    """Return what is started as a replica of that name."""
    return Order(
        name=name, arguments=("--instance-id", name), environment=environment, inherited=("OURS_*", "MINE"), gpus=gpus
    )


def test_each_replica_has_gpus_of_its_own(placer: LocalPlacer, tmp_path: Path) -> None:
    """Also those that an earlier controller started; one for which too few are free is not started, and says so."""
    first, second, third = (new_name("own", "0" * 12) for _ in range(3))
    placer.start(order(first, 2))
    until(lambda: LocalPlacer(tmp_path, SLEEPS).names() == {first})
    later = LocalPlacer(tmp_path, SLEEPS)
    with pytest.raises(CannotPlace, match="it needs GPUs: 2, and 1 of 3 are free"):
        later.start(order(second, 2))
    later.start(order(third, 1))
    before = set(later.names())
    placer.stop(first)
    until(lambda: first not in placer.names())
    left = set(later.names())
    later.kill(third)
    until(lambda: not later.names())

    assert (before, left) == ({first, third}, {third})


def test_a_replica_inherits_no_secret_of_the_controller(placer: LocalPlacer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program, CUDA and the hub go by is there, and what the file names besides; the keys of providers, admins
    and stores are not."""
    known = {"HOME": "/home/x", "LC_ALL": "C.UTF-8", "NCCL_DEBUG": "WARN", "HF_HOME": "/hub", "https_proxy": "p:1"}
    named = {"OURS_A": "1", "MINE": "2"}
    withheld = ("OPENAI_API_KEY", "TOLLGATE_ADMIN_KEY", "DATABASE_URL", "TOLLGATE_DIE_WITH_PARENT", "MINE_TOO")
    for name, value in (known | named | dict.fromkeys(withheld, "s")).items():
        monkeypatch.setenv(name, value)
    name = new_name("own", "0" * 12)
    placer.start(order(name, 0, TOLLGATE_FLEET_SECRET=SECRET))
    pairs = Path(f"/proc/{placer._pids[name]}/environ").read_bytes().decode().split("\0")
    told = dict(pair.split("=", 1) for pair in pairs if pair)

    assert (
        known.items() | named.items() | {("TOLLGATE_FLEET_SECRET", SECRET), ("PATH", os.environ["PATH"])}
        <= told.items()
    )
    assert told.keys().isdisjoint(withheld)


def test_what_another_placer_starts_is_seen(placer: LocalPlacer, tmp_path: Path) -> None:
    """A controller that stood still while its lease ended may start a replica yet: the one that acts sees it, and ends
    what is too many."""
    before = set(placer.names())
    stray = new_name("own", "0" * 12)
    LocalPlacer(tmp_path, SLEEPS).start(order(stray, 0))

    assert (before, set(placer.names())) == (set(), {stray})


def test_gpus_of_another_folder_are_taken(placer: LocalPlacer, tmp_path: Path) -> None:
    """Two deployments on one machine, each with a controller and a data directory, share its GPUs."""
    placer.start(order(new_name("own", "0" * 12), 2))
    other = LocalPlacer(tmp_path / "other", SLEEPS)

    with pytest.raises(CannotPlace, match="it needs GPUs: 2, and 1 of 3 are free"):
        other.start(order(new_name("own", "1" * 12), 2))
    assert not other.names()


def test_controllers_that_begin_together_take_no_gpu_twice(placer: LocalPlacer, tmp_path: Path) -> None:
    """As those of a machine that was started anew: of six starts of one GPU each, three have one."""
    placers = [placer, LocalPlacer(tmp_path / "other", SLEEPS)]

    def start(number: int) -> bool:
        try:
            LocalPlacer(placers[number % 2]._folder, SLEEPS).start(order(new_name("own", "0" * 12), 1))
        except CannotPlace:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        started = list(pool.map(start, range(6)))
    pids = [pid for each in placers for name in each.names() for pid in [each._pids[name]]]
    given = [Path(f"/proc/{pid}/environ").read_bytes().split(b"CUDA_VISIBLE_DEVICES=")[1][:1] for pid in pids]
    for name in placers[1].names():
        placers[1].kill(name)

    assert sum(started) == 3 and sorted(given) == [b"0", b"1", b"2"]


def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    """By its name."""
    with pytest.raises(CannotPlace, match="/nowhere/python cannot be started: No such file"):
        LocalPlacer(tmp_path, ("/nowhere/python",)).start(order("own.0", 0))


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """At the opening, and before a start: a controller then keeps what runs, and tries again."""
    (tmp_path / "file").touch()
    placer = LocalPlacer(tmp_path / "logs", SLEEPS)
    (tmp_path / "logs").rmdir()
    with pytest.raises(CannotPlace, match=r"own\.0\.log cannot be written: No such file"):
        placer.start(order("own.0", 0))
    with pytest.raises(CannotPlace, match="file cannot be made: File exists"):
        LocalPlacer(tmp_path / "file", SLEEPS)


def test_an_engine_is_told_its_name_and_its_pool() -> None:
    """The engine understands all that it is told; no argument shows a secret."""
    engine = EngineSpec(model="m", arguments=("--max-model-len", "512"), warm_up=("Hi.",))
    name = new_name("own.eu", revision_of(engine))
    environment = {"TOLLGATE_FLEET_SECRET": SECRET, "TOLLGATE_FLEET_REDIS": "redis://127.0.0.1:6379/0"}
    told = order_for(name, engine, Rollout(drain=7.5), environment)
    settings = read_settings(told.arguments, told.environment)

    assert read_name(name) == ("own.eu", revision_of(engine)) != read_name(f"{name[:-1]}")
    assert (settings.instance_id, settings.port, settings.warm_up, settings.drain_seconds) == (name, 0, ("Hi.",), 7.5)
    assert settings.fleet is not None and settings.fleet.pool == "own.eu"
    assert SECRET not in " ".join(told.arguments)


def test_another_kind_of_replica_is_another_revision() -> None:
    """Whatever of it changes; what does not matter to a replica is no part of it."""
    one = EngineSpec(model="m")
    others = (EngineSpec(model="m", version="b"), EngineSpec(model="n"), EngineSpec(model="m", arguments=("--x",)))

    assert len({revision_of(each) for each in (one, EngineSpec(model="m"), *others)}) == 4
    assert read_name("gpu-0:8100") is None
