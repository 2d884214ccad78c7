# One Lua script in Redis, called by many at once: calls that come while others are on their way share the next trip.

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

MOST = 128  # calls in one trip


class Script:
    """A script and the one connection that its calls share. Concurrency costs neither connections nor trips."""

    def __init__(self, redis: Redis, text: str, *, deadline: float) -> None:
        self.redis = redis
        self._text = text
        self._sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self._deadline = deadline
        self._waiting: list[tuple[tuple[Any, ...], asyncio.Future[Any]]] = []
        self._courier: asyncio.Task[None] | None = None

    async def call(self, key: str, *args: Any) -> Any:
        """Run the script on ``key`` and return its answer.

        Raises TimeoutError after the deadline, whatever Redis and the network do, and RedisError or OSError when they
        fail. After any of these it is not known whether the script ran.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(((key, *args), answer))
        if self._courier is None or self._courier.done():
            self._courier = asyncio.create_task(self._carry())
        async with asyncio.timeout(self._deadline):
            return await answer

    async def _carry(self) -> None:
        while self._waiting:
            trip, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            trip = [(args, answer) for args, answer in trip if not answer.done()]  # nobody waits for the others
            try:
                async with asyncio.timeout(self._deadline):
                    replies = await self._send([args for args, _ in trip])
            except Exception as exc:
                replies = [exc] * len(trip)
            for (_, answer), reply in zip(trip, replies, strict=True):
                if answer.done():
                    continue
                if isinstance(reply, Exception):
                    answer.set_exception(reply)
                else:
                    answer.set_result(reply)

    async def _send(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        replies = await self._pipeline(calls)
        forgotten = [place for place, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if forgotten:
            await self.redis.script_load(self._text)
            again = await self._pipeline([calls[place] for place in forgotten])
            for place, reply in zip(forgotten, again, strict=True):
                replies[place] = reply
        return replies

    async def _pipeline(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        if not calls:
            return []
        async with self.redis.pipeline(transaction=False) as pipeline:
            for args in calls:
                pipeline.execute_command("EVALSHA", self._sha, 1, *args)
            return await pipeline.execute(raise_on_error=False)
