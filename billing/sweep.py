# The sweeper: what nobody else finishes. Frees the holds of the dead, closes finished days, prepares and drops
# partitions. Every gateway runs one; doing any of it twice changes nothing.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from uuid import UUID

import structlog
from redis.exceptions import RedisError
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.edges import Clock, Database
from billing.partitions import drop_partitions, ensure_partitions
from billing.quotas import Quotas
from billing.records import Status, UsageRecord, day_of

EVERY = 10.0  # seconds between rounds
CHORES_EVERY = 600.0  # seconds between looks at days and partitions
LOST_AFTER = 3600.0  # seconds; a flusher not seen for so long holds up no day
GRACE = 60.0  # seconds a day stays open after its end, for clocks that differ

UNREACHABLE = (SQLAlchemyError, RedisError, OSError, TimeoutError)

log = structlog.get_logger(__name__)


class Sweeper:
    """Does its rounds until cancelled; what fails is tried again in the next."""

    def __init__(self, quotas: Quotas, database: Database, clock: Clock, *, keep_rows: float = 400 * 86_400.0) -> None:
        self.freed = 0  # holds freed so far, for the metrics
        self._quotas = quotas
        self._database = database
        self._clock = clock
        self._keep_rows = keep_rows  # seconds
        self._chores_due = 0.0

    async def run(self) -> None:
        """Make a round every ten seconds."""
        while True:
            async with _survived("sweep"):
                await self.sweep_once()
            if self._clock.now() >= self._chores_due:
                self._chores_due = self._clock.now() + CHORES_EVERY
                async with _survived("chores"):
                    await self.do_chores()
            await asyncio.sleep(EVERY)

    async def sweep_once(self) -> list[str]:
        """Free the expired holds of every team and return their request ids.

        Redis remembers for an hour what was freed and is not settled. Whichever of these calls is in the ledger by now,
        because its owner died between the two or a journal brought it, is settled here.
        """
        epoch = self._quotas.epoch  # rows that came before a later one are in the sums that it began with
        async with self._database.begin() as connection:
            teams = (await connection.execute(text("SELECT id FROM teams"))).scalars().all()
        freed: list[str] = []
        unsettled: list[str] = []
        for team_id in teams:
            expired, waiting = await self._quotas.sweep_and_recall(team_id)
            if expired:
                log.warning("holds_freed", team_id=team_id, request_ids=expired)
                self.freed += len(expired)
                freed += expired
            unsettled += waiting
        if unsettled:
            async with self._database.begin() as connection:
                known = await find_records(connection, unsettled)
            await self._quotas.book(known, epoch)
        return freed

    async def do_chores(self) -> None:
        """Prepare the partitions of the coming days, close finished days, and drop rows past their retention."""
        async with self._database.begin() as connection:
            await ensure_partitions(connection, self._clock.today())
        async with self._database.begin() as connection:
            for day in await close_days(connection, self._clock.now()):
                log.info("day_closed", day=str(day))
        async with self._database.begin() as connection:
            keep_from = (datetime.fromtimestamp(self._clock.now() - self._keep_rows, UTC)).date()
            for name in await drop_partitions(connection, keep_from):
                log.info("partition_dropped", name=name)


async def close_days(connection: AsyncConnection, now: float) -> list[date]:
    """Close every finished day that all flushers have passed, oldest first, and return them.

    A flusher that has not been seen for an hour is taken as lost: what it brings later is booked as a correction.
    """
    moment = datetime.fromtimestamp(now, UTC)
    times = {"now": moment, "seen": moment - timedelta(seconds=LOST_AFTER), "grace": timedelta(seconds=GRACE)}
    await connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('closed_days'))"))
    return sorted((await connection.execute(CLOSE_DAYS, times)).scalars())


async def find_records(connection: AsyncConnection, request_ids: Sequence[str]) -> list[UsageRecord]:
    """Return what the ledger says of these calls, as far as the quotas need it."""
    days = sorted({date(1970, 1, 1) + timedelta(days=day_of(request_id)) for request_id in request_ids})
    query = {"days": days, "ids": [UUID(request_id) for request_id in request_ids]}
    rows = (await connection.execute(FIND, query)).mappings()
    return [
        UsageRecord(**dict(row) | {"request_id": str(row["request_id"]), "status": Status(row["status"])})
        for row in rows
    ]


CLOSE_DAYS = text("""
    WITH moment AS (SELECT CAST(:now AS timestamptz) AS now, CAST(:grace AS interval) AS grace),
         passed AS (SELECT min(watermark) AS until FROM flushers WHERE seen_at >= CAST(:seen AS timestamptz)),
         first AS (SELECT greatest((SELECT max(day) + 1 FROM closed_days), (SELECT min(day) FROM usage_daily)) AS day)
    INSERT INTO closed_days (day, closed_at)
    SELECT CAST(ended.day AS date), now
    FROM moment, passed, first, generate_series(first.day, CAST(now AS date) - 1, interval '1 day') AS ended (day)
    WHERE ended.day + interval '1 day' + grace <= coalesce(until, now)
    ON CONFLICT DO NOTHING
    RETURNING closed_days.day
""")

FIND = text("""
    SELECT request_id, team_id, key_id, endpoint, model_asked, model_used, provider, provider_endpoint, status,
           input_tokens, output_tokens, cost_nanousd
    FROM usage_records
    WHERE day = ANY(CAST(:days AS date[])) AND request_id = ANY(CAST(:ids AS uuid[]))
""")


@asynccontextmanager
async def _survived(chore: str) -> AsyncIterator[None]:
    try:
        yield
    except UNREACHABLE as exc:
        log.warning("sweeper_unreachable", chore=chore, error=repr(exc))
