# What all teams used, on a real Postgres with more teams than a page holds.

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import event, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.money import to_decimal, to_nano
from billing.ledger.corrections import Correction, add_correction
from billing.ledger.ledger import insert_records
from gateway.reports.admin_report import DEAREST, admin_usage
from gateway.storage.database import Database
from gateway.storage.tables import teams
from tests.support.clock import NOON, SetClock
from tests.support.factories import make_record

TODAY = date(2026, 4, 5)
TEAMS = 250


async def fill(connection: AsyncConnection) -> Decimal:
    """Book a call of each of 250 teams at one of three models, each dearer than the last; return what all cost."""
    clock = SetClock()
    names = [f"team_{number:03}" for number in range(TEAMS)]
    await connection.execute(insert(teams), [{"id": name, "name": name.upper()} for name in names])
    records = [
        make_record(clock.new_id(), team_id=name, model_used=f"model_{number % 3}", cost_nanousd=to_nano(number) + 1)
        for number, name in enumerate(names)
    ]
    await insert_records(connection, records, today=TODAY)
    return to_decimal(sum(record.cost_nanousd for record in records))


async def refund(connection: AsyncConnection, team_id: str) -> None:
    """Book a dollar back."""
    booked = Correction(
        id=UUID(SetClock().new_id()),
        team_id=team_id,
        day=TODAY,
        key_id=None,
        model_used=None,
        tier=None,
        request_id=None,
        input_tokens=0,
        output_tokens=0,
        cost_nanousd=-to_nano(1),
        reason="a test",
        actor="admin:test",
        booked_on=TODAY,
        created_at=SetClock().moment(),
    )
    assert await add_correction(connection, booked) is None


async def read(database: Database, after: str | None = None, limit: int = 100, first: date = TODAY) -> dict[str, Any]:
    """Return a page."""
    async with database.begin() as connection:
        return await admin_usage(connection, first, TODAY, TODAY, after=after, limit=limit)


async def test_totals_are_of_all_teams_whatever_the_page_shows(database: Database) -> None:
    """Pages walk through every team once; each carries the same sums, which are those of all their lines."""
    async with database.begin() as connection:
        owed = await fill(connection)
        await refund(connection, "team_007")

    pages = [await read(database)]
    while pages[-1]["has_more"]:
        pages.append(await read(database, after=pages[-1]["data"][-1]["id"]))

    shown = [team for page in pages for team in page["data"]]
    assert [team["id"] for team in shown] == [f"team_{number:03}" for number in range(TEAMS)]
    assert [len(page["data"]) for page in pages] == [100, 100, 50]
    assert sum(Decimal(team["usage"]["cost_usd_exact"]) for team in shown) == owed
    for page in pages:
        assert (page["total"]["requests"], Decimal(page["total"]["cost_usd_exact"])) == (
            TEAMS,
            owed,
        )
        assert page["total"]["corrections"]["cost_usd_exact"] == "-1.00"
    assert shown[7]["usage"]["corrections"]["cost_usd"] == -1 and "corrections" not in shown[8]["usage"]


async def test_the_dearest_lines_come_first_and_the_rest_is_one(database: Database) -> None:
    """At most so many lines however many teams there are; together they are the total."""
    async with database.begin() as connection:
        owed = await fill(connection)

    page = await read(database, limit=1)

    *dearest, rest = page["dearest"]
    assert [line["team_id"] for line in dearest] == [f"team_{TEAMS - 1 - number}" for number in range(DEAREST)]
    assert {line["model"] for line in dearest} == {"model_0", "model_1", "model_2"}
    assert (rest["team_id"], rest["others"]) == (None, TEAMS - DEAREST)
    assert sum(Decimal(line["cost_usd_exact"]) for line in page["dearest"]) == owed


async def test_a_team_without_calls_is_there_with_zeros(database: Database) -> None:
    """The list is of teams, not of calls: with their limits, and nothing used."""
    async with database.begin() as connection:
        await connection.execute(insert(teams).values(id="quiet", name="Quiet"))

    page = await read(database)

    [team] = page["data"]
    assert (team["id"], team["limits"]["usd_per_day"], team["usage"]["requests"]) == ("quiet", None, 0)
    assert page["dearest"] == [] and page["total"]["cost_usd_exact"] == "0.00"


async def test_today_is_told_beside_the_period(database: Database) -> None:
    """Of each team: what a day's limit is compared with."""
    yesterday = SetClock(NOON - 86_400)
    async with database.begin() as connection:
        await connection.execute(insert(teams).values(id="quiet", name="Quiet"))
        for clock in (yesterday, yesterday, SetClock()):
            await insert_records(connection, [make_record(clock.new_id(), team_id="quiet")], today=clock.today())

    [team] = (await read(database, first=yesterday.today()))["data"]

    assert (team["usage"]["requests"], team["usage_today"]["requests"]) == (3, 1)


async def test_a_page_costs_as_many_statements_however_many_teams(database: Database) -> None:
    """Postgres is asked the same few times for one team as for two hundred."""
    asked: list[str] = []
    event.listen(database.engine.sync_engine, "before_cursor_execute", lambda *said: asked.append(said[2]))
    await read(database)
    alone = len(asked)
    async with database.begin() as connection:
        await fill(connection)
    asked.clear()

    await read(database, limit=1000)

    assert len(asked) == alone <= 6
