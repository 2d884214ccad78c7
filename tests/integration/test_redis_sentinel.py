# Redis behind sentinels, played by real processes: the primary dies, a replica is promoted, and rates go on where they
# were, with one of the sentinels gone in the worst way: it takes connections and says nothing.

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from billing.core.holds import HoldRequest, Leg, Limits, Scope
from billing.quotas.rates import RateLimits
from gateway.core.clock import Clock
from gateway.dev.embedded.valkey import _find_valkey_binary
from gateway.run.processes import free_port
from protocol.serving.redis_client import open_redis

TEAM = Scope("team", "t", Limits(requests_per_minute=40))


class Guarded(NamedTuple):
    """A primary with its replica, and the URL of their sentinels."""

    url: str
    primary: subprocess.Popen[bytes]
    replica: Redis
    sentinel: int  # port


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    primary, replica, sentinel = free_port(), free_port(), free_port()
    common = 'bind 127.0.0.1\nsave ""\n'
    closed = f"{common}requirepass secret\nmasterauth secret\nrepl-diskless-sync-delay 0\n"
    configs = {
        "primary": f"{closed}port {primary}\n",
        "replica": f"{closed}port {replica}\nreplicaof 127.0.0.1 {primary}\n",
        "sentinel": (
            f"{common}port {sentinel}\nrequirepass guard\nsentinel monitor rates 127.0.0.1 {primary} 1\n"
            "sentinel auth-pass rates secret\nsentinel down-after-milliseconds rates 300\n"
        ),
    }
    with ExitStack() as stack:

        def start(name: str) -> subprocess.Popen[bytes]:
            folder = tmp_path / name
            folder.mkdir()
            (folder / "valkey.conf").write_text(configs[name])
            command = [_find_valkey_binary(), "valkey.conf", *(["--sentinel"] if name == "sentinel" else [])]
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        mute = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        async with Redis(port=replica, password="secret") as other, asyncio.timeout(15):
            of_primary = start("primary")
            start("replica")
            while not await _is(other.info("replication"), "master_link_status", "up"):
                await asyncio.sleep(0.05)
            start("sentinel")  # it looks for replicas when it starts, and then every ten seconds
            async with Redis(port=sentinel, password="guard") as guard:
                while not await _is(guard.sentinel_master("rates"), "num-slaves", 1):
                    await asyncio.sleep(0.05)
            yield Guarded(
                f"redis+sentinel://:secret@127.0.0.1:{mute.getsockname()[1]},127.0.0.1:{sentinel}/rates/0"
                "?sentinel_password=guard",
                of_primary,
                other,
                sentinel,
            )


async def _is(asked: Awaitable[dict[str, Any]], field: str, value: object) -> bool:
    """Whether a server that may not be up yet says this of itself."""
    try:
        return (await asked).get(field) == value
    except (RedisError, OSError):
        return False


def request_of_team() -> HoldRequest:
    return HoldRequest(request_id=Clock().new_id(), team_id="t", scopes=(TEAM,), legs=(Leg("a", 1, 0),))


async def admit(rates: RateLimits) -> bool:
    """Whether a call is counted, which ends at once."""
    request = request_of_team()
    is_in = bool(rates.take(request)) or await rates.ask(request) is None
    if is_in:
        rates.settle(request, 1)
    return is_in


async def test_a_primary_that_dies_is_replaced_and_rates_go_on(guarded: Guarded) -> None:
    """No call waits or fails, the promoted replica knows what was counted, and the minute has its limit and no more."""
    async with AsyncExitStack() as stack:
        redis, rates = [], []
        for owner in ("a", "b"):
            client = await stack.enter_async_context(open_redis(guarded.url, timeout=0.25))
            redis.append(client)
            rates.append(RateLimits(client, Clock(), owner=owner))
            stack.push_async_callback(rates[-1].close)
        telling = asyncio.create_task(rates[0].run())
        stack.callback(telling.cancel)

        admitted = [await admit(rates[0]) for _ in range(10)]
        await rates[0].tell()
        assert not rates[0].is_away
        await redis[0].set("kept", "here")
        assert await redis[0].wait(1, 1000) == 1
        guarded.primary.send_signal(signal.SIGKILL)
        saw_away = False
        async with asyncio.timeout(12):
            while rates[0].is_away or not saw_away:
                if sum(admitted) < 20:
                    admitted.append(await admit(rates[0]))
                saw_away = saw_away or rates[0].is_away
                await asyncio.sleep(0.05)
        kept = await redis[0].get("kept")
        role = (await guarded.replica.info("replication"))["role"]
        admitted += [await admit(rates[0]) for _ in range(40)]
        async with asyncio.timeout(5):  # until what is free again was told
            while (await guarded.replica.hget("tollgate:{t}:rates:minute:team", "sums") or b"").split()[1:2] != [b"40"]:
                await asyncio.sleep(0.05)
        await rates[1].start()
        by_another = [await admit(rates[1]) for _ in range(5)]

    assert kept == b"here"
    assert role == "master"
    assert sum(admitted) == 40 and not any(by_another)
    assert all(admitted[:20])


@pytest.mark.soak  # a sentinel takes ten seconds until it promotes a replica of a primary that lives
async def test_a_demoted_primary_is_left(guarded: Guarded) -> None:
    """A primary that lives on as a replica takes no writes: the next command goes to the new one."""
    async with open_redis(guarded.url, timeout=0.25) as redis:
        await redis.set("word", "first")
        async with asyncio.timeout(12):
            async with Redis(port=guarded.sentinel, password="guard") as sentinel:
                while not await _fails_over(sentinel):
                    await asyncio.sleep(0.1)
            while (await guarded.replica.info("replication"))["role"] != "master":
                await asyncio.sleep(0.05)
            while await guarded.replica.get("word") != b"second":
                try:
                    await redis.set("word", "second")
                except (RedisError, TimeoutError):
                    await asyncio.sleep(0.05)


async def _fails_over(sentinel: Redis) -> bool:
    """Have a replica promoted; not before the sentinel has asked it how it does."""
    try:
        return bool(await sentinel.execute_command("SENTINEL FAILOVER", "rates"))
    except ResponseError as exc:
        assert "NOGOODSLAVE" in str(exc)
        return False


async def test_sentinels_that_know_nothing_are_a_redis_that_is_away(guarded: Guarded) -> None:
    """A service that they do not watch, or none that answers: an error that says so, within the patience."""
    async with open_redis(guarded.url.replace("/rates/", "/others/"), timeout=0.1) as redis:
        async with asyncio.timeout(5):
            with pytest.raises(RedisConnectionError, match="'others'"):
                await redis.connection_pool.get_master_address()
