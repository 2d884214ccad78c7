# The partitions of usage_records: made days ahead, dropped when their retention is over.

from __future__ import annotations

import re
from datetime import date, timedelta

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

DAYS_AHEAD = 7
DELETED_AT_ONCE = 10_000  # rows: a statement that takes a fraction of its timeout

NAME = re.compile(r"usage_records_\d{8}")
LOCK = text("SELECT pg_advisory_xact_lock(hashtext('usage_records'))")
MISSING = text("SELECT name FROM unnest(CAST(:names AS text[])) AS name WHERE to_regclass(name) IS NULL")
CANNOT_MAKE = text("SELECT to_regclass(:name) IS NOT NULL OR EXISTS (SELECT FROM usage_records_rest WHERE day = :day)")
PARTITIONS = text("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'usage_records'::regclass")

# Functions of the ledger's owner (migrations/first_functions.py), which a gateway need not be.
MAKE = text("SELECT make_usage_partition(:day)")
DROP = text("SELECT drop_usage_partition(to_date(right(:name, 8), 'YYYYMMDD'))")
DELETE = text("SELECT delete_usage_stragglers(:before, :most)")


async def ensure_partitions(connection: AsyncConnection, today: date) -> None:
    """Make the partitions of today and the days ahead, where they are missing; in a transaction.

    A day that already has rows in the default partition stays there.
    """
    days = [today + timedelta(days=ahead) for ahead in range(DAYS_AHEAD + 1)]
    coming = {partition_of(day): day for day in days}
    missing = (await connection.execute(MISSING, {"names": list(coming)})).scalars().all()
    if missing:
        await connection.execute(LOCK)  # one maker at a time; the others then find the partitions made
    for name in missing:
        values = {"name": name, "day": coming[name]}
        if not (await connection.execute(CANNOT_MAKE, values)).scalar_one():
            await connection.execute(MAKE, {"day": coming[name]})


async def old_partitions(connection: AsyncConnection, before: date) -> list[str]:
    """Return the partitions of days before ``before``, oldest first."""
    names = (await connection.execute(PARTITIONS)).scalars().all()
    return sorted(name for name in names if NAME.fullmatch(name) and name < partition_of(before))


async def drop_partition(connection: AsyncConnection, name: str) -> None:
    """Drop a day's rows. The daily sums stay: statements outlive the rows.

    Every query of the ledger waits meanwhile, so it aborts when another transaction makes it wait longer than a second.
    """
    await connection.execute(text("SET LOCAL lock_timeout = '1s'"))
    await connection.execute(LOCK)
    await connection.execute(DROP, {"name": name})


async def delete_stragglers(connection: AsyncConnection, before: date) -> int:
    """Delete up to ten thousand rows of days before ``before`` from the default partition; return how many."""
    return int((await connection.execute(DELETE, {"before": before, "most": DELETED_AT_ONCE})).scalar_one())


def partition_of(day: date) -> str:
    """Return the name of a day's partition."""
    return f"usage_records_{day:%Y%m%d}"
