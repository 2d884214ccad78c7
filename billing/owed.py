# What every team and key owes by the books in Postgres: statements and corrections, all or from before a moment.

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.corrections import sums_of
from billing.holds import Sums
from billing.ids import least_id
from billing.records import CHARGED

Book = tuple[str, str | None]  # a team's id, and a key's of it or None for the whole team: whoever has limits


async def owed_by(connection: AsyncConnection, day: date, before: float | None = None) -> dict[Book, Sums]:
    """Return what every team and key owes for ``day`` and its month, in one snapshot.

    ``before``: unix seconds; the rows of calls that are younger are left out.
    """
    await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
    query = {"day": day, "charged": list(CHARGED)}
    amounts: dict[Book, list[int]] = {(row.team_id, None): [0, 0, 0] for row in await connection.execute(TEAMS)}
    for row in await connection.execute(OWED, query):
        more = int(row.day_tokens or 0), int(row.day_nanousd or 0), int(row.month_nanousd)
        _add(amounts, row.team_id, row.key_id, *more)
    moment = None
    if before is not None:
        moment = datetime.fromtimestamp(before, UTC)
        younger = query | {"first": least_id(before), "first_day": moment.date()}
        for row in await connection.execute(YOUNGER, younger):
            less = -int(row.day_tokens or 0), -int(row.day_nanousd or 0), -int(row.month_nanousd)
            _add(amounts, row.team_id, row.key_id, *less)
    first = day.replace(day=1)
    last = (first + timedelta(days=31)).replace(day=1) - timedelta(days=1)
    for one in await sums_of(connection, first, last, before=moment):
        is_of_day = one.day == day
        more = one.tokens * is_of_day, one.cost_nanousd * is_of_day, one.cost_nanousd
        _add(amounts, one.team_id, one.key_id, *more)
    return {book: Sums(*each) for book, each in amounts.items()}


def _add(amounts: dict[Book, list[int]], team_id: str, key_id: str | None, *more: int) -> None:
    """Add to the team's book, and to its key's."""
    for book in {(team_id, None), (team_id, key_id)}:
        present = amounts.setdefault(book, [0, 0, 0])
        amounts[book] = [one + another for one, another in zip(present, more, strict=True)]


TEAMS = text("SELECT id AS team_id FROM teams")

_SUMS = """
    sum(input_tokens + output_tokens) FILTER (WHERE day = :day) AS day_tokens,
    sum(cost_nanousd) FILTER (WHERE day = :day) AS day_nanousd,
    sum(cost_nanousd) AS month_nanousd
"""

OWED = text(f"""
    SELECT team_id, key_id, {_SUMS}
    FROM usage_daily
    WHERE status = ANY(CAST(:charged AS text[]))
      AND day >= date_trunc('month', CAST(:day AS date))
      AND day < date_trunc('month', CAST(:day AS date)) + interval '1 month'
    GROUP BY team_id, key_id
    ORDER BY team_id, key_id
""")  # noqa: S608  (columns are ours)

YOUNGER = text(f"""
    SELECT team_id, key_id, {_SUMS}
    FROM usage_records
    WHERE status = ANY(CAST(:charged AS text[]))
      AND day >= greatest(CAST(:first_day AS date), CAST(date_trunc('month', CAST(:day AS date)) AS date))
      AND day < date_trunc('month', CAST(:day AS date)) + interval '1 month'
      AND request_id >= :first
    GROUP BY team_id, key_id
""")  # noqa: S608  (columns are ours)
