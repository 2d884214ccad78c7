# A correction belongs to the month of the day that it corrects, whatever day it is booked on: for the limits of that
# month and for its statements, over all days of five years.

from __future__ import annotations

from collections import defaultdict
from datetime import date, timedelta
from uuid import UUID

from sqlalchemy import text

from billing.ledger.statements import period
from billing.upkeep.audit import audit
from gateway.storage.database import Database
from tests.support.clock import SetClock
from tests.support.lessee import Lessee

FIRST, LAST = date(2024, 1, 1), date(2028, 12, 31)  # two leap years among them
DAYS = [FIRST + timedelta(days=number) for number in range((LAST - FIRST).days + 1)]


async def test_a_correction_counts_against_the_limit_of_its_month(database: Database, clock: SetClock) -> None:
    """Fifty of the first, booked on any day of that month, leave ten of a cap of sixty; last month's stay there."""
    await Lessee(database, clock).begin()
    days = {"days": [day.isoformat() for day in DAYS]}
    for first in range(0, len(DAYS), 100):  # a team for each day
        some = {"days": days["days"][first : first + 100]}
        async with database.begin() as connection:
            for statement in (TEAMS, CORRECT_BOTH, DRAW):
                await connection.execute(text(statement), some)

    async with database.begin() as connection:
        wrong = (await connection.execute(text(WRONG), days)).all()
    assert wrong == []


async def test_a_correction_is_in_the_statement_of_its_month(database: Database) -> None:
    """One entry for each day, another amount each: statements and balances are their sums, and the audit agrees."""
    months: dict[date, int] = defaultdict(int)
    entries = []
    for number, day in enumerate(DAYS, start=1):
        months[day.replace(day=1)] += number
        entries.append({"id": UUID(int=number), "day": day, "cost": number})
    async with database.begin() as connection:
        await connection.execute(text("INSERT INTO teams (id, name) VALUES ('team_a', 'A')"))
        await connection.execute(text(BOOK), entries)
        days = {"days": [f"{day}" for day in DAYS], "costs": list(range(1, len(DAYS) + 1))}
        await connection.execute(text(CORRECT_EACH), days)

    for month, cost in months.items():
        following = (month + timedelta(days=31)).replace(day=1)
        last = following - timedelta(days=1)
        async with database.begin() as connection:
            found = await connection.execute(text(CORRECTED), {"month": f"{month:%Y-%m}"})
            assert found.scalar_one() == cost
            assert (await period(connection, "team_a", month, last)).corrections.cost_nanousd == cost
        assert (await audit(database, last, today=following)).differences == []


TEAMS = """
    INSERT INTO teams (id, name, limits) SELECT 'team_' || day, day, '{"nanousd_per_month": 60}'
    FROM unnest(CAST(:days AS text[])) AS day
"""
CORRECT_BOTH = """
    SELECT correct_balances(ARRAY['team:team_' || today], to_char(entry.day, 'YYYY-MM-DD'), 0, entry.cost)
    FROM unnest(CAST(:days AS text[])) AS today, LATERAL (VALUES
        (date_trunc('month', CAST(today AS date)), 50),
        (date_trunc('month', CAST(today AS date)) - interval '1 month', 7)
    ) AS entry (day, cost)
"""
DRAW = """
    SELECT take_room('host:1', day, ARRAY[0, 1], array_fill('team:team_' || day, ARRAY[2]), ARRAY['nanousd', 'nanousd'],
                     ARRAY[20, 10], ARRAY[20, 10], ARRAY[20, 10], 1.0, false, noon, noon)
    FROM unnest(CAST(:days AS text[])) AS day,
         LATERAL (SELECT CAST(day AS date) + interval '12 hours' AS noon) AS moment
"""
WRONG = """
    SELECT today, lease.granted, before.corrected FROM unnest(CAST(:days AS text[])) AS today
    LEFT JOIN leases AS lease ON lease.scope = 'team:team_' || today AND lease.day = CAST(today AS date)
    LEFT JOIN balances AS before ON before.scope = 'team:team_' || today AND before.unit = 'nanousd'
        AND before.period = to_char(date_trunc('month', CAST(today AS date)) - interval '1 month', 'YYYY-MM')
    WHERE lease.granted IS DISTINCT FROM 10 OR before.corrected IS DISTINCT FROM 7
"""
BOOK = """
    INSERT INTO corrections (id, team_id, day, cost_nanousd, input_tokens, output_tokens, reason, actor,
                             booked_on, created_at)
    VALUES (:id, 'team_a', :day, :cost, 0, 0, 'a test', 'admin:test', :day, now())
"""
CORRECT_EACH = """
    SELECT correct_balances(ARRAY['team:team_a'], day, 0, cost)
    FROM unnest(CAST(:days AS text[]), CAST(:costs AS bigint[])) AS entry (day, cost)
"""
CORRECTED = """
    SELECT corrected FROM balances WHERE scope = 'team:team_a' AND unit = 'nanousd' AND period = :month
"""
