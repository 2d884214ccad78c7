# rates.lua over one connection of redis-py: commands go out together, and their answers are handed over as they come.
# A pipeline of redis-py costs twice as much (docs/experiments/money/rates-one-conversation.md).

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from hashlib import sha1
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import InvalidResponse, RedisError, ResponseError

from billing.quotas.rate_team import MOST, Command

# What a call to Redis may raise while it is away; the last four by redis-py, over bytes that are no answer.
REDIS_AWAY = (RedisError, OSError, AttributeError, LookupError, TypeError, ValueError)

# Errors of a Redis that cannot serve now and may later. Any other error is about the command alone.
NOT_NOW = re.compile(
    r"(^|-)(OOM|READONLY|LOADING|MISCONF|BUSY|NOSCRIPT|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOREPLICAS|NOAUTH|WRONGPASS|NOPERM"
    r"|MOVED|ASK)\b|^ERR max number of clients"
)

LATE = 1.2  # deadlines; a timer that rings later than this tells of a busy process, not of a silent Redis

SCRIPT = files("billing.quotas").joinpath("rates.lua").read_text()
SHA = sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()


class RateWire:
    """The one connection on which a process's commands about rates are said; it ends with the client's others."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._connection: AbstractConnection | None = None

    async def carry(self, commands: list[Command], hear: Callable[[Command, Any], None], *, deadline: float) -> None:
        """Say the first commands, take each off the list when it is answered, and have the answer heard.

        An answer is what the script returned, or the ResponseError of a command that Redis refuses; ``hear`` raises
        InvalidResponse where it answers another command. What fails is tried once more over a new connection: a closed
        one, a demoted primary's, one that a busy process has not read in time. Raises one of REDIS_AWAY after the
        deadline at most; commands still listed may have been executed.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        for is_last in (False, True):
            try:
                async with asyncio.timeout_at(began + deadline):
                    connection = await self._connect()
                    said = commands[:MOST]
                    packed: list[tuple[Any, ...]] = [
                        ("EVALSHA", SHA, len(one.keys), *one.keys, one.packed) for one in said
                    ]
                    await connection.send_packed_command(connection.pack_commands(packed))
                    for one in said:
                        try:
                            answer = await connection.read_response()
                        except ResponseError as exc:
                            if type(exc) is not ResponseError or NOT_NOW.search(str(exc)):
                                raise
                            answer = exc  # it would answer the same again: a faulty script, a key of another type
                        if not isinstance(answer, bytes | ResponseError | None):
                            raise InvalidResponse(f"{type(answer).__name__} is no answer of the script")
                        hear(one, answer)
                        commands.pop(0)
                return
            except REDIS_AWAY as exc:
                if self._connection is not None:
                    await self._connection.disconnect(nowait=True)
                took = loop.time() - began
                if is_last or (isinstance(exc, TimeoutError) and took < LATE * deadline):
                    raise
                if took > deadline:
                    began = loop.time()

    async def _connect(self) -> AbstractConnection:
        if self._connection is None:
            self._connection = await self._redis.connection_pool.get_connection()
        elif self._connection.is_connected:
            return self._connection
        await self._connection.connect()
        await self._connection.send_command("SCRIPT LOAD", SCRIPT)
        await self._connection.read_response()
        return self._connection
