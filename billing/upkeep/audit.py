# The audit: ledger, daily sums, leases and balances say the same, to the nano-dollar. All are read in one snapshot, and
# each is written in the transaction that writes its source, so whatever differs is wrong: nothing is on its way. And
# rows cost what their tokens cost by the price that they name.
#
# Each table is compared with what it is made of by one statement, inside Postgres: only what differs comes back. Over
# ten million rows that takes half a minute, so these statements have a deadline of their own.

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Any

from msgspec import Struct
from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.edges import Database, fetch_within
from billing.core.records import CHARGED
from billing.ledger.ledger import ROLLUP_KEY, SUMS, memory_begins
from billing.ledger.price_editions import compare_costs
from billing.ledger.tables import IS_CALL, IS_OF_VALUE
from billing.upkeep.sweep import VALUES_KEPT, first_month
from billing.upkeep.turns import database_moment

COSTS, STATEMENTS, LEASES, BALANCES = "costs", "statements", "leases", "balances"
MOST_TOLD = 1000  # differences of one table
WITHIN = 600.0  # seconds for the comparison of one table


class Difference(Struct, frozen=True, kw_only=True):
    """One quantity that a table does not share with what it is made of."""

    # "costs" differ from what a row's tokens cost, "statements" from the rows, "leases" from the statements, "balances"
    # from leases and corrections
    book: str
    day: date
    where: str  # "team_a 2026-04-05 key_a gpt-4o interactive answered", "team:team_a", "key:key_a 2026-04"
    quantity: str
    expected: int | None  # by what the table is made of; a cap may be none
    found: int | None


class Report(Struct, frozen=True):
    """What one audit compared: so many lines, leases and balances; and where they differ."""

    books: int
    differences: list[Difference]


async def audit(database: Database, day: date, *, today: date | None = None) -> Report:
    """Compare all tables for one day and its month. ``today`` is Postgres's to say, where it is not given.

    Nothing is locked, and no writer waits. Rows are compared as far as retention left them, leases and
    balances of this month and the last. Raises POSTGRES_AWAY.
    """
    async with database.begin() as connection:
        await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
        await connection.execute(text(f"SET LOCAL statement_timeout = {round(WITHIN * 1000)}"))
        await connection.execute(text("SET LOCAL work_mem = '64MB'"))  # or a day's rows are sorted to be added up
        count, costs = await compare_costs(connection, day, WITHIN)
        report = Report(count, [Difference(book=COSTS, day=day, **one) for one in costs])
        begins = await memory_begins(connection)
        if begins is None or day >= begins:
            report = await _compare(connection, report, STATEMENTS, LINES, {"day": day})
        moment = await database_moment(connection) if today is None else datetime(*today.timetuple()[:3], tzinfo=UTC)
        if day >= first_month(moment).date():
            values = {"charged": list(CHARGED), "has_values": day >= (moment - VALUES_KEPT).date()}
            report = await _compare(connection, report, LEASES, SPENT, {"day": day, **values})
            periods = {"first": day.replace(day=1), "period": f"{day}", "month": f"{day:%Y-%m}"}
            report = await _compare(connection, report, BALANCES, DRAWN, {"day": day, **periods})
    return report


async def _compare(
    connection: AsyncConnection, report: Report, book: str, query: TextClause, values: Mapping[str, Any]
) -> Report:
    """Add one table to a report. The query's first row says how many figures were compared, the others what differs."""
    count, *rows = await fetch_within(connection, query, {**values, "most": MOST_TOLD}, WITHIN)
    found = [Difference(book=book, day=values["day"], **row) for row in rows]
    return Report(report.books + count["expected"], report.differences + found)


_COUNT = """SELECT '' AS "where", '' AS quantity, count(*) AS expected, CAST(0 AS bigint) AS found FROM book"""
_KEY = ", ".join(ROLLUP_KEY)

# The rows of a day, added up, and its daily sums.
LINES = text(f"""
    WITH rows AS (
        SELECT {", ".join(f"{made} AS {name}" for name, made in ROLLUP_KEY.items())},
               count(*) FILTER (WHERE {IS_CALL}) AS calls,
               {", ".join(f"CAST(sum({name}) AS bigint) AS {name}" for name in SUMS[1:])}
        FROM usage_records WHERE day = :day GROUP BY {", ".join(ROLLUP_KEY.values())}
    ), daily AS (
        SELECT * FROM usage_daily WHERE day = :day
    ), book AS MATERIALIZED (
        SELECT concat_ws(' ', {_KEY}) AS line,
               ARRAY[{", ".join(f"coalesce(rows.{name}, 0)" for name in SUMS)}] AS expected,
               ARRAY[{", ".join(f"coalesce(daily.{name}, 0)" for name in SUMS)}] AS found
        FROM rows FULL JOIN daily USING ({_KEY})
    )
    {_COUNT}
    UNION ALL
    (SELECT line, figure.* FROM book, unnest(ARRAY[{", ".join(f"'{name}'" for name in SUMS)}], expected, found)
         AS figure (name, was, has)
     WHERE was <> has ORDER BY line, name LIMIT :most)
""")  # noqa: S608  (columns are ours)

# Whose limits a line of the ledger counts against: of a model only where its team has ever set some.
_SCOPES = """LATERAL (
                 VALUES ('team:' || team_id), ('key:' || key_id)
                 UNION ALL
                 SELECT 'model:' || id || '/' || model_used FROM teams
                 WHERE id = team_id AND jsonb_exists(model_limits, model_used)
             )"""

# What charged calls used of a day, by scope and unit, and what its leases say is spent; of end users and tags by the
# scopes that the rows say were held, as long as the sweep lets their leases be.
SPENT = text(f"""
    WITH used AS (
        SELECT scope.name COLLATE "C" AS scope, unit.name COLLATE "C" AS unit, sum(unit.amount) AS spent
        FROM usage_daily,
             {_SCOPES} AS scope (name),
             LATERAL (VALUES ('tokens', input_tokens + output_tokens), ('nanousd', cost_nanousd)) AS unit (name, amount)
        WHERE day = :day AND status = ANY(CAST(:charged AS text[]))
        GROUP BY 1, 2
        UNION ALL
        SELECT scope.name COLLATE "C", unit.name COLLATE "C", sum(unit.amount)
        FROM usage_records, unnest(held_scopes) AS scope (name),
             LATERAL (VALUES ('tokens', CAST(input_tokens AS bigint) + output_tokens), ('nanousd', cost_nanousd))
                 AS unit (name, amount)
        WHERE day = :day AND status = ANY(CAST(:charged AS text[])) AND :has_values
        GROUP BY 1, 2
    ), leased AS (
        SELECT scope, unit, sum(spent) AS spent FROM leases
        WHERE day = :day AND (:has_values OR NOT {IS_OF_VALUE})
        GROUP BY scope, unit
    ), book AS MATERIALIZED (
        SELECT scope, unit, CAST(coalesce(used.spent, 0) AS bigint) AS expected,
               CAST(coalesce(leased.spent, 0) AS bigint) AS found
        FROM used FULL JOIN leased USING (scope, unit)
    )
    {_COUNT}
    UNION ALL
    (SELECT scope, unit, expected, found FROM book WHERE expected <> found ORDER BY scope, unit LIMIT :most)
""")  # noqa: S608

# The balances of a day and its month, and what they are made of: leases, corrections and limits. A balance is also due
# where there are only leases or corrections.
DRAWN = text(f"""
    WITH lent AS (
        SELECT scope, unit, :period AS period, sum(granted - returned) AS drawn FROM leases
        WHERE day = :day GROUP BY scope, unit
        UNION ALL
        SELECT scope, unit, :month, sum(granted - returned) FROM leases
        WHERE unit = 'nanousd' AND day >= :first AND day < CAST(:first AS date) + interval '1 month'
        GROUP BY scope, unit
    ), entry AS (
        SELECT scope.name COLLATE "C" AS scope, unit.name COLLATE "C" AS unit, part.period,
               sum(unit.amount) AS corrected
        FROM corrections,
             {_SCOPES} AS scope (name),
             LATERAL (VALUES ('tokens', input_tokens + output_tokens), ('nanousd', cost_nanousd))
                 AS unit (name, amount),
             LATERAL (VALUES (to_char(day, 'YYYY-MM-DD')), (to_char(day, 'YYYY-MM'))) AS part (period)
        WHERE day >= :first AND day < CAST(:first AS date) + interval '1 month' AND scope.name IS NOT NULL
          AND (part.period = :period OR part.period = :month AND unit.name = 'nanousd')
        GROUP BY 1, 2, 3
    ), book AS MATERIALIZED (
        SELECT scope || ' ' || period COLLATE "C" AS place, unit, cap,
               CAST(coalesce(
                   team.limits, key.limits, of_model.limits,
                   limits_of_value(of_value.user_limits, of_value.tag_limits, scope)
               ) ->> (
                   unit || CASE length(period) WHEN 7 THEN '_per_month' ELSE '_per_day' END
               ) AS bigint) AS limit_of_row,
               CAST(coalesce(lent.drawn, 0) AS bigint) AS drawn, coalesce(balance.drawn, 0) AS drawn_found,
               CAST(coalesce(entry.corrected, 0) AS bigint) AS corrected,
               coalesce(balance.corrected, 0) AS corrected_found, balance.scope IS NOT NULL AS is_there
        FROM (SELECT * FROM balances WHERE period IN (:period, :month)) AS balance
        FULL JOIN lent USING (scope, unit, period)
        FULL JOIN entry USING (scope, unit, period)
        LEFT JOIN teams AS team ON scope = 'team:' || team.id
        LEFT JOIN api_keys AS key ON scope = 'key:' || key.id
        LEFT JOIN (
            SELECT 'model:' || id || '/' || model.name AS name, model.limits
            FROM teams, jsonb_each(model_limits) AS model (name, limits)
        ) AS of_model ON scope = of_model.name
        LEFT JOIN teams AS of_value ON {IS_OF_VALUE}
            AND of_value.id = split_part(substr(scope, strpos(scope, ':') + 1), '/', 1)
    )
    {_COUNT} WHERE is_there
    UNION ALL
    (SELECT place, figure.* FROM book, LATERAL (VALUES
        (unit || ' drawn', drawn, drawn_found),
        (unit || ' corrected', corrected, corrected_found),
        (unit || ' cap', limit_of_row, CASE WHEN is_there THEN cap ELSE limit_of_row END)
     ) AS figure (name, was, has)
     WHERE was IS DISTINCT FROM has ORDER BY place, name LIMIT :most)
""")  # noqa: S608
