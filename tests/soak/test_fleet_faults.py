# What can befall a fleet, under calls that come at random: controllers stand still or die, heartbeats come late, Redis
# is silent, replicas hang or die. Calls are answered, each has one row, and there are as many replicas as should be.

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.placing.plan import LOST_FOR
from gateway.placing.records import LASTS
from tests.support.fault_service import freeze, frozen
from tests.support.fleet_house import TARGET, WITHIN, FleetHouse, OpenLoad, end_politely, running_fleet
from tests.support.paced_replica import KV_FAULT
from tests.support.waiting import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

RATE = 8.0  # calls a second


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FleetHouse]:
    """Two gateways, two controllers, three replicas."""
    with running_fleet(tmp_path) as house:
        house.control()
        house.settled()
        yield house


@pytest.fixture
def load(fleet: FleetHouse) -> OpenLoad:
    """Calls that go to both gateways."""
    return OpenLoad([gateway.url for gateway in fleet.gateways], fleet.key, RATE)


def kill(house: FleetHouse, name: str) -> None:
    """Let a replica's machine lose its power."""
    os.kill(house.replicas()[name], signal.SIGKILL)


def test_one_controller_acts_whatever_befalls_them(fleet: FleetHouse, load: OpenLoad) -> None:
    """They stand still for longer than the lease lasts, with a start to be made, and are killed: the other one goes on
    with the replicas that are there, and none is started twice."""
    dice = random.Random(3)
    with load.running(), fleet.counted():
        load.wait_for(10)
        for _ in range(4):
            acting, there = fleet.acting(), fleet.settled()
            time.sleep(dice.uniform(0, 0.5))
            victim = min(there)
            kill(fleet, victim)
            time.sleep(dice.uniform(0.5, 1.5))  # the next one starts a second later: before, at, or after this moment
            with frozen([acting.pid]):
                time.sleep(LASTS + 1.5)
            fleet.settled(but={victim})
        for _ in range(2):
            victim = min(fleet.settled())
            acting = fleet.acting()
            kill(fleet, victim)
            acting.kill()
            acting.wait()
            fleet.control()
            fleet.settled(but={victim})
    statuses = end_politely(fleet)

    assert load.lost() == []
    assert max(fleet.counts) <= TARGET + 1
    assert fleet.complaints(load.calls) == []
    assert (statuses[-1], fleet.replicas()) == (0, {})  # one that waits may not have begun to listen to signals


@pytest.mark.parametrize("late", [0.1, 0.2, 0.3, 1.0])
def test_late_heartbeats_end_no_replica(late: float, fleet: FleetHouse, load: OpenLoad) -> None:
    """The way from replicas and controllers to Redis has a delay that lets each heartbeat come late, or none: replicas
    stay, and are asked again at once when it is over. Where gateways hear none for ten seconds they ask none."""
    before = fleet.settled()
    with load.running():
        load.wait_for(10)
        began = time.monotonic()
        fleet.way.late = late
        time.sleep(LOST_FOR - 12)
        fleet.way.late = 0.0
        over = time.monotonic()
        after = fleet.settled()
        load.wait_for(10)
    print({"late": late, "calls": len(load.calls), "lost": len(load.lost()), "silence": load.silence()})
    refused = [call for call in load.lost() if call.status == 503 and began + 10 < call.ended < over + 5]

    assert after == before
    assert load.lost() == (refused if late >= 0.3 else [])
    assert fleet.complaints(load.calls) == []


@pytest.mark.parametrize("seconds", [4.0, 15.0, LOST_FOR + 8])
def test_a_silent_redis_ends_no_replica(seconds: float, fleet: FleetHouse, load: OpenLoad) -> None:
    """It takes connections and answers nothing, however long: gateways go on with the replicas that they know."""
    before = fleet.settled()
    assert fleet.redis.pid is not None
    with load.running(), fleet.counted():
        load.wait_for(10)
        thaw = freeze([fleet.redis.pid], seconds)
        thaw.wait(seconds + 30)
        after = fleet.settled()
        load.wait_for(10)
        time.sleep(LASTS)
    print({"silent": seconds, "calls": len(load.calls), "lost": len(load.lost()), "silence": load.silence()})

    assert after == before and set(fleet.counts) == {TARGET}
    assert load.lost() == []
    assert fleet.complaints(load.calls) == []


def test_replicas_hang_and_die(fleet: FleetHouse, load: OpenLoad) -> None:
    """One stands still and is replaced once it is not heard for long enough; two die at once."""
    with load.running(), fleet.counted():
        load.wait_for(10)
        hangs = min(fleet.settled())
        os.kill(fleet.replicas()[hangs], signal.SIGSTOP)
        after = fleet.settled(but={hangs})
        for victim in sorted(after)[:2]:
            kill(fleet, victim)
        last = fleet.settled(but=sorted(after)[:2])
        load.wait_for(10)
    print({"calls": len(load.calls), "lost": load.lost(), "silence": load.silence()})

    assert len(last & after) == 1
    assert load.lost() == []
    assert max(fleet.counts) <= TARGET + 1
    assert fleet.complaints(load.calls) == []


@pytest.mark.parametrize("answers", ["at once", "late", "silent", "short"])
def test_gaps_in_kv_events(answers: str, fleet: FleetHouse, load: OpenLoad) -> None:
    """Of the events some are lost, some come in another order, and what is asked for again comes late, not at all or
    not whole: calls go on, and soon after it is over both gateways know again what each replica has cached."""
    fault, beats = fleet.folder / KV_FAULT, list[float]()
    with load.running(), fleet.counted():
        load.wait_for(60)
        before = until(fleet.marks_that_are_right, within=WITHIN)
        fault.write_text(f"lose reorder {answers}")
        over = time.monotonic() + 25
        while time.monotonic() < over:
            began = time.monotonic()
            assert httpx.get(fleet.gateways[0].url + "/health/live", timeout=20).status_code == 200
            beats.append(time.monotonic() - began)
            time.sleep(0.1)
        fault.unlink()
        load.wait_for(150)
    after = until(fleet.marks_that_are_right, within=5)  # sooner than gateways ask for what no later event has told of
    print({"calls": len(load.calls), "lost": len(load.lost()), "slowest": max(beats), "marks": (before, after)})

    assert load.lost() == []
    assert set(fleet.counts) == {TARGET}
    assert max(beats) < 2.0
    assert fleet.complaints(load.calls) == []
