# The sweeper: what nobody else finishes. Frees the holds of the dead, closes finished days, prepares and drops
# partitions. Every gateway runs one; doing any of it twice changes nothing.

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta

import structlog
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.edges import Clock, Database
from billing.ledger import find_records, forget_days
from billing.partitions import delete_stragglers, drop_partition, ensure_partitions, old_partitions
from billing.quotas import Quotas
from billing.store_errors import STORES_AWAY

EVERY = 10.0  # seconds between rounds
CHORES_EVERY = 600.0  # seconds between looks at days and partitions
STEADY = 60.0  # seconds that Postgres has to answer before anybody is called lost
LOST_AFTER = 3600.0  # seconds; a flusher not seen for so long holds up no day
GRACE = 60.0  # seconds a day stays open after its end, for clocks that differ

log = structlog.get_logger(__name__)


class Sweeper:
    """Does its rounds until cancelled; what fails is tried again in the next."""

    def __init__(
        self,
        quotas: Quotas,
        database: Database,
        clock: Clock,
        *,
        keep_rows: float = 400 * 86_400.0,
        uses_server_time: bool = True,
    ) -> None:
        self.freed = 0  # holds freed so far, for the metrics
        self.lost = 0  # journals declared lost
        self._uses_server_time = uses_server_time
        self._quotas = quotas
        self._database = database
        self._clock = clock
        self.keep_rows = keep_rows  # seconds
        self._chores_due = 0.0  # of time.monotonic(), like the next
        self._answering_since: float | None = None

    async def run(self) -> None:
        """Make a round every ten seconds."""
        while True:
            async with _survived("sweep"):
                await self.sweep_once()
            async with _survived("chores"):
                await self._do_due_chores()
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
            expired, waiting = await self._quotas.sweep(team_id)
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
        await self.prepare_partitions()
        await self.close_finished_days()
        await self.drop_old_rows()

    async def prepare_partitions(self) -> None:
        """Make the partitions of the coming days."""
        today = datetime.fromtimestamp(await self._now(), UTC).date()
        async with self._database.begin() as connection:
            await ensure_partitions(connection, today)

    async def close_finished_days(self) -> None:
        """Declare journals lost that were not heard of for an hour, and close the days that all others have passed."""
        now = await self._now()
        async with self._database.begin() as connection:
            lost = await take_off_lost(connection, now)
        for each in lost:
            log.error("journal_lost", **each)
        self.lost += len(lost)
        async with self._database.begin() as connection:
            for day in await close_days(connection, now):
                log.info("day_closed", day=str(day))

    async def drop_old_rows(self) -> None:
        """Drop rows past their retention, a partition at a time; from then on nothing is booked for their days."""
        keep_from = datetime.fromtimestamp(await self._now() - self.keep_rows, UTC).date()
        async with self._database.begin() as connection:
            await forget_days(connection, keep_from)
        async with self._database.begin() as connection:
            old = await old_partitions(connection, keep_from)
        for name in old:
            async with self._database.begin() as connection:
                await drop_partition(connection, name)
            log.info("partition_dropped", name=name)
        deleted = 1
        while deleted:
            async with self._database.begin() as connection:
                deleted = await delete_stragglers(connection, keep_from)

    async def _do_due_chores(self) -> None:
        """Do what is due. Days close once Postgres has answered for a minute: others report first, if they live."""
        try:
            await self._now()
        except STORES_AWAY:
            self._answering_since = None
            raise
        now = time.monotonic()
        since = self._answering_since = self._answering_since or now
        if now < self._chores_due:
            return
        is_steady = now - since >= STEADY
        self._chores_due = now + (CHORES_EVERY if is_steady else STEADY)
        if is_steady:
            await self.do_chores()
        else:
            await self.prepare_partitions()

    async def _now(self) -> float:
        """Return unix seconds by Postgres's clock: one of ours that is wrong by days closes and drops nothing."""
        async with self._database.begin() as connection:
            server_time = (await connection.execute(text("SELECT extract(epoch FROM clock_timestamp())"))).scalar_one()
        return float(server_time) if self._uses_server_time else self._clock.now()


async def take_off_lost(connection: AsyncConnection, now: float) -> list[dict[str, str]]:
    """Take flushers off the list that were not seen for an hour, and return what was last known of their journals.

    Should such a journal return, what it brings is booked as corrections of the days that were closed without it.
    """
    seen = datetime.fromtimestamp(now - LOST_AFTER, UTC)
    return [
        {name: str(value) for name, value in row.items()}
        for row in (await connection.execute(TAKE_OFF_LOST, {"seen": seen})).mappings()
    ]


async def close_days(connection: AsyncConnection, now: float) -> list[date]:
    """Close every finished day that all flushers have passed, oldest first, and return them.

    A flusher that has not been seen for an hour is taken as lost: what it brings later is booked as a correction.
    """
    moment = datetime.fromtimestamp(now, UTC)
    times = {"now": moment, "seen": moment - timedelta(seconds=LOST_AFTER), "grace": timedelta(seconds=GRACE)}
    await connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('closed_days'))"))
    return sorted((await connection.execute(CLOSE_DAYS, times)).scalars())


# The counters have yet to hear of what "unsettled" ones left: they stay listed, and hold up nothing.
TAKE_OFF_LOST = text("""
    DELETE FROM flushers WHERE seen_at < :seen AND unsettled = 0
    RETURNING id AS flusher, watermark, backlog, seen_at
""")

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


@asynccontextmanager
async def _survived(chore: str) -> AsyncIterator[None]:
    try:
        yield
    except STORES_AWAY as exc:
        log.warning("sweeper_unreachable", chore=chore, error=repr(exc))
