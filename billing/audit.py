# The audit: ledger, statements and counters say the same, to the nano-dollar, or somebody hears of it.

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import date

from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.edges import Database
from billing.ledger import EPOCH, ROLLUP_KEY, SUMS
from billing.quotas import Quotas
from billing.records import CHARGED

TRIES = 4  # calls close, flush and settle while we look: only what stays different counts
PAUSE = 0.5  # seconds between tries


class Difference(Struct, frozen=True, kw_only=True):
    """One quantity that two books disagree on."""

    day: date
    team_id: str
    where: str  # the line within the day: "key_a gpt-4o interactive answered", or "day", or "month"
    quantity: str
    ledger: int
    statements: int | None = None
    counters: int | None = None


async def audit(database: Database, quotas: Quotas, day: date) -> list[Difference]:
    """Compare all books of one day, and return where they differ even after a moment's patience.

    Counters that Redis no longer has are left out.
    """
    lasting: list[Difference] = []
    for attempt in range(TRIES):
        if attempt:
            await asyncio.sleep(PAUSE)
        async with database.begin() as connection:
            found = await compare_statements(connection, day) + await compare_counters(connection, quotas, day)
        where = {(one.team_id, one.where, one.quantity) for one in lasting}
        lasting = [one for one in found if attempt == 0 or (one.team_id, one.where, one.quantity) in where]
        if not lasting:
            break
    return lasting


async def compare_statements(connection: AsyncConnection, day: date) -> list[Difference]:
    """Compare the ledger's rows of a day with its daily sums, line by line."""
    differences = []
    for row in (await connection.execute(LEDGER_AND_STATEMENTS, {"day": day})).mappings():
        where = " ".join(str(row[name]) for name in ROLLUP_KEY if name not in ("team_id", "day"))
        for name in SUMS:
            ledger, statements = int(row[f"ledger_{name}"] or 0), int(row[f"statements_{name}"] or 0)
            if ledger != statements:
                differences.append(
                    Difference(
                        day=day,
                        team_id=row["team_id"],
                        where=where,
                        quantity=name,
                        ledger=ledger,
                        statements=statements,
                    )
                )
    return differences


async def compare_counters(connection: AsyncConnection, quotas: Quotas, day: date) -> list[Difference]:
    """Compare each team's sums of a day, and of its month, with what the quotas have counted."""
    charged = [status.value for status in CHARGED]
    rows = (await connection.execute(OWED, {"day": day, "charged": charged})).mappings().all()
    differences = []
    for row in rows:
        state = await quotas.usage(row["team_id"], day=(day - EPOCH).days)
        if not state.knows_day:
            continue
        for where, quantity, ledger, counted in (
            ("day", "tokens", row["day_tokens"], state.day_tokens),
            ("day", "cost_nanousd", row["day_nanousd"], state.day_nanousd),
            ("month", "cost_nanousd", row["month_nanousd"], state.month_nanousd),
        ):
            if int(ledger or 0) != counted:
                differences.append(
                    Difference(
                        day=day,
                        team_id=row["team_id"],
                        where=where,
                        quantity=quantity,
                        ledger=int(ledger or 0),
                        counters=counted,
                    )
                )
    return differences


def _sums(book: str, sums: Sequence[str]) -> str:
    return ", ".join(f"{book}.{name} AS {book}_{name}" for name in sums)


_KEY = ", ".join(ROLLUP_KEY)
_LEDGER_KEY = _KEY.replace("booked_on", "coalesce(booked_on, day) AS booked_on")
_LEDGER_SUMS = ", ".join("count(*) AS calls" if name == "calls" else f"sum({name}) AS {name}" for name in SUMS)

LEDGER_AND_STATEMENTS = text(f"""
    SELECT {_KEY}, {_sums("ledger", SUMS)}, {_sums("statements", SUMS)}
    FROM (SELECT {_LEDGER_KEY}, {_LEDGER_SUMS} FROM usage_records WHERE day = :day
          GROUP BY {_KEY.replace("booked_on", "coalesce(booked_on, day)")}) AS ledger
    FULL JOIN (SELECT * FROM usage_daily WHERE day = :day) AS statements USING ({_KEY})
    ORDER BY {_KEY}
""")  # noqa: S608  (columns are ours)

OWED = text("""
    SELECT team_id,
           sum(input_tokens + output_tokens) FILTER (WHERE day = :day) AS day_tokens,
           sum(cost_nanousd) FILTER (WHERE day = :day) AS day_nanousd,
           sum(cost_nanousd) AS month_nanousd
    FROM usage_daily
    WHERE status = ANY(CAST(:charged AS text[]))
      AND day >= date_trunc('month', CAST(:day AS date))
      AND day < date_trunc('month', CAST(:day AS date)) + interval '1 month'
    GROUP BY team_id
    ORDER BY team_id
""")
