# One script's calls over one connection to a real Valkey: whose answer is whose, and what becomes of a broken one.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from billing.script import Script
from billing.store_errors import REDIS_AWAY, redis_refuses
from tests.support.redis_proxy import RedisProxy, Way, redis_proxy

TEXT = """
if ARGV[1] == 'fail' then return redis.error_reply('ERR as told') end
redis.call('INCR', KEYS[1])
return {ARGV[1]}
"""


@pytest.fixture
async def proxy(redis: Redis, redis_url: str) -> AsyncIterator[RedisProxy]:
    """A way to an empty Valkey."""
    async with redis_proxy(redis_url) as way:
        yield way


@pytest.fixture
async def script(proxy: RedisProxy) -> AsyncIterator[Script]:
    """A script that answers what it is told, by the proxy's way."""
    client: Redis = Redis.from_url(proxy.url)
    script = Script(client, TEXT, deadline=0.25)
    yield script
    await script.close()
    await client.aclose()


@pytest.fixture
async def patient(redis_url: str, redis: Redis) -> AsyncIterator[Script]:
    """The same by the short way, with time for a busy machine."""
    client: Redis = Redis.from_url(redis_url)
    script = Script(client, TEXT, deadline=5.0)
    yield script
    await script.close()
    await client.aclose()


async def test_everyone_gets_the_answer_to_their_own_call(patient: Script, redis: Redis) -> None:
    """A thousand at once, a quarter of whom fail and a quarter of whom leave: nobody hears another's answer."""

    async def ask(number: int) -> object:
        word = "fail" if number % 4 == 1 else str(number)
        return (await patient.call("count", word))[0]

    tasks = [asyncio.create_task(ask(number)) for number in range(1000)]
    await asyncio.sleep(0)
    for task in tasks[::4]:
        task.cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[::4])
    assert all(isinstance(answer, ResponseError) and redis_refuses(answer) for answer in answers[1::4])
    assert [answer for number, answer in enumerate(answers) if number % 4 > 1] == [
        str(number).encode() for number in range(1000) if number % 4 > 1
    ]
    assert len(await redis.client_list(_type="normal")) == 2  # ours, and the one that asks


async def test_what_is_no_reply_breaks_the_connection_and_not_the_call(patient: Script) -> None:
    """The trip is made again over a new one."""
    await patient.call("count", "first")
    call = asyncio.create_task(patient.call("count", "second"))
    await asyncio.sleep(0)
    assert patient._line is not None
    patient._line.data_received(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    assert await call == [b"second"]


async def test_a_connection_on_which_nothing_comes_is_given_up(script: Script, proxy: RedisProxy) -> None:
    """Its caller gets a timeout; the next ones go by a new connection, though nobody has closed the old one."""
    await script.call("count", "first")
    proxy.way = Way.SILENT
    with pytest.raises(TimeoutError):
        await script.call("count", "lost")
    proxy.way = Way.OPEN  # and what was said meanwhile is gone

    for _ in range(20):
        try:
            assert await script.call("count", "next") == [b"next"]
            break
        except TimeoutError:
            continue
    else:
        pytest.fail("the silent connection was kept")


async def test_a_way_that_is_cut_fails_calls_and_heals(script: Script, proxy: RedisProxy) -> None:
    """Those on their way hear of it, and the next call after the outage is served."""
    await script.call("count", "first")
    proxy.turn(Way.CUT)
    outcomes = await asyncio.gather(*(script.call("count", str(n)) for n in range(5)), return_exceptions=True)
    proxy.turn(Way.OPEN)

    assert all(isinstance(outcome, REDIS_AWAY) for outcome in outcomes)
    for _ in range(20):
        try:
            assert await script.call("count", "next") == [b"next"]
            break
        except REDIS_AWAY:
            await asyncio.sleep(0.05)
    else:
        pytest.fail("no call was served after the outage")
