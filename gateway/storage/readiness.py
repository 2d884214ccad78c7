# Whether the parts of the deployment answer: asked once at a time, and what was found is told for a second. Any caller
# may ask for it without a key, so that must not take a connection to Postgres and a write to the disk each time.

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from redis.asyncio import Redis

from billing.core.store_errors import POSTGRES_AWAY
from billing.journal.journal import Journal
from billing.quotas.rate_wire import REDIS_AWAY
from billing.upkeep.owner_list import silent_owners
from gateway.core.clock import Clock
from gateway.storage.database import Database
from protocol.serving.deadlines import running_timeout

CHECK_WITHIN = 0.5  # seconds for each part
HOLDS_FOR = 1.0  # seconds


class Readiness:
    """Looks at Postgres, Redis, the journal, and at owners that hold room of budgets and do not answer."""

    def __init__(self, database: Database, redis: Redis, journal: Journal, clock: Clock) -> None:
        self._database = database
        self._redis = redis
        self._journal = journal
        self.started_at = clock.now()  # unix seconds
        self._clock = clock
        self._found: dict[str, str] = {}
        self._silent = 0  # owners, when Postgres last told
        self._found_at = float("-inf")
        self._looking: asyncio.Task[None] | None = None

    async def parts(self) -> dict[str, str]:
        """Return of each part ``ok`` or what is wrong, as it was within the last second."""
        if self._clock.monotonic() - self._found_at >= HOLDS_FOR:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look())
            await asyncio.shield(self._looking)  # an asker that leaves does not end it for the others
        return self._found

    async def _look(self) -> None:
        postgres, redis = await asyncio.gather(_answers(self._ask_postgres()), _answers(self._redis.ping()))
        self._found = {
            "postgres": postgres,
            "redis": redis,
            "journal": self._journal.check(),
            "owners": f"{self._silent} silent" if self._silent else "ok",
        }
        self._found_at = self._clock.monotonic()

    async def _ask_postgres(self) -> None:
        async with self._database.begin() as connection:
            self._silent = await silent_owners(connection)


async def _answers(check: Awaitable[Any]) -> str:
    try:
        async with running_timeout(CHECK_WITHIN):
            await check
    except (*POSTGRES_AWAY, *REDIS_AWAY):
        return "does not answer"
    return "ok"
