# What a connection to Redis that goes away is told as.

from __future__ import annotations

import pytest
import uvloop
from redis.exceptions import ConnectionError as RedisConnectionError

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
