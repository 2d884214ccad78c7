# Leases that have had their time: those of ended owners for closed days become one for each scope, unit and day, those
# of past months go with their balances. What a balance has drawn stays the sum of its leases throughout.
#
# Rows of the ledger may still come for such leases. Whoever inserts rows holds the lock of the closed days for others
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
    values = {"first": first.date(), "period": f"{first:%Y-%m}", "most": MOST}
    return sum([int((await connection.execute(each, values)).scalar_one()) for each in (OLD_LEASES, OLD_BALANCES)])


async def delete_owners(connection: AsyncConnection, now: datetime) -> int:
    """Delete some owners that have no lease left and ended a week ago, or were last seen then; return how many."""
    values = {"before": now - OWNERS_KEPT, "most": MOST}
    return int((await connection.execute(DELETE_OWNERS, values)).scalar_one())


def first_month(now: datetime) -> datetime:
    """Return when the first month begins of which leases and balances are kept: the one before this."""
    this_month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return (this_month - timedelta(days=1)).replace(day=1)


ALONE = text("SELECT pg_advisory_xact_lock(hashtext('closed_days'))")
# An owner that is not listed any more has ended long ago. What an ended owner holds it has spent.
FOLD = text("""
    WITH old AS (
        SELECT owner, scope, unit, day FROM leases AS lease
        WHERE owner > '' AND granted - returned = spent
          AND EXISTS (SELECT FROM closed_days WHERE closed_days.day = lease.day)
          AND NOT EXISTS (SELECT FROM owners WHERE owners.id = lease.owner AND owners.ended_at IS NULL)
        ORDER BY owner, scope, unit, day
        LIMIT :most
        FOR UPDATE
    ), gone AS (
        DELETE FROM leases AS lease USING old
        WHERE lease.owner = old.owner AND lease.scope = old.scope AND lease.unit = old.unit AND lease.day = old.day
        RETURNING lease.scope, lease.unit, lease.day, lease.spent, lease.overdrawn
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
""")
OLD_LEASES = text("""
    WITH old AS (
        SELECT owner, scope, unit, day FROM leases WHERE day < :first
        ORDER BY owner, scope, unit, day LIMIT :most FOR UPDATE
    ), gone AS (
        DELETE FROM leases AS lease USING old
        WHERE lease.owner = old.owner AND lease.scope = old.scope AND lease.unit = old.unit AND lease.day = old.day
        RETURNING 1
    )
    SELECT count(*) FROM gone
""")
OLD_BALANCES = text("""
    WITH old AS (
        SELECT scope, unit, period FROM balances WHERE period < :period
        ORDER BY scope, unit, period LIMIT :most FOR UPDATE
    ), gone AS (
        DELETE FROM balances AS balance USING old
        WHERE balance.scope = old.scope AND balance.unit = old.unit AND balance.period = old.period
        RETURNING 1
    )
    SELECT count(*) FROM gone
""")
DELETE_OWNERS = text("""
    WITH gone AS (
        DELETE FROM owners WHERE id IN (
            SELECT id FROM owners
            WHERE coalesce(ended_at, seen_at) < :before
              AND NOT EXISTS (SELECT FROM leases WHERE leases.owner = owners.id)
            ORDER BY id LIMIT :most
        ) RETURNING 1
    )
    SELECT count(*) FROM gone
""")
