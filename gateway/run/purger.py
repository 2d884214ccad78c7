# What is past its time is erased, a part of it a minute.

from __future__ import annotations

import asyncio

import structlog

from billing.core.store_errors import told_if_away
from gateway.accounts.team_deletion import purge_deleted_teams
from gateway.batch.file_store import purge_files
from gateway.batch.retention import purge_items
from gateway.cache.store import CacheStore
from gateway.contents.store import purge_contents
from gateway.core.clock import Clock
from gateway.idempotency.store import purge_expired
from gateway.inference.edition import Editions
from gateway.reports.call_list import purge_refused
from gateway.storage.audit_log import purge_outcomes
from gateway.storage.database import Database
from gateway.stored_responses.store import purge_responses

PURGE_EVERY = 60.0  # seconds between rounds

log = structlog.get_logger()


class Purger:
    """Erases what is past its time, in rounds until cancelled. Any number may: doing it twice changes nothing."""

    def __init__(self, editions: Editions, database: Database, clock: Clock, cache: CacheStore) -> None:
        self._editions = editions
        self._database = database
        self._clock = clock
        self._cache = cache

    async def run(self) -> None:
        """Make a round every minute."""
        while True:
            began = self._clock.monotonic()
            await self.purge_once()
            await asyncio.sleep(max(0.0, began + PURGE_EVERY - self._clock.monotonic()))

    async def purge_once(self) -> None:
        """Erase a part of what is past its time. What fails holds up nothing else."""
        retention = self._editions.current.settings.retention
        with told_if_away(log, "not_purged", what="stored answers"):
            if purged := await purge_expired(self._database, self._clock):
                log.info("stored_answers_purged", count=purged)
        with told_if_away(log, "not_purged", what="stored responses"):
            if purged := await purge_responses(self._database, self._clock, retention.responses):
                log.info("stored_responses_purged", count=purged)
        with told_if_away(log, "not_purged", what="contents"):
            if purged := await purge_contents(self._database, self._clock.moment(), retention.contents):
                log.info("contents_purged", count=purged)
        with told_if_away(log, "not_purged", what="files"):
            await purge_files(self._database)
        with told_if_away(log, "not_purged", what="batch items"):
            async with self._database.begin() as connection:
                await purge_items(connection, retention.batch_files)
        with told_if_away(log, "not_purged", what="refused calls"):
            async with self._database.begin() as connection:
                await purge_refused(connection, self._clock.now())
        with told_if_away(log, "not_purged", what="safety outcomes"):
            async with self._database.begin() as connection:
                await purge_outcomes(connection, retention.usage)
        with told_if_away(log, "not_purged", what="deleted teams"):
            for team_id in await purge_deleted_teams(self._database):
                await self._cache.forget(f"team:{team_id}")
