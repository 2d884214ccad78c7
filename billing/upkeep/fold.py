# Leases that have had their time: those of ended owners for closed days become one for each scope, unit and day, those
# of past months go with their balances. What a balance has drawn stays the sum of its leases throughout.
#
# Rows of the ledger may still come for such leases. A writer of rows holds the lock of the closed days for others
# (ledger.py); here it is held alone, so that no row adds to a lease while it moves.

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

MOST = 2000  # rows in one transaction: writers of the ledger wait for it some 50 ms
OWNERS_KEPT = timedelta(days=7)  # after their end


async def fold_leases(connection: AsyncConnection, now: datetime) -> int:
    """Fold some leases of ended owners for closed days into that of no owner ('') for the same scope, unit and day;
    return how many."""
    await connection.execute(ALONE)
    return int((await connection.execute(FOLD, {"most": MOST})).scalar_one())


async def delete_old_months(connection: AsyncConnection, now: datetime) -> int:
    """Delete some leases and balances of months before the last; return how many."""
    await connection.execute(ALONE)
    first = first_month(now)
    leases = await connection.execute(DELETE_LEASES, {"first": first.date(), "most": MOST})
    balances = await connection.execute(DELETE_BALANCES, {"period": f"{first:%Y-%m}", "most": MOST})
    return leases.rowcount + balances.rowcount


async def delete_owners(connection: AsyncConnection, now: datetime) -> int:
    """Delete some owners that have no lease left and ended a week ago, or were last seen then; return how many."""
    return (await connection.execute(DELETE_OWNERS, {"before": now - OWNERS_KEPT, "most": MOST})).rowcount


def first_month(now: datetime) -> datetime:
    """Return when the first month begins of which leases and balances are kept: the one before this."""
    this_month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return (this_month - timedelta(days=1)).replace(day=1)


# Said twice: a row that another transaction changes while this one waits for it has to be such a row still.
SOME = "DELETE FROM {table} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {table} WHERE {which} LIMIT :most)) AND {which}"

ALONE = text("SELECT pg_advisory_xact_lock(hashtext('closed_days'))")
DELETE_LEASES = text(SOME.format(table="leases", which="day < :first"))
DELETE_BALANCES = text(SOME.format(table="balances", which="period < :period"))
NO_LEASE = "NOT EXISTS (SELECT FROM leases WHERE leases.owner = owners.id)"
DELETE_OWNERS = text(SOME.format(table="owners", which=f"coalesce(ended_at, seen_at) < :before AND {NO_LEASE}"))
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
