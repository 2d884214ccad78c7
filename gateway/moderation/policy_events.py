# What the checks found, on its way to the audit log: written behind the calls, many at once, and never with a text.
# What Postgres does not take waits; of more than a process can hold the oldest is dropped and counted.

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import structlog
from sqlalchemy import insert

from billing.core.store_errors import POSTGRES_AWAY
from gateway.calls.call import Call
from gateway.storage.database import Database
from gateway.storage.tables import audit_log

ACTOR = "system"
MOST = 10_000  # events that wait
AT_ONCE = 500  # that one statement writes
TOGETHER = 0.2  # seconds that the first waits for others
AGAIN = 1.0  # seconds until Postgres is tried again

log = structlog.get_logger()


class PolicyEvents:
    """The events of one process that are not in Postgres yet."""

    def __init__(self, database: Database) -> None:
        self.lost = 0  # events that found no room
        self._database = database
        self._waiting: deque[dict[str, Any]] = deque()
        self._news = asyncio.Event()

    def note(self, call: Call, action: str, scores: dict[str, float]) -> None:
        """Put down what was found in a call: names and scores."""
        details: dict[str, Any] = {"findings": scores, "model": call.request.model, "endpoint": call.endpoint}
        if call.is_internal:  # not a thing that the key tried
            details["is_aside"] = True
        who = {"actor": ACTOR, "team_id": call.caller.team.id, "subject": call.caller.key_id}
        if len(self._waiting) >= MOST:
            self._waiting.popleft()
            self.lost += 1
        self._waiting.append({"action": action, "request_id": call.request_id, "details": details, **who})
        self._news.set()

    async def run(self) -> None:
        """Write what comes, for ever."""
        while True:
            await self._news.wait()
            await asyncio.sleep(TOGETHER)
            try:
                await self.flush()
            except POSTGRES_AWAY as exc:
                log.warning("safety_events_wait", waiting=len(self._waiting), error=repr(exc))
                await asyncio.sleep(AGAIN)

    async def flush(self) -> None:
        """Write everything that waits. Raises one of POSTGRES_AWAY; what was not written waits on."""
        while self._waiting:
            rows = [self._waiting[place] for place in range(min(AT_ONCE, len(self._waiting)))]
            async with self._database.begin() as connection:
                await connection.execute(insert(audit_log), rows)
            for row in rows:
                if self._waiting and self._waiting[0] is row:
                    self._waiting.popleft()
        self._news.clear()
