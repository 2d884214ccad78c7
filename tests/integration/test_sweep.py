# The sweeper, on a real Postgres: partitions, whose turn it is, and leases that have had their time.

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import asyncpg
import pytest
from sqlalchemy import text

from billing.upkeep.audit import audit
from billing.upkeep.sweep import CHORES_EVERY, STEADY, Sweeper, fold_leases
from billing.upkeep.turns import Turns
from gateway.storage.database import Database
from tests.support.clock import SetClock
from tests.support.factories import make_record
from tests.support.lessee import Lessee

TODAY = date(2026, 4, 5)
DAY = 86_400.0


@pytest.fixture
def database_url(new_database_url: str) -> str:
    """A database that nothing has prepared for any day."""
    return new_database_url


@pytest.fixture
async def sweeper(database: Database, clock: SetClock) -> Sweeper:
    """A sweeper of a house with one team, which keeps rows for 400 days."""
    async with database.begin() as connection:
        await connection.execute(text("INSERT INTO teams (id, name) VALUES ('team_a', 'A')"))
    return Sweeper(database, clock, Turns(database, clock, uses_server_time=False))


async def test_partitions_are_made_ahead_and_dropped_when_their_time_is_over(
    sweeper: Sweeper, database: Database, clock: SetClock
) -> None:
    """A week ahead there is a partition for each day; rows past their retention go, their sums stay."""
    await Lessee(database, clock, "").book(make_record(clock.new_id()))
    await sweeper.do_chores()
    assert await partitions(database) == [TODAY + timedelta(days=ahead) for ahead in range(8)]

    clock.move(401 * DAY)
    await Lessee(database, clock, "").book(make_record(clock.new_id()))
    await sweeper.do_chores()

    later = TODAY + timedelta(days=401)
    expected = [TODAY + timedelta(days=ahead) for ahead in range(1, 8)]
    assert await partitions(database) == expected + [later + timedelta(days=ahead) for ahead in range(8)]
    async with database.begin() as connection:
        assert (await connection.execute(text("SELECT count(*) FROM usage_records"))).scalar_one() == 1
        assert (await connection.execute(text("SELECT sum(calls) FROM usage_daily"))).scalar_one() == 2
        closed = (await connection.execute(text("SELECT min(day), max(day) FROM closed_days"))).one()
    assert tuple(closed) == (TODAY, later - timedelta(days=1))


async def test_one_process_does_the_chores_for_all(database: Database, clock: SetClock) -> None:
    """Of five sweepers one has the turn, the next has it ten minutes later."""
    sweepers = [Sweeper(database, clock, Turns(database, clock, uses_server_time=False)) for _ in range(5)]
    for sweeper in sweepers:
        assert not await sweeper.look_once()
    clock.move(STEADY)
    turns = [[await sweeper.look_once() for sweeper in sweepers] for _ in range(2)]
    clock.move(CHORES_EVERY + 1)
    turns.append([await sweeper.look_once() for sweeper in reversed(sweepers)])

    assert [sum(turn) for turn in turns] == [1, 0, 1]


async def test_after_an_outage_owners_have_a_minute_to_report(
    sweeper: Sweeper, database: Database, clock: SetClock
) -> None:
    """With Postgres away for two hours every owner looks lost: none is called so before a minute has passed."""
    owner = await Lessee(database, clock).begin()
    clock.move(2 * 3600)
    assert not await sweeper.look_once()
    clock.move(STEADY / 2)
    await owner.report()
    clock.move(STEADY / 2)

    assert await sweeper.look_once()
    assert sweeper.lost == 0


async def test_leases_of_ended_owners_become_one_when_their_day_is_closed(
    sweeper: Sweeper, database: Database, clock: SetClock
) -> None:
    """Three owners' leases of a day are one line; balances stay, and the books agree before and after."""
    owners = [await Lessee(database, clock, f"host:{number}").begin() for number in range(3)]
    living = await Lessee(database, clock, "living").begin()
    for owner in (*owners, living):
        assert await owner.draw(1000, 5_000_000)
        await owner.book(make_record(clock.new_id()))
    for owner in owners:
        await owner.end()
    balances = await rows(database, "SELECT * FROM balances ORDER BY 1, 2, 3")
    await sweeper.do_chores()
    assert len(await rows(database, "SELECT * FROM leases")) == 16  # the day is open

    clock.move(DAY)
    await living.report()
    await sweeper.do_chores()

    folded = "SELECT owner, granted, returned, spent FROM leases WHERE unit = 'nanousd' ORDER BY scope, owner"
    assert await rows(database, folded) == [("", 1_200_000, 0, 1_200_000), ("living", 5_000_000, 0, 400_000)] * 2
    assert await rows(database, "SELECT * FROM balances ORDER BY 1, 2, 3") == balances
    assert (await audit(database, TODAY, today=clock.today())).differences == []


async def test_a_late_row_of_a_folded_lease_is_counted(sweeper: Sweeper, database: Database, clock: SetClock) -> None:
    """A row that names an owner whose lease is folded is an overdraft of its own, and is folded in turn."""
    owner = await Lessee(database, clock).begin()
    await owner.draw(1000, 5_000_000)
    late = make_record(clock.new_id())
    await owner.book(make_record(clock.new_id()))
    await owner.end()
    clock.move(DAY)
    await sweeper.do_chores()

    await owner.book(late)
    assert (await audit(database, TODAY, today=clock.today())).differences == []
    await sweeper.do_chores()

    folded = "SELECT owner, granted, spent, overdrawn FROM leases WHERE unit = 'nanousd'"
    assert await rows(database, folded) == [("", 800_000, 800_000, 400_000)] * 2
    assert (await audit(database, TODAY, today=clock.today())).differences == []


async def test_no_row_is_lost_between_a_flush_and_a_fold(
    sweeper: Sweeper, database: Database, database_url: str, clock: SetClock
) -> None:
    """A fold waits for the transaction of a flush that holds the lease's row, and the other way round."""
    owner = await Lessee(database, clock).begin()
    await owner.draw(1000, 5_000_000)
    late = [make_record(clock.new_id()) for _ in range(2)]
    await owner.book(make_record(clock.new_id()))
    await owner.end()
    clock.move(DAY)
    await sweeper.close_finished_days()
    flush = await asyncpg.connect(database_url)
    try:
        async with flush.transaction():
            await flush.execute("SELECT pg_advisory_xact_lock_shared(hashtext('closed_days'))")
            impatient = "SET LOCAL lock_timeout = '50ms'"
            with pytest.raises(Exception, match="lock timeout"):
                async with database.begin() as connection:
                    await connection.execute(text(impatient))
                    await fold_leases(connection, clock.moment())
    finally:
        await flush.close()
    for record in late:
        await owner.book(record)
        await sweeper.fold_leases()

    assert (await audit(database, TODAY, today=clock.today())).differences == []
    assert await rows(database, "SELECT spent FROM leases WHERE unit = 'nanousd'") == [(1_200_000,)] * 2


async def test_leases_and_balances_of_past_months_go(sweeper: Sweeper, database: Database, clock: SetClock) -> None:
    """This month's and the last one's are kept; owners go a week after their end, once nothing is left of them."""
    for number in range(3):  # April, May, June
        owner = await Lessee(database, clock, f"host:{number}").begin()
        await owner.draw(1000, 5_000_000)
        await owner.book(make_record(clock.new_id()))
        await owner.end()
        clock.move(30 * DAY)
    clock.move(-25 * DAY)  # the tenth of June
    assert clock.today() == date(2026, 6, 9)

    await sweeper.do_chores()

    kept = {"2026-05-05", "2026-05", "2026-06-04", "2026-06"}
    assert {period for [period] in await rows(database, "SELECT period FROM balances")} == kept
    assert {str(day) for [day] in await rows(database, "SELECT day FROM leases")} == {"2026-05-05", "2026-06-04"}
    assert await rows(database, "SELECT id FROM owners") == [("host:2",)]
    for day in ("2026-05-05", "2026-06-04"):
        assert (await audit(database, date.fromisoformat(day), today=clock.today())).differences == []


async def partitions(database: Database) -> list[date]:
    """Return the days that have a partition."""
    query = "SELECT tablename FROM pg_tables WHERE tablename LIKE 'usage_records_2%' ORDER BY 1"
    return [date.fromisoformat(name.removeprefix("usage_records_")) for [name] in await rows(database, query)]


async def rows(database: Database, query: str) -> list[tuple[Any, ...]]:
    """Return the rows of a query."""
    async with database.begin() as connection:
        return [tuple(row) for row in await connection.execute(text(query))]
