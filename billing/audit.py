# The audit: ledger, daily sums, leases and balances say the same, to the nano-dollar. All are read in one snapshot, and
# each is written in the transaction that writes its source, so whatever differs is wrong: nothing is on its way.
#
# What a row costs is not reckoned again: rows name no edition of a price yet (usage_records.price is empty). Once they
# do, that is one more comparison, beside compare_lines and by the same pages.

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, date, datetime
from typing import Any

from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.edges import Database
from billing.fold import first_month
from billing.records import CHARGED
from billing.row_sums import compare_lines

STATEMENTS, LEASES, BALANCES = "statements", "leases", "balances"
MOST_TOLD = 1000  # differences of one book, of a page
PAGE = 1000  # teams and keys whose leases and balances are compared by one statement: some 400,000 leases of 200 owners
AFTER_ALL = "\x7f"  # after the name of any scope


class Difference(Struct, frozen=True, kw_only=True):
    """One quantity that a book does not share with what it is made of."""

    book: str  # "statements" differ from the rows, "leases" from the statements, "balances" from leases and corrections
    day: date
    where: str  # "team_a 2026-04-05 key_a gpt-4o interactive answered", "team:team_a", "key:key_a 2026-04"
    quantity: str
    expected: int | None  # by what the book is made of; a cap may be none
    found: int | None


class Report(Struct, frozen=True):
    """What one audit compared: so many lines, leases and balances; and where they differ."""

    books: int
    differences: list[Difference]


async def audit(database: Database, day: date, *, today: date | None = None) -> Report:
    """Compare all books of one day and its month. ``today`` is Postgres's to say, where it is not given.

    Rows are added up a page at a time, teams and keys compared some at a time, so that no statement takes long; nothing
    is locked, and nothing of it waits.
    Leases and balances are kept of this month and the last. Raises POSTGRES_AWAY.
    """
    async with database.begin() as connection:
        await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
        books, lines = await compare_lines(connection, day)
        differences = [
            Difference(book=STATEMENTS, day=day, where=one.line, quantity=one.name, expected=one.rows, found=one.daily)
            for one in lines
        ]
        moment = await database_moment(connection) if today is None else datetime(*today.timetuple()[:3], tzinfo=UTC)
        if day >= first_month(moment).date():
            async for after, until in _pages(connection):
                for compare in (_compare_leases, _compare_balances):
                    count, found = await compare(connection, day, after, until)
                    books += count
                    differences += found
    return Report(books, differences)


async def database_moment(connection: AsyncConnection) -> datetime:
    """Return Postgres's time."""
    moment = (await connection.execute(text("SELECT clock_timestamp()"))).scalar_one()
    assert isinstance(moment, datetime)
    return moment.astimezone(UTC)


async def _pages(connection: AsyncConnection) -> AsyncIterator[tuple[str, str]]:
    """Yield spans of the names of scopes, each after the first of the two and up to the second, that cover them all."""
    after = ""
    while len(names := (await connection.execute(SCOPES, {"after": after, "page": PAGE})).scalars().all()) == PAGE:
        yield after, names[-1]
        after = names[-1]
    yield after, AFTER_ALL


async def _compare_leases(
    connection: AsyncConnection, day: date, after: str, until: str
) -> tuple[int, list[Difference]]:
    """Compare what charged calls used of a day, by scope and unit, with what its leases say is spent."""
    values = {"day": day, "charged": list(CHARGED), "after": after, "until": until, "most": MOST_TOLD}
    return _read(LEASES, day, (await connection.execute(STATEMENTS_AND_LEASES, values)).mappings().all())


async def _compare_balances(
    connection: AsyncConnection, day: date, after: str, until: str
) -> tuple[int, list[Difference]]:
    """Compare the balances of a day and its month with leases, corrections and limits."""
    periods = {"day": day, "first": day.replace(day=1), "period": f"{day}", "month": f"{day:%Y-%m}"}
    values = {**periods, "after": after, "until": until, "most": MOST_TOLD}
    return _read(BALANCES, day, (await connection.execute(SOURCES_AND_BALANCES, values)).mappings().all())


def _read(book: str, day: date, rows: Any) -> tuple[int, list[Difference]]:
    """Return how many were compared, which the first row says, and the differences of the others."""
    differences = [
        Difference(
            book=book,
            day=day,
            where=row["place"],
            quantity=row["quantity"],
            expected=None if row["expected"] is None else int(row["expected"]),
            found=None if row["found"] is None else int(row["found"]),
        )
        for row in rows[1:]
    ]
    return int(rows[0]["expected"]), differences


SCOPES = text("SELECT DISTINCT scope FROM balances WHERE scope > :after ORDER BY scope LIMIT :page")

STATEMENTS_AND_LEASES = text("""
    WITH used AS (
        SELECT scope.name COLLATE "C" AS scope, unit.name COLLATE "C" AS unit, sum(unit.amount) AS spent
        FROM usage_daily,
             LATERAL (VALUES ('team:' || team_id), ('key:' || key_id)) AS scope (name),
             LATERAL (VALUES ('tokens', input_tokens + output_tokens), ('nanousd', cost_nanousd)) AS unit (name, amount)
        WHERE day = :day AND status = ANY(CAST(:charged AS text[]))
          AND scope.name COLLATE "C" > :after AND scope.name COLLATE "C" <= :until
        GROUP BY 1, 2
    ), leased AS (
        SELECT scope, unit, sum(spent) AS spent FROM leases
        WHERE scope > :after AND scope <= :until AND day = :day
        GROUP BY scope, unit
    ), book AS MATERIALIZED (
        SELECT scope, unit, coalesce(used.spent, 0) AS expected, coalesce(leased.spent, 0) AS found
        FROM used FULL JOIN leased USING (scope, unit)
    )
    SELECT '' AS place, '' AS quantity, count(*) AS expected, 0 AS found FROM book
    UNION ALL
    (SELECT scope, unit, expected, found FROM book WHERE expected <> found ORDER BY scope, unit LIMIT :most)
""")

# A balance is also due where there are only leases or corrections.
SOURCES_AND_BALANCES = text("""
    WITH lent AS (
        SELECT scope, unit, :period AS period, sum(granted - returned) AS drawn FROM leases
        WHERE scope > :after AND scope <= :until AND day = :day GROUP BY scope, unit
        UNION ALL
        SELECT scope, unit, :month, sum(granted - returned) FROM leases
        WHERE scope > :after AND scope <= :until
          AND unit = 'nanousd' AND day >= :first AND day < CAST(:first AS date) + interval '1 month'
        GROUP BY scope, unit
    ), entry AS (
        SELECT scope.name COLLATE "C" AS scope, unit.name COLLATE "C" AS unit, part.period,
               sum(unit.amount) AS corrected
        FROM corrections,
             LATERAL (VALUES ('team:' || team_id), ('key:' || key_id)) AS scope (name),
             LATERAL (VALUES ('tokens', input_tokens + output_tokens), ('nanousd', cost_nanousd))
                 AS unit (name, amount),
             LATERAL (VALUES (to_char(day, 'YYYY-MM-DD')), (to_char(day, 'YYYY-MM'))) AS part (period)
        WHERE day >= :first AND day < CAST(:first AS date) + interval '1 month'
          AND scope.name COLLATE "C" > :after AND scope.name COLLATE "C" <= :until
          AND (part.period = :period OR part.period = :month AND unit.name = 'nanousd')
        GROUP BY 1, 2, 3
    ), book AS MATERIALIZED (
        SELECT scope, unit, period COLLATE "C" AS period, balance.scope IS NOT NULL AS is_there,
               coalesce(lent.drawn, 0) AS drawn, coalesce(balance.drawn, 0) AS drawn_found,
               coalesce(entry.corrected, 0) AS corrected, coalesce(balance.corrected, 0) AS corrected_found,
               balance.cap, CAST(coalesce(team.limits, key.limits) ->> (
                   unit || CASE length(period) WHEN 7 THEN '_per_month' ELSE '_per_day' END
               ) AS bigint) AS limit_of_row
        FROM (
            SELECT * FROM balances WHERE scope > :after AND scope <= :until AND period IN (:period, :month)
        ) AS balance
        FULL JOIN lent USING (scope, unit, period)
        FULL JOIN entry USING (scope, unit, period)
        LEFT JOIN teams AS team ON scope = 'team:' || team.id
        LEFT JOIN api_keys AS key ON scope = 'key:' || key.id
    ), figure AS (
        SELECT scope || ' ' || period AS place, name AS quantity, expected, found
        FROM book, LATERAL (VALUES
            (unit || ' drawn', drawn, CAST(drawn_found AS numeric)),
            (unit || ' corrected', corrected, corrected_found),
            (unit || ' cap', CASE WHEN is_there THEN limit_of_row END, cap)
        ) AS quantity (name, expected, found)
        WHERE expected IS DISTINCT FROM found
        ORDER BY scope, period, unit
        LIMIT :most
    )
    SELECT '' AS place, '' AS quantity, CAST(count(*) AS numeric) AS expected, 0 AS found FROM book WHERE is_there
    UNION ALL
    SELECT place, quantity, expected, found FROM figure
""")
