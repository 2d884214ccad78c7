# What can befall a house, by name. A fault is written as it happens: it strikes, at its ``yield`` the house goes on
# without what was hit, and then all is made whole again. Two faults can so happen one after the other, or at once.

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from msgspec import Struct
from redis import Redis
from redis.exceptions import TimeoutError as NoAnswer

from gateway.dev.embedded import EmbeddedServer
from gateway.run.processes import descendants_of
from tests.support.fault_house import FaultHouse
from tests.support.fault_load import Attempt, Load
from tests.support.fault_service import Service, freeze
from tests.support.standby import senders_of
from tests.support.waiting import until

Fault = Callable[[FaultHouse, Load, random.Random], Iterator[None]]
FREEZE = 10.0  # seconds that Postgres or Redis stand still
LONG_FREEZE = 40.0  # seconds that a gateway may stand still: longer than the lease of a hold
DEAD_FOR = 1.0  # seconds at most between a death and the next start


class Outage(Struct, frozen=True):
    """A time in which something was away. Monotonic seconds."""

    fault: str
    struck: float
    healed: float


def suffer(names: Sequence[str], house: FaultHouse, load: Load, dice: random.Random) -> list[Outage]:
    """Let faults happen, all of them at once, and return when each was."""
    struck = []
    for name in names:
        fault = FAULTS[name](house, load, dice)
        began = time.monotonic()
        next(fault)
        struck.append((name, fault, began))
        time.sleep(dice.uniform(0, DEAD_FOR))
    dice.shuffle(struck)
    outages = []
    for name, fault, began in struck:
        for _ in fault:
            raise AssertionError(f"{name} strikes twice")
        outages.append(Outage(name, began, time.monotonic()))
    return outages


def _kill_gateway(house: FaultHouse, _: Load, dice: random.Random) -> Iterator[None]:
    gateway = dice.choice([gateway for gateway in house.gateways if gateway.is_running])
    gateway.kill()
    yield
    gateway.start()


def _kill_gateway_after_done(house: FaultHouse, load: Load, _: random.Random) -> Iterator[None]:
    """SIGKILL comes in the moment in which some client has read [DONE]."""
    killed: list[Service] = []
    is_done = threading.Event()

    def kill(attempt: Attempt) -> None:
        gateway = house.gateways[attempt.gateway]
        if not is_done.is_set() and gateway.is_running:
            gateway.kill()
            killed.append(gateway)
            is_done.set()

    load.on_done = kill
    assert is_done.wait(30), "no stream came to its end"
    load.on_done = lambda _: None
    yield
    killed[0].start()


def _freeze_gateway(house: FaultHouse, _: Load, dice: random.Random) -> Iterator[None]:
    gateway = dice.choice([gateway for gateway in house.gateways if gateway.is_running])
    seconds = dice.uniform(2, 6) if dice.random() < 0.8 else LONG_FREEZE
    thaw = freeze([gateway.pid], seconds)
    yield
    thaw.wait(2 * LONG_FREEZE)


def _kill_worker(house: FaultHouse, _: Load, __: random.Random) -> Iterator[None]:
    house.worker.kill()
    yield
    house.worker.start()


def _kill_postgres(house: FaultHouse, _: Load, __: random.Random) -> Iterator[None]:
    house.kill_server(house.postgres)
    yield
    house.postgres.start()


def _freeze_postgres(house: FaultHouse, _: Load, __: random.Random) -> Iterator[None]:
    yield from _freeze_server(house.postgres)


def _demote_postgres(house: FaultHouse, _: Load, dice: random.Random) -> Iterator[None]:
    """A replica that lags takes the place of Postgres, and what it has not heard of is forgotten."""
    standby = house.add_standby()
    senders = until(lambda: senders_of(house.postgres))
    for pid in senders:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(dice.uniform(0.2, 1.5))
    for pid in senders:
        os.kill(pid, signal.SIGKILL)
    house.kill_server(house.postgres)
    yield
    standby.promote()
    house.turn_to(standby)


def _lose_commits(house: FaultHouse, _: Load, dice: random.Random) -> Iterator[None]:
    """Postgres does what it is asked to, and the connection breaks before it can say so, as behind a pooler."""
    house.way.lose_commits()
    yield from _for_a_while(dice)
    house.way.mend()


def _kill_redis(house: FaultHouse, _: Load, __: random.Random) -> Iterator[None]:
    house.kill_server(house.redis)
    yield
    house.redis.start()


def _lose_redis(house: FaultHouse, _: Load, __: random.Random) -> Iterator[None]:
    house.kill_server(house.redis)
    house.forget_redis()
    yield
    house.redis.start()


def _age_redis(house: FaultHouse, _: Load, dice: random.Random) -> Iterator[None]:
    """Redis comes back as it was a while ago, as where a replica that lags takes over."""
    aof = house.redis.data_dir / house.redis.name / "appendonlydir"
    before = aof.with_name("before")
    shutil.rmtree(before, ignore_errors=True)
    shutil.copytree(aof, before)
    time.sleep(dice.uniform(0.5, 3))
    house.kill_server(house.redis)
    shutil.rmtree(aof)
    before.rename(aof)
    yield
    house.redis.start()


def _flush_redis(house: FaultHouse, _: Load, __: random.Random) -> Iterator[None]:
    house.flush_redis()
    yield


def _freeze_redis(house: FaultHouse, _: Load, __: random.Random) -> Iterator[None]:
    yield from _freeze_server(house.redis)


def _freeze_server(server: EmbeddedServer) -> Iterator[None]:
    assert server.pid is not None
    thaw = freeze([server.pid, *descendants_of(server.pid)], FREEZE)
    yield
    thaw.wait(2 * FREEZE)


def _make_redis_unwilling(house: FaultHouse, _: Load, dice: random.Random) -> Iterator[None]:
    """Redis runs, and refuses: it has no replicas, no memory, no permission for scripts, or runs somebody else's."""
    with Redis.from_url(house.redis.url, socket_timeout=5) as redis:
        match dice.choice(("replicas", "memory", "permission", "script")):
            case "replicas":
                redis.config_set("min-replicas-to-write", 1)
                yield from _for_a_while(dice)
                redis.config_set("min-replicas-to-write", 0)
            case "memory":
                redis.config_set("maxmemory", 1)
                yield from _for_a_while(dice)
                redis.config_set("maxmemory", 0)
            case "permission":
                redis.execute_command("ACL", "SETUSER", "default", "-eval", "-evalsha", "-script")
                yield from _for_a_while(dice)
                redis.execute_command("ACL", "SETUSER", "default", "+@all")
            case "script":
                redis.config_set("busy-reply-threshold", 200)
                with Redis.from_url(house.redis.url, socket_timeout=0.1, retry=None) as other, suppress(NoAnswer):
                    other.eval("while true do end", 0)
                yield from _for_a_while(dice)
                redis.script_kill()


def _for_a_while(dice: random.Random) -> Iterator[None]:
    yield
    time.sleep(dice.uniform(1, 4))


FAULTS: dict[str, Fault] = {
    "gateway killed": _kill_gateway,
    "gateway killed after [DONE]": _kill_gateway_after_done,
    "gateway frozen": _freeze_gateway,
    "worker killed": _kill_worker,
    "Postgres killed": _kill_postgres,
    "Postgres demoted": _demote_postgres,
    "Postgres frozen": _freeze_postgres,
    "Postgres unheard": _lose_commits,
    "Redis killed": _kill_redis,
    "Redis killed and emptied": _lose_redis,
    "Redis killed and aged": _age_redis,
    "Redis flushed": _flush_redis,
    "Redis frozen": _freeze_redis,
    "Redis unwilling": _make_redis_unwilling,
}


def of(part: str) -> set[str]:
    """Return the faults that hit a part of the house."""
    return {name for name in FAULTS if name.startswith(part)}
