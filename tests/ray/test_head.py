# The head of a Ray cluster, or a machine of it, dies under calls that come at random: `make test-ray`.

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from tests.support.fleet_house import TARGET, OpenLoad, end_politely, running_fleet
from tests.support.ray_cluster import running_cluster

pytest.importorskip("ray", reason="SKIPPED: Ray is not installed: pip install 'tollgate[ray]'")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

RATE = 6.0  # calls a second


def test_replicas_outlive_the_head(tmp_path: Path) -> None:
    """While it is away the replicas that are there answer, and none is started or ended; once it is back, on what it
    kept, the controller that was there goes on with them, and replaces one that died meanwhile. No call is lost."""
    with (
        tempfile.TemporaryDirectory(prefix="ray") as short,
        running_cluster(Path(short), {**os.environ}) as cluster,
        running_fleet(tmp_path, "ray", **cluster.environment) as house,
    ):
        load = OpenLoad([gateway.url for gateway in house.gateways], house.key, RATE)
        before = house.settled()
        with load.running():
            load.wait_for(20)
            cluster.kill_head()
            load.wait_for(60)
            stays = set(house.replicas())
            victim = min(before)
            os.kill(house.replicas()[victim], signal.SIGKILL)
            load.wait_for(60)
            fewer = set(house.replicas())
            cluster.bring_head_back()
            after = house.settled(but={victim})
            load.wait_for(20)
        ended = end_politely(house)
        print({"calls": len(load.calls), "silence": load.silence()})

        assert len(house.told("replica_started")) == TARGET + 1
        assert (stays, fewer) == (before, before - {victim}) and after > fewer
        assert load.lost() == []
        assert house.complaints(load.calls) == []
        assert (ended, house.replicas()) == ([0], {})


def test_a_machine_dies(tmp_path: Path) -> None:
    """With its raylet, actors and engines at once: the others answer, in mid-stream as well, and once another machine
    has room replicas are started there, as many as have died. No call is lost."""
    with (
        tempfile.TemporaryDirectory(prefix="ray") as short,
        running_cluster(Path(short), {**os.environ}, cpus=2) as cluster,
    ):
        cluster.add_machine(dying := "127.0.0.3", cpus=TARGET)
        with running_fleet(tmp_path, "ray", **cluster.environment) as house:
            load = OpenLoad([gateway.url for gateway in house.gateways], house.key, RATE)
            before = house.settled()
            gone = {name for name, pid in house.replicas().items() if pid in cluster.processes_of(dying)}
            with load.running():
                load.wait_for(30)
                cluster.kill_machine(dying)
                load.wait_for(60)
                fewer = set(house.replicas())
                cluster.add_machine("127.0.0.4", cpus=TARGET)
                after = house.settled(but=gone)
                load.wait_for(20)
            ended = end_politely(house)
            print({"calls": len(load.calls), "gone": len(gone), "silence": load.silence()})

            assert 0 < len(gone) < TARGET and fewer == before - gone and after > fewer
            assert load.lost() == []
            assert house.complaints(load.calls) == []
            assert (ended, house.replicas()) == ([0], {})
