# A correction belongs to the month of the day that it corrects, whatever day it is booked on: for the limits of that
# month and for its statements, over all days of five years.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from uuid import UUID

from sqlalchemy import text

from billing.audit import audit
from billing.corrections import Correction, add_correction
from billing.statements import period
from gateway.database import Database
from tests.support.clock import SetClock
from tests.support.lessee import Lessee

FIRST, LAST = date(2024, 1, 1), date(2028, 12, 31)  # two leap years among them


async def test_a_correction_counts_against_the_limit_of_its_month(database: Database, clock: SetClock) -> None:
    """Fifty of the first, booked on any day of that month, leave ten of a cap of sixty; last month's stay there."""
    wrong = []
    owner = Lessee(database, clock)
    for today in every_day():
        clock.time = datetime(today.year, today.month, today.day, 12, tzinfo=UTC).timestamp()
        await owner.begin()
        team, last = f"team_{today}", last_month(today)
        async with database.begin() as connection:
            made = text("INSERT INTO teams (id, name, limits) VALUES (:id, :id, '{\"nanousd_per_month\": 60}')")
            await connection.execute(made, {"id": team})
            for day, cost in ((today.replace(day=1), 50), (last, 7)):
                await add_correction(connection, entry(UUID(clock.new_id()), team, day, cost, clock))
        answers = [await owner.draw(0, cost, team_id=team, key_id=f"key_{today}") for cost in (20, 10)]
        async with database.begin() as connection:
            counted = (
                await connection.execute(CORRECTED, {"scope": f"team:{team}", "month": f"{last:%Y-%m}"})
            ).scalar()
        if answers != [False, True] or counted != 7:
            wrong.append(today)

    assert wrong == []


async def test_a_correction_is_in_the_statement_of_its_month(database: Database, clock: SetClock) -> None:
    """One entry for each day, another amount each: statements and balances are their sums, and the audit agrees."""
    months: dict[date, int] = defaultdict(int)
    async with database.begin() as connection:
        await connection.execute(text("INSERT INTO teams (id, name) VALUES ('team_a', 'A')"))
        for number, day in enumerate(every_day(), start=1):
            months[day.replace(day=1)] += number
            await add_correction(connection, entry(UUID(int=number), "team_a", day, number, clock))

    for month, cost in months.items():
        following = (month + timedelta(days=31)).replace(day=1)
        last = following - timedelta(days=1)
        async with database.begin() as connection:
            found = await connection.execute(CORRECTED, {"scope": "team:team_a", "month": f"{month:%Y-%m}"})
            assert found.scalar_one() == cost
            assert (await period(connection, "team_a", month, last)).corrections.cost_nanousd == cost
        for day in (month, last):
            assert (await audit(database, day, today=following)).differences == []


def every_day() -> Iterator[date]:
    """Yield all days of the five years."""
    yield from (FIRST + timedelta(days=number) for number in range((LAST - FIRST).days + 1))


def last_month(day: date) -> date:
    """Return the first day of the month before that of ``day``."""
    return (day.replace(day=1) - timedelta(days=1)).replace(day=1)


def entry(identity: UUID, team_id: str, day: date, cost: int, clock: SetClock) -> Correction:
    """Return a correction of a day, booked now."""
    return Correction(
        id=identity,
        team_id=team_id,
        day=day,
        cost_nanousd=cost,
        reason="a test",
        actor="admin:test",
        booked_on=clock.today(),
        created_at=clock.moment(),
    )


CORRECTED = text("SELECT corrected FROM balances WHERE scope = :scope AND unit = 'nanousd' AND period = :month")
