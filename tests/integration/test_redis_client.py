# What a connection to Redis that goes away is told as.

from __future__ import annotations

import asyncio
import time

import pytest
import uvloop
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeout

from protocol.serving.redis_client import open_redis


def test_a_connection_closed_under_a_command_is_a_redis_that_is_away(redis_url: str) -> None:
    """On the gateway's own event loop, which has another word for it."""

    async def speak_to_nobody() -> None:
        redis = open_redis(redis_url, timeout=2.0)
        connection = await redis.connection_pool.get_connection()
        connection._writer.transport.abort()
        try:
            with pytest.raises(RedisConnectionError, match="closed"):
                await connection.send_command("PING")
        finally:
            await redis.aclose()

    uvloop.run(speak_to_nobody())


def test_an_answer_that_came_while_the_process_stood_still_is_read(redis_url: str) -> None:
    """The loop sees to timers before sockets: what lies there is read before it is called late."""

    async def stand_still() -> object:
        async with open_redis(redis_url, timeout=0.4) as redis:
            await redis.ping()
            asking = asyncio.create_task(redis.blpop(["nothing-comes"], timeout=0.1))
            await asyncio.sleep(0.02)
            time.sleep(1.0)
            return await asking

    assert uvloop.run(stand_still()) is None


def test_a_connection_that_stood_while_the_process_did_not_run_is_used(redis_url: str) -> None:
    """As an answer is."""

    async def stand_still() -> object:
        async with open_redis(redis_url, timeout=0.4) as redis:
            asyncio.get_running_loop().call_later(0.0, time.sleep, 1.0)
            return await redis.ping()

    assert uvloop.run(stand_still()) is True


def test_a_redis_that_says_nothing_is_away(redis_url: str) -> None:
    """After as long as it is given."""

    async def wait() -> None:
        async with open_redis(redis_url, timeout=0.4) as redis:
            await redis.ping()
            with pytest.raises(RedisTimeout):
                await redis.blpop(["nothing-comes"], timeout=20)

    uvloop.run(wait())
