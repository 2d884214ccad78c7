# A correction belongs to the month of the day that it corrects, whatever day it is booked on: for the limits of that
# month and for its statements, over all days of five years.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from uuid import UUID

from sqlalchemy import text

from billing.holds import Hold, HoldRequest, Leg, Limits, RefusedHold, Scope
from billing.ids import day_number
from billing.ledger_sums import read_scope_sums
from billing.owed import owed_by
from billing.quotas import Quotas
from billing.statements import period
from gateway.database import Database
from tests.support.clock import SetClock

FIRST, LAST = date(2024, 1, 1), date(2028, 12, 31)  # two leap years among them
TEAM = Scope("team", "team_a", Limits())


async def test_a_correction_counts_against_the_limit_of_its_month(quotas: Quotas, clock: SetClock) -> None:
    """Fifty of the first, booked on any day of that month, leave ten of a cap of sixty; last month's stay there."""
    wrong = []
    for today in every_day():
        clock.time = datetime(today.year, today.month, today.day, 12, tzinfo=UTC).timestamp()
        team, last = f"team_{today}", last_month(today)
        for day, cost in ((today.replace(day=1), 50), (last, 7)):
            await quotas.correct(clock.new_id(), team, None, day_number(day), 0, cost)
        answers = [await quotas.open(ask(clock, team, cost)) for cost in (20, 10)]
        counted = (await quotas.usage(team, day=day_number(last))).month_nanousd
        if not (isinstance(answers[0], RefusedHold) and isinstance(answers[1], Hold) and counted == 7):
            wrong.append(today)

    assert wrong == []


async def test_a_correction_is_in_the_statement_of_its_month(database: Database) -> None:
    """One entry for each day, another amount each: statements, and what limits begin with, are their sums."""
    months: dict[date, int] = defaultdict(int)
    entries = []
    for number, day in enumerate(every_day(), start=1):
        months[day.replace(day=1)] += number
        entries.append({"id": UUID(int=number), "day": day, "cost": number})
    async with database.begin() as connection:
        await connection.execute(text("INSERT INTO teams (id, name) VALUES ('team_a', 'A')"))
        await connection.execute(BOOK, entries)

    for month, cost in months.items():
        following = (month + timedelta(days=31)).replace(day=1)
        last = following - timedelta(days=1)
        for day in (month, last):
            async with database.begin() as connection:
                owed = (await owed_by(connection, day))["team_a", None].month_nanousd
            async with database.begin() as connection:
                begun = (await read_scope_sums(connection, TEAM, "team_a", day_number(day))).month_nanousd
            assert (owed, begun) == (cost, cost), day
        async with database.begin() as connection:
            assert (await period(connection, "team_a", month, last)).corrections.cost_nanousd == cost


def every_day() -> Iterator[date]:
    """Yield all days of the five years."""
    yield from (FIRST + timedelta(days=number) for number in range((LAST - FIRST).days + 1))


def last_month(day: date) -> date:
    """Return the first day of the month before that of ``day``."""
    return (day.replace(day=1) - timedelta(days=1)).replace(day=1)


def ask(clock: SetClock, team_id: str, cost: int) -> HoldRequest:
    """Return a request for a hold under a cap of sixty a month."""
    return HoldRequest(
        request_id=clock.new_id(),
        team_id=team_id,
        scopes=(Scope("team", team_id, Limits(nanousd_per_month=60)),),
        legs=(Leg("a", 1, cost),),
        valid_until=clock.now() + 5,
    )


BOOK = text("""
    INSERT INTO corrections (id, team_id, day, cost_nanousd, input_tokens, output_tokens, reason, actor,
                             booked_on, created_at)
    VALUES (:id, 'team_a', :day, :cost, 0, 0, 'a test', 'admin:test', :day, now())
""")
