# What can befall a house, by name: each fault strikes at once and returns when the house is whole again.

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from msgspec import Struct

from gateway.processes import descendants_of
from tests.support.fault_house import FaultHouse
from tests.support.fault_load import Attempt, Load
from tests.support.fault_service import Service, freeze

Fault = Callable[[FaultHouse, Load, random.Random], None]
FREEZE = 10.0  # seconds that Postgres or Redis stand still
DEAD_FOR = 1.0  # seconds at most between a death and the next start


class Outage(Struct, frozen=True):
    """A time in which something was away. Monotonic seconds."""

    fault: str
    struck: float
    healed: float


def strike(fault: str, house: FaultHouse, load: Load, dice: random.Random) -> Outage:
    """Let a fault happen and return when it was."""
    struck = time.monotonic()
    FAULTS[fault](house, load, dice)
    return Outage(fault, struck, time.monotonic())


def _kill_gateway(house: FaultHouse, _: Load, dice: random.Random) -> None:
    gateway = dice.choice(house.gateways)
    gateway.kill()
    _start_again(gateway, dice)


def _kill_gateway_after_done(house: FaultHouse, load: Load, dice: random.Random) -> None:
    """SIGKILL comes in the moment in which some client has read [DONE]."""
    killed: list[Service] = []
    done = threading.Event()

    def kill(attempt: Attempt) -> None:
        if not done.is_set():
            done.set()
            killed.append(house.gateways[attempt.gateway])
            killed[0].kill()

    load.on_done = kill
    assert done.wait(30), "no stream came to its end"
    load.on_done = lambda _: None
    _start_again(killed[0], dice)


def _kill_worker(house: FaultHouse, _: Load, dice: random.Random) -> None:
    house.worker.kill()
    _start_again(house.worker, dice)


def _kill_postgres(house: FaultHouse, _: Load, dice: random.Random) -> None:
    house.kill_server(house.postgres)
    time.sleep(dice.uniform(0, DEAD_FOR))
    house.postgres.start()


def _kill_redis(house: FaultHouse, _: Load, dice: random.Random) -> None:
    house.kill_server(house.redis)
    time.sleep(dice.uniform(0, DEAD_FOR))
    house.redis.start()


def _lose_redis(house: FaultHouse, _: Load, dice: random.Random) -> None:
    house.kill_server(house.redis)
    house.forget_redis()
    time.sleep(dice.uniform(0, DEAD_FOR))
    house.redis.start()


def _flush_redis(house: FaultHouse, _: Load, __: random.Random) -> None:
    house.flush_redis()


def _freeze_postgres(house: FaultHouse, _: Load, __: random.Random) -> None:
    pid = house.postgres.pid
    assert pid is not None
    freeze([pid, *descendants_of(pid)], FREEZE).wait(2 * FREEZE)


def _freeze_redis(house: FaultHouse, _: Load, __: random.Random) -> None:
    assert house.redis.pid is not None
    freeze([house.redis.pid], FREEZE).wait(2 * FREEZE)


def _freeze_gateway(house: FaultHouse, _: Load, dice: random.Random) -> None:
    freeze([dice.choice(house.gateways).pid], dice.uniform(2, 6)).wait(20)


def _start_again(service: Service, dice: random.Random) -> None:
    time.sleep(dice.uniform(0, DEAD_FOR))
    service.start()


FAULTS: dict[str, Fault] = {
    "gateway killed": _kill_gateway,
    "gateway killed after [DONE]": _kill_gateway_after_done,
    "gateway frozen": _freeze_gateway,
    "worker killed": _kill_worker,
    "Postgres killed": _kill_postgres,
    "Postgres frozen": _freeze_postgres,
    "Redis killed": _kill_redis,
    "Redis killed and emptied": _lose_redis,
    "Redis flushed": _flush_redis,
    "Redis frozen": _freeze_redis,
}
POSTGRES_FAULTS = {name for name in FAULTS if name.startswith("Postgres")}
REDIS_FAULTS = {name for name in FAULTS if name.startswith("Redis")}
