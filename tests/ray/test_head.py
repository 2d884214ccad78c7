# The head of a Ray cluster dies under calls that come at random, and comes back: `make test-ray`.

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
