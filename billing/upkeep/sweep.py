# The sweeper: closes finished days, drops old partitions, folds leases that have had their time. Every process has one;
# for each turn one of them does the work, and doing any of it twice changes nothing.
#
# Leases of ended owners for closed days become one for each scope, unit and day; those of past months go with their
# balances. What a balance has drawn stays the sum of its leases throughout. Rows of the ledger may still come for such
# leases: a writer of rows holds the lock of the closed days for others (ledger.py), here it is held alone.

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import date, datetime, timedelta
from functools import partial

import structlog
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.edges import Clock, Database
from billing.core.records import CHARGED, REQUESTS, TOKENS
from billing.core.store_errors import POSTGRES_AWAY, told_if_away
from billing.ledger.ledger import forget_days
from billing.ledger.partitions import delete_stragglers, drop_partition, old_partitions
from billing.ledger.series import forget_series, merge_parts, seal_days, seal_hours
from billing.ledger.tables import IS_CALL, IS_OF_VALUE
from billing.quotas.lease_store import RESERVATIONS
from billing.upkeep.turns import Turns

EVERY = 10.0  # seconds between looks
CHORES_EVERY = 600.0  # seconds between rounds of chores, all processes together
STEADY = 60.0  # seconds that Postgres has to answer before an owner is called lost
LOST_AFTER = 3600.0  # seconds; an owner not seen for so long holds up no day
GRACE = 60.0  # seconds a day stays open after its end, for clocks that differ
MOST = 2000  # rows in one transaction: writers of the ledger wait for it some 50 ms
VALUES_KEPT = timedelta(days=2)  # of end users and tags: for leases that no month counts
MOST_OF_A_DAY = 5_000_000  # calls that one statement adds up: half of what it has time for
OWNERS_KEPT = timedelta(days=7)  # after their end

ASKED = (*TOKENS, "cost_nanousd")  # what is added up by what calls asked for

log = structlog.get_logger(__name__)


class Sweeper:
    """Does the chores until cancelled; what fails is tried again in the next round."""

    def __init__(self, database: Database, clock: Clock, turns: Turns, *, keep_rows: float = 400 * 86_400.0) -> None:
        self.lost = 0  # journals declared lost
        self.keep_rows = keep_rows  # seconds
        self._database = database
        self._clock = clock
        self._turns = turns
        self._answering_since: float | None = None  # of the clock's monotonic()

    async def run(self) -> None:
        """Look every ten seconds whether there is something to do."""
        while True:
            with told_if_away(log, "sweeper_unreachable"):
                await self.look_once()
            await asyncio.sleep(EVERY)

    async def look_once(self) -> bool:
        """Do the chores if they are due and the turn is ours; return whether it was. Raises POSTGRES_AWAY.

        Not before Postgres has answered for a minute: after an outage the owners that live report first.
        """
        try:
            await self._turns.now()
        except POSTGRES_AWAY:
            self._answering_since = None
            raise
        now = self._clock.monotonic()
        if self._answering_since is None:
            self._answering_since = now
        if now - self._answering_since < STEADY or not await self._turns.take("chores", CHORES_EVERY):
            return False
        await self.do_chores()
        return True

    async def do_chores(self) -> None:
        """Do all chores once."""
        await self.close_finished_days()
        await self.drop_old_rows()
        await self.fold_leases()
        await self.roll_up()

    async def close_finished_days(self) -> None:
        """Declare journals lost that were not heard of for an hour, and close the days that all others have passed."""
        now = await self._turns.now()
        async with self._database.begin() as connection:
            lost = await mark_lost(connection, now)
        for each in lost:
            log.error("journal_lost", **each)
        self.lost += len(lost)
        async with self._database.begin() as connection:
            for day in await close_days(connection, now):
                log.info("day_closed", day=str(day))

    async def drop_old_rows(self) -> None:
        """Drop rows past their retention, a partition at a time; from then on nothing is booked for their days."""
        keep_from = (await self._turns.now() - timedelta(seconds=self.keep_rows)).date()
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

    async def fold_leases(self) -> None:
        """Fold the leases of ended owners for closed days, and delete those of past months; a few at a time."""
        await self._do_in_parts(fold_leases, delete_idle_values, delete_old_months, delete_owners)

    async def roll_up(self) -> None:
        """Merge the minutes of charts, make hours and days of them, and delete all when their time is over; add closed
        days up by what their calls asked for."""
        forget = partial(forget_series, keep=timedelta(seconds=self.keep_rows))
        await self._do_in_parts(seal_hours, seal_days, forget, merge_parts, sum_asked)

    async def _do_in_parts(self, *chores: Callable[[AsyncConnection, datetime], Awaitable[int]]) -> None:
        """Do each until it changes nothing more, a few rows in a transaction."""
        now, began = await self._turns.now(), time.monotonic()
        for chore in chores:
            changed = 1
            while changed and time.monotonic() - began < CHORES_EVERY / 2:
                async with self._database.begin() as connection:
                    changed = await chore(connection, now)


async def mark_lost(connection: AsyncConnection, now: datetime) -> list[dict[str, str]]:
    """Mark owners as lost that were not seen for an hour, once each, and return what was last known of their journals.

    Reservations have none. Leases of the lost stay reserved. Should such a journal return, what it brings is booked as
    corrections of the days that were closed without it.
    """
    values = {"now": now, "seen": now - timedelta(seconds=LOST_AFTER), "reservations": f"{RESERVATIONS}%"}
    return [
        {name: str(value) for name, value in row.items()}
        for row in (await connection.execute(MARK_LOST, values)).mappings()
    ]


async def close_days(connection: AsyncConnection, now: datetime) -> list[date]:
    """Close every finished day that all owners have passed, oldest first, and return them.

    An owner that has not been seen for an hour is taken as lost: what it brings later is booked as a correction.
    """
    times = {"now": now, "seen": now - timedelta(seconds=LOST_AFTER), "grace": timedelta(seconds=GRACE)}
    await connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('closed_days'))"))
    return sorted((await connection.execute(CLOSE_DAYS, times)).scalars())


async def fold_leases(connection: AsyncConnection, now: datetime) -> int:
    """Fold some leases of ended owners for closed days into that of no owner ('') for the same scope, unit and day;
    return how many."""
    await connection.execute(ALONE)
    return int((await connection.execute(FOLD, {"most": MOST})).scalar_one())


async def delete_idle_values(connection: AsyncConnection, now: datetime) -> int:
    """Delete some leases and balances of end users and tags for closed days that no limit of a month counts any more;
    return how many. What is left of a balance stays the sum of its leases."""
    await connection.execute(ALONE)
    before = (now - VALUES_KEPT).date()
    leases = (await connection.execute(DELETE_VALUES, {"before": before, "most": MOST})).scalar_one()
    balances = await connection.execute(DELETE_DAYS, {"before": f"{before}", "most": MOST})
    return int(leases) + balances.rowcount


async def delete_old_months(connection: AsyncConnection, now: datetime) -> int:
    """Delete some leases and balances of months before the last; return how many."""
    await connection.execute(ALONE)
    first = first_month(now)
    leases = await connection.execute(DELETE_LEASES, {"first": first.date(), "most": MOST})
    balances = await connection.execute(DELETE_BALANCES, {"period": f"{first:%Y-%m}", "most": MOST})
    return leases.rowcount + balances.rowcount


async def sum_asked(connection: AsyncConnection, now: datetime) -> int:
    """Add up the calls of a closed day by what they asked for (billing/ledger/choices.py), the newest day first; return
    how many days that were. What is booked on a closed day in time cannot change any more."""
    states = {"charged": list(CHARGED), "counted": list(REQUESTS)}
    return (await connection.execute(SUM_ASKED, states | {"now": now, "most": MOST_OF_A_DAY})).rowcount


async def delete_owners(connection: AsyncConnection, now: datetime) -> int:
    """Delete some owners that have no lease left and ended a week ago, or were last seen then; return how many."""
    return (await connection.execute(DELETE_OWNERS, {"before": now - OWNERS_KEPT, "most": MOST})).rowcount


def first_month(now: datetime) -> datetime:
    """Return when the first month begins of which leases and balances are kept: the one before this."""
    this_month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return (this_month - timedelta(days=1)).replace(day=1)


MARK_LOST = text("""
    UPDATE owners SET lost_at = :now
    WHERE ended_at IS NULL AND seen_at < :seen AND (lost_at IS NULL OR lost_at <= seen_at)
      AND id NOT LIKE :reservations
    RETURNING id AS owner, watermark, backlog, seen_at
""")

CLOSE_DAYS = text("""
    WITH moment AS (SELECT CAST(:now AS timestamptz) AS now, CAST(:grace AS interval) AS grace),
         passed AS (
             SELECT min(watermark) AS until FROM owners
             WHERE ended_at IS NULL AND seen_at >= CAST(:seen AS timestamptz)
         ),
         first AS (SELECT greatest((SELECT max(day) + 1 FROM closed_days), (SELECT min(day) FROM usage_daily)) AS day)
    INSERT INTO closed_days (day, closed_at)
    SELECT CAST(ended.day AS date), now
    FROM moment, passed, first, generate_series(first.day, CAST(now AS date) - 1, interval '1 day') AS ended (day)
    WHERE ended.day + interval '1 day' + grace <= coalesce(until, now)
    ON CONFLICT DO NOTHING
    RETURNING closed_days.day
""")

SUM_ASKED = text(f"""
    WITH next AS (
        SELECT day FROM closed_days
        WHERE summed_at IS NULL AND day >= coalesce((SELECT begins FROM ledger_memory), '-infinity')
          AND (SELECT coalesce(sum(calls), 0) FROM usage_daily WHERE usage_daily.day = closed_days.day) <= :most
        ORDER BY day DESC LIMIT 1 FOR UPDATE SKIP LOCKED
    ), summed AS (
        INSERT INTO usage_asked (day, team_id, model_asked, tier, score, requests, {", ".join(ASKED)})
        SELECT day, team_id, model_asked, tier, CASE
                   WHEN complexity IS NULL OR route_reason LIKE 'auto%' THEN -1
                   ELSE floor(CAST(complexity AS numeric) * 100) END AS score,
               count(*) FILTER (WHERE status = ANY(CAST(:counted AS text[])) AND {IS_CALL}),
               {", ".join(f"sum({name})" for name in ASKED)}
        FROM usage_records
        WHERE day = (SELECT day FROM next) AND booked_on IS NULL
          AND status = ANY(CAST(:charged AS text[])) AND endpoint <> 'embeddings'
        GROUP BY 1, 2, 3, 4, 5
    )
    UPDATE closed_days SET summed_at = :now FROM next WHERE closed_days.day = next.day
""")  # noqa: S608  (columns are ours)

# Said twice: a row that another transaction changes while this one waits for it has to be such a row still.
SOME = "DELETE FROM {table} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {table} WHERE {which} LIMIT :most)) AND {which}"

ALONE = text("SELECT pg_advisory_xact_lock(hashtext('closed_days'))")
DELETE_LEASES = text(SOME.format(table="leases", which="day < :first"))
DELETE_BALANCES = text(SOME.format(table="balances", which="period < :period"))
NO_LEASE = "NOT EXISTS (SELECT FROM leases WHERE leases.owner = owners.id)"
DELETE_OWNERS = text(SOME.format(table="owners", which=f"coalesce(ended_at, seen_at) < :before AND {NO_LEASE}"))
# Folded ones, of owners that have ended and days that are closed.
IDLE = f"""
    owner = '' AND day < :before AND {IS_OF_VALUE} AND NOT EXISTS (
        SELECT FROM balances WHERE balances.scope = leases.scope AND unit = 'nanousd'
        AND period = to_char(leases.day, 'YYYY-MM') AND cap IS NOT NULL
    )
"""
DELETE_VALUES = text(f"""
    WITH gone AS (
        {SOME.format(table="leases", which=IDLE)}
        RETURNING scope, unit, to_char(day, 'YYYY-MM-DD') AS day, returned - granted AS amount
    ), sums AS (
        SELECT count(*) AS rows, array_agg(scope) AS scopes, array_agg(unit) AS units, array_agg(day) AS days,
               array_agg(amount) AS amounts
        FROM gone
    )
    SELECT rows, CASE WHEN rows > 0 THEN CAST(draw(scopes, units, days, amounts) AS text) END FROM sums
""")  # noqa: S608
WITHOUT_LEASE = f"""
    {IS_OF_VALUE} AND period < :before AND length(period) = 10 AND drawn = 0 AND corrected = 0 AND NOT EXISTS (
        SELECT FROM leases WHERE leases.scope = balances.scope AND leases.unit = balances.unit
        AND to_char(leases.day, 'YYYY-MM-DD') = balances.period
    )
"""
DELETE_DAYS = text(SOME.format(table="balances", which=WITHOUT_LEASE))
# An owner that is not listed any more has ended long ago. What an ended owner holds it has spent.
OLD = """
    owner > '' AND granted - returned = spent
    AND EXISTS (SELECT FROM closed_days WHERE closed_days.day = leases.day)
    AND NOT EXISTS (SELECT FROM owners WHERE owners.id = leases.owner AND owners.ended_at IS NULL)
"""
FOLD = text(f"""
    WITH gone AS (
        {SOME.format(table="leases", which=OLD)} RETURNING scope, unit, day, spent, overdrawn
    ), folded AS (
        INSERT INTO leases AS lease (owner, scope, unit, day, granted, spent, overdrawn)
        SELECT '', scope, unit, day, sum(spent), sum(spent), sum(overdrawn) FROM gone
        GROUP BY scope, unit, day
        ORDER BY scope, unit, day
        ON CONFLICT ON CONSTRAINT leases_pkey DO UPDATE
        SET granted = lease.granted + excluded.granted, spent = lease.spent + excluded.spent,
            overdrawn = lease.overdrawn + excluded.overdrawn
    )
    SELECT count(*) FROM gone
""")  # noqa: S608  (the words are ours)
