# Balances follow what admins say: a limit in the transaction that sets it, a correction in the one that books it.

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from sqlalchemy import text

from billing.upkeep.audit import audit
from gateway.accounts.schemas import LimitsInput, NewKey, NewTeam, TeamPatch
from gateway.accounts.team_keys import create_key
from gateway.accounts.teams import create_team, update_team
from gateway.reports.corrections import NewCorrection, book_correction
from gateway.storage.audit_log import Act
from gateway.storage.database import Database
from tests.support.clock import NOON, SetClock
from tests.support.factories import make_record
from tests.support.lessee import Lessee

ACT = Act("admin:test")
DAY = 86_400.0


@pytest.fixture
async def owner(database: Database, clock: SetClock) -> Lessee:
    """An owner, and a team without limits that has a key with a limit."""
    async with database.begin() as connection:
        await create_team(connection, NewTeam(id="team_a"), ACT)
    return await Lessee(database, clock).begin()


async def limit(database: Database, **limits: Any) -> None:
    """Set limits of team_a."""
    async with database.begin() as connection:
        await update_team(connection, "team_a", TeamPatch(limits=LimitsInput(**limits)), ACT)


async def test_a_limit_set_at_noon_knows_the_morning(owner: Lessee, database: Database) -> None:
    """What was drawn without a limit counts; the next grant meets the new cap, in the same moment."""
    assert await owner.draw(1000, 5_000_000)
    await limit(database, usd_per_day=Decimal("0.006"), tokens_per_day=1500)

    assert not await owner.draw(0, 1_000_001)
    assert not await owner.draw(501, 0)
    assert await owner.draw(500, 1_000_000)
    assert await caps(database) == {("nanousd", "2026-04"): None, ("nanousd", "2026-04-05"): 6_000_000,
                                    ("tokens", "2026-04-05"): 1500}  # fmt: skip


async def test_a_lowered_limit_stops_grants_at_once_and_a_raised_one_lets_them_go_on(
    owner: Lessee, database: Database
) -> None:
    """What is drawn stays drawn, also above the cap; a limit that is taken away is none."""
    await limit(database, usd_per_month=Decimal("0.01"))
    assert await owner.draw(0, 9_000_000)
    await limit(database, usd_per_month=Decimal("0.005"))
    assert not await owner.draw(0, 1)
    await limit(database, usd_per_month=Decimal("0.0095"))
    assert await owner.draw(0, 500_000)
    assert not await owner.draw(0, 1)
    await limit(database, usd_per_month=None)

    assert await owner.draw(0, 10**12)


async def test_a_change_that_is_taken_back_changes_no_cap(owner: Lessee, database: Database) -> None:
    """Limit and cap are one transaction."""
    await owner.draw(10, 10)
    with pytest.raises(ZeroDivisionError):
        async with database.begin() as connection:
            await update_team(connection, "team_a", TeamPatch(limits=LimitsInput(tokens_per_day=1)), ACT)
            raise ZeroDivisionError

    assert set((await caps(database)).values()) == {None}


async def test_a_balance_that_begins_while_a_limit_is_set_has_the_limit(
    owner: Lessee, database: Database, database_url: str
) -> None:
    """The first draw of a day waits for the transaction that changes the row of the limit, and meets its cap."""
    other = await asyncpg.connect(database_url)
    try:
        async with other.transaction():
            limits = '{"nanousd_per_day": 5}'
            await other.execute("UPDATE teams SET limits = $1::jsonb WHERE id = 'team_a'", limits)
            await other.execute("SELECT follow_limits('team:team_a')")
            drawing = asyncio.create_task(owner.draw(0, 6))
            while not await other.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                await asyncio.sleep(0.01)
    finally:
        await other.close()

    assert not await drawing
    assert await owner.draw(0, 5)


async def test_limits_corrections_and_draws_at_once_leave_the_books_in_order(
    owner: Lessee, database: Database, clock: SetClock
) -> None:
    """Their locks are taken in one order, whichever comes first: none is a deadlock's victim, none is forgotten."""
    owners = [owner, *[await Lessee(database, clock, f"host:{number}").begin() for number in range(2, 4)]]

    async def change(number: int) -> None:
        await limit(database, usd_per_day=Decimal(number + 1), tokens_per_day=10**6 + number)

    async def correct(number: int) -> None:
        new = NewCorrection(
            team_id="team_a",
            date=f"2026-04-0{1 + number % 5}",
            cost_usd=Decimal("-0.000001"),
            reason="x",
            input_tokens=1,
        )
        async with database.begin() as connection:
            await book_correction(connection, new, ACT, clock, set())

    async def call(number: int) -> None:
        one = owners[number % 3]
        await one.draw(100, 1000)
        await one.book(make_record(clock.new_id()))

    await asyncio.gather(*(act(number) for number in range(12) for act in (change, correct, call)))

    for day in ("2026-04-01", "2026-04-05"):
        report = await audit(database, clock.today().fromisoformat(day), today=clock.today())
        assert report.differences == [] and report.books


async def test_a_correction_reaches_team_and_key_once(owner: Lessee, database: Database, clock: SetClock) -> None:
    """In the transaction that books it; repeated under its id it changes nothing; with a key, the key's too."""
    async with database.begin() as connection:
        limits = LimitsInput(usd_per_day=Decimal("0.001"))
        key = (await create_key(connection, "pepper", NewKey(team_id="team_a", limits=limits), ACT, NOON)).record.key_id
    new = NewCorrection(
        id=str(UUID(int=7)), team_id="team_a", key_id=key, date="2026-04-05", cost_usd=Decimal("0.0004"),
        output_tokens=9, reason="x",
    )  # fmt: skip
    for _ in range(3):
        async with database.begin() as connection:
            await book_correction(connection, new, ACT, clock, set())

    query = text("SELECT scope, unit, length(period), corrected FROM balances ORDER BY 1, 2, 3")
    async with database.begin() as connection:
        found = [tuple(row) for row in await connection.execute(query)]
    assert found == [
        (scope, *rest)
        for scope in (f"key:{key}", "team:team_a")
        for rest in (("nanousd", 7, 400_000), ("nanousd", 10, 400_000), ("tokens", 10, 9))
    ]
    assert not await owner.draw(0, 600_001, key_id=key)
    assert await owner.draw(0, 600_000, key_id=key)


async def caps(database: Database) -> dict[tuple[str, str], int | None]:
    """Return the caps of team_a's balances."""
    query = text("SELECT unit, period, cap FROM balances WHERE scope = 'team:team_a'")
    async with database.begin() as connection:
        return {(row.unit, row.period): row.cap for row in await connection.execute(query)}
