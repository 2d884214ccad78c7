# One team's words to Redis, what its callers wait for and what its scopes have to tell, in one command; and the way of
# these commands: rates.lua over one connection of redis-py. They go out together, and their answers are handed over as
# they come. A pipeline of redis-py costs twice as much (docs/experiments/money/rates-one-conversation.md).

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from hashlib import sha1
from importlib.resources import files
from typing import Any

import msgspec
from msgspec import Struct
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import InvalidResponse, NoScriptError, RedisError, ResponseError

from billing.core.holds import HoldRequest, RefusedHold
from billing.quotas.rate_scope import RateScope
from billing.quotas.rate_shares import ScopeTold

MOST = 128  # callers in one command, and commands in one trip
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


class Caller(Struct, eq=False):
    """A call that waits for Redis. ``answer`` gives the refusal, or None when the call was counted."""

    request: HoldRequest
    scopes: list[RateScope]
    answer: asyncio.Future[RefusedHold | None]


class Command(Struct, eq=False):
    """A command, said until it is answered, and for whom."""

    team: RateTeam
    number: int
    keys: list[str]
    packed: bytes
    callers: list[Caller]
    scopes: list[RateScope]
    at: float  # monotonic seconds


class Answer(Struct, array_like=True, frozen=True):
    """What rates.lua answers."""

    number: int
    now: float
    bucket: int
    was_known: int
    scopes: list[ScopeTold]
    refusals: list[tuple[int, int, float]]  # why a need waits longest: scope and limit, from 1; seconds, or 0: granted


class RateTeam:
    """The scopes of one team. Nothing here waits: ``RateLimits`` carries the words."""

    def __init__(self, team_id: str) -> None:
        self.id = team_id
        self.waiting: list[Caller] = []
        self.touched: set[RateScope] = set()  # what they have to tell, or may have to give back

    def say(self, number: int, owner: str, owners: int, now: float, time: float, *, is_due: bool) -> Command | None:
        """Return the next command; ``None`` when there is nothing to say.

        Slices of scopes that no caller waits for are left to them, unless ``is_due``. ``time``: unix seconds, or -1.
        """
        callers = [caller for caller in self.waiting[:MOST] if not caller.answer.done()]
        self.waiting = self.waiting[MOST:]
        told = [scope for scope in self.touched if is_due or (callers and scope.until <= now)]
        needs: dict[RateScope, list[int]] = {scope: [] for scope in told}
        for caller in callers:
            for scope in caller.scopes:
                needs.setdefault(scope, []).append(caller.request.tokens)
        if not needs:
            return None
        scopes = list(needs)
        said = [scope.say(now, needs[scope]) for scope in scopes]
        self.touched.difference_update(scopes)
        asked = [[caller.request.tokens, *(scopes.index(scope) + 1 for scope in caller.scopes)] for caller in callers]
        prefix = f"tollgate:{{{self.id}}}:rates:"
        keys = [f"{prefix}told:{owner}"]
        for scope in scopes:
            keys += (f"{prefix}minute:{scope.name}", f"{prefix}slots:{scope.name}")
        return Command(self, number, keys, pack((number, time, owners, owner, said, asked)), callers, scopes, now)


pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder(Answer).decode


class RateWire:
    """The one connection on which a process's commands about rates are said; it ends with the client's others. To a
    cluster they go by its client, each to the server that has its team."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._cluster = redis if isinstance(redis, RedisCluster) else None
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
                    if self._cluster is not None:
                        await self._carry_to(self._cluster, commands, hear)
                        return
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
                            answer = exc
                        hear(one, _checked(answer))
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

    async def _carry_to(
        self, cluster: RedisCluster, commands: list[Command], hear: Callable[[Command, Any], None]
    ) -> None:
        await cluster.initialize()  # also where there is nothing to say
        said, scripts = commands[:MOST], (("EVALSHA", SHA), ("EVAL", SCRIPT))
        for script in scripts:
            pipeline = cluster.pipeline(transaction=False)
            for one in said:
                pipeline.execute_command(*script, len(one.keys), *one.keys, one.packed)
            unknown = []
            for one, answer in zip(said, await pipeline.execute(raise_on_error=False), strict=True):
                if isinstance(answer, NoScriptError) and script is scripts[0]:
                    unknown.append(one)  # its server was started anew
                    continue
                hear(one, _checked(answer))
                commands.remove(one)
            if not (said := unknown):
                return

    async def _connect(self) -> AbstractConnection:
        if self._connection is None:
            self._connection = await self._redis.connection_pool.get_connection()
        elif self._connection.is_connected:
            return self._connection
        await self._connection.connect()
        await self._connection.send_command("SCRIPT LOAD", SCRIPT)
        await self._connection.read_response()
        return self._connection


def _checked(answer: Any) -> bytes | ResponseError | None:
    """Return an answer of the script, or the error of a command that would be answered the same again (a faulty script,
    a key of another type). Raises any other error."""
    if isinstance(answer, Exception) and (type(answer) is not ResponseError or NOT_NOW.search(str(answer))):
        raise answer
    if not isinstance(answer, bytes | ResponseError | None):
        raise InvalidResponse(f"{type(answer).__name__} is no answer of the script")
    return answer
