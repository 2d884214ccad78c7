# How rows that were new are booked on the leases of their owners, in the transaction that inserts them.

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.records import UsageRecord
from tests.simulation.sql_model import day_in, spent_by

BOOK = text("""
    SELECT book_spent(:flusher, CAST(:owners AS text[]), CAST(:scopes AS text[]), CAST(:units AS text[]),
                      CAST(:days AS text[]), CAST(:amounts AS bigint[]))
""")


async def book(connection: AsyncConnection, flusher: str, new: Sequence[UsageRecord]) -> int | None:
    """Book what new rows have spent; returns the flusher's beat."""
    spent: dict[tuple[str, str, str, str], int] = {}
    for record in new:
        for key, amount in spent_by(record, day_in(record.request_id)):
            spent[key] = spent.get(key, 0) + amount
    values = {"flusher": flusher, "amounts": list(spent.values())}
    for at, name in enumerate(("owners", "scopes", "units", "days")):
        values[name] = [key[at] for key in spent]
    return (await connection.execute(BOOK, values)).scalar_one()
