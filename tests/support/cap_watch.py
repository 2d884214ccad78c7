# Looks at limited teams all the time that a load runs: what is drawn of a balance, spent, held and idle together, never
# passes its cap, and no more calls run than may.

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import asyncpg
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.support.books import slots_of

EVERY = 0.03  # seconds
ANSWERS_WITHIN = 0.5  # seconds
DRIVER_FAULTS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
DRAWN = "SELECT unit, period, drawn + corrected AS drawn FROM balances WHERE scope = $1"


class CapWatch:
    """Samples Postgres and Redis until the block ends; slots until ``pause``: a Redis that was away knows of none."""

    def __init__(self, database_url: str, redis_url: str, caps: Mapping[str, Mapping[str, int]]) -> None:
        self.samples = 0
        self.overshoots: list[str] = []
        self._database_url, self._redis_url = database_url, redis_url
        self._caps = caps  # by team: "tokens", "nanousd", "slots"
        self._is_over = threading.Event()
        self._is_paused = False

    def pause(self) -> None:
        """Look at slots no more."""
        self._is_paused = True

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="cap-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join(10)

    async def _run(self) -> None:
        connection: asyncpg.Connection | None = None
        async with Redis.from_url(self._redis_url, socket_timeout=0.5, socket_connect_timeout=0.5) as redis:
            while not self._is_over.is_set():
                await asyncio.sleep(EVERY)
                try:
                    async with asyncio.timeout(ANSWERS_WITHIN):
                        if connection is None:
                            connection = await asyncpg.connect(self._database_url)
                        for team, caps in self._caps.items():
                            await self._look(connection, redis, team, caps)
                    self.samples += 1
                except (OSError, TimeoutError, RedisError, *DRIVER_FAULTS):
                    if connection is not None:
                        connection.terminate()
                    connection = None
        if connection is not None:
            connection.terminate()

    async def _look(self, connection: asyncpg.Connection, redis: Redis, team: str, caps: Mapping[str, int]) -> None:
        used = {row["unit"]: row["drawn"] for row in await connection.fetch(DRAWN, f"team:{team}")
                if len(row["period"]) == len("2026-11-22")}  # fmt: skip
        if "slots" in caps and not self._is_paused:
            slots = sum((await slots_of(redis, team)).values())
            used["slots"] = 0 if self._is_paused else slots
        for name, cap in caps.items():
            if used.get(name, 0) > cap:
                self.overshoots.append(f"{team}: {used[name]} {name} drawn, over {cap}")
