# Days of the ledger: when they close, what comes too late, and what clocks that are wrong can do to them.

from __future__ import annotations

import os
from datetime import date, timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

from billing.journal.journal import Journal
from billing.ledger.ledger import insert_records
from billing.quotas.lease_store import RESERVATIONS, PostgresLeases
from billing.quotas.leases import Leases
from billing.quotas.reservations import Reservations
from billing.upkeep.flusher import Flusher
from billing.upkeep.owner import Owner, owner_id
from billing.upkeep.sweep import Sweeper
from billing.upkeep.turns import Turns
from gateway.storage.database import Database
from tests.support.clock import SetClock
from tests.support.factories import make_record
from tests.support.lessee import Lessee

TODAY = date(2026, 4, 5)
DAY, HOUR = 86_400.0, 3600.0


@pytest.fixture
def sweeper(database: Database, clock: SetClock) -> Sweeper:
    """A sweeper that keeps rows for 400 days."""
    return Sweeper(database, clock, Turns(database, clock, uses_server_time=False))


def process(folder: Path, database: Database, clock: SetClock) -> tuple[Journal, Flusher, Owner]:
    """Return a process's journal, its flusher, and itself as the database knows it."""
    journal = Journal.open(folder, clock=clock)
    store = PostgresLeases(database, clock, uses_server_time=False)
    leases = Leases(store, clock, owner_id(journal), share=0.5)
    flusher = Flusher(journal, database, clock, leases)
    return journal, flusher, Owner(leases, flusher, journal, clock)


async def test_a_day_closes_when_every_owner_has_passed_it(
    sweeper: Sweeper, database: Database, clock: SetClock, tmp_path: Path
) -> None:
    """A call that still runs keeps its day open, however long; once it is in the ledger the day closes."""
    journal, flusher, owner = process(tmp_path, database, clock)
    record = make_record(clock.new_id())
    journal.opened(record)
    clock.move(DAY)
    await owner.beat()
    await sweeper.close_finished_days()
    assert await closed_days(database) == []

    journal.closed(record)
    await flusher.flush_once()
    await owner.beat()
    await sweeper.close_finished_days()

    assert await closed_days(database) == [TODAY]
    assert (sweeper.lost, await booked(database)) == (0, [(TODAY, TODAY, 1)])


async def test_a_journal_that_does_not_return_is_lost_after_an_hour_and_may_return_later(
    sweeper: Sweeper, database: Database, clock: SetClock, tmp_path: Path
) -> None:
    """It holds its day open for an hour after the last word, then the day closes; what it brings later is corrected."""
    dead, _, silent = process(tmp_path / "dead", database, clock)
    other, flusher, speaking = process(tmp_path / "other", database, clock)
    late, kept = make_record(clock.new_id()), make_record(clock.new_id())
    dead.opened(late)
    dead.closed(late)
    await silent.beat()
    dead.close()  # its machine is gone, and the disk with it
    other.opened(kept)
    other.closed(kept)
    await flusher.flush_once()

    clock.move(DAY)
    await speaking.beat()
    await hear_of_all(database)
    clock.move(HOUR - 1)
    await speaking.beat()
    await sweeper.close_finished_days()
    assert (await closed_days(database), sweeper.lost) == ([], 0)
    clock.move(2)
    await sweeper.close_finished_days()
    assert (await closed_days(database), sweeper.lost) == ([TODAY], 1)
    assert await listed(database) == sorted([silent.id, speaking.id])  # what it holds stays reserved

    _, flusher, _ = process(tmp_path / "dead", database, clock)
    await flusher.adopt()
    await flusher.flush_once()

    assert await booked(database) == [(TODAY, TODAY, 1), (TODAY, TODAY + timedelta(days=1), 1)]


async def test_a_reservation_that_no_worker_looks_after_is_no_journal(
    sweeper: Sweeper, database: Database, clock: SetClock
) -> None:
    """Its room stays held while all workers are away, and nothing is lost: no operator is called for it."""
    store = PostgresLeases(database, clock, uses_server_time=False)
    await Reservations(store, clock).begin(f"{RESERVATIONS}1")
    clock.move(2 * HOUR)
    await sweeper.close_finished_days()

    assert (await listed(database), sweeper.lost) == ([f"{RESERVATIONS}1"], 0)


async def test_the_dead_end_once_their_journals_are_carried(
    sweeper: Sweeper, database: Database, clock: SetClock, tmp_path: Path
) -> None:
    """A neighbour that has flushed what it adopted speaks for the dead: no day waits for the hour, nothing is lost."""
    dead, _, silent = process(tmp_path, database, clock)
    for _ in range(3):
        dead.closed(make_record(clock.new_id(), owner=silent.id))
    await silent.beat()
    dead.close()
    die(silent)
    neighbour, flusher, living = process(tmp_path, database, clock)
    await flusher.adopt()
    await living.beat()
    clock.move(DAY)
    await living.beat()
    await hear_of_all(database)
    await sweeper.close_finished_days()
    assert (await listed(database), await closed_days(database)) == (sorted([silent.id, living.id]), [])

    await flusher.flush_once()
    await living.end_dead()
    await living.beat()
    await sweeper.close_finished_days()

    assert (await listed(database), await closed_days(database), sweeper.lost) == ([living.id], [TODAY], 0)
    assert [path.name for path in tmp_path.glob("*.owner")] == [f"{neighbour.token}.owner"]


async def test_an_owner_that_returns_after_an_hour_may_be_lost_again(
    sweeper: Sweeper, database: Database, clock: SetClock, tmp_path: Path
) -> None:
    """It is counted once each time that it goes, not with every look; its leases stay where they are."""
    owner = await Lessee(database, clock).begin()
    await owner.draw(10, 1000)
    lost = []
    for _ in range(2):
        clock.move(HOUR + 1)
        for _ in range(3):
            await sweeper.close_finished_days()
            lost.append(sweeper.lost)
        await owner.report()

    assert lost == [1, 1, 1, 2, 2, 2]
    async with database.begin() as connection:
        drawn = (await connection.execute(text("SELECT DISTINCT granted - returned FROM leases"))).scalars()
        assert sorted(drawn) == [10, 1000]


async def test_a_writer_whose_clock_is_behind_changes_no_closed_day(database: Database, clock: SetClock) -> None:
    """Two days behind it takes a closed day for today; Postgres knows better, and books its row as a correction."""
    async with database.begin() as connection:
        await insert_records(connection, [make_record(clock.new_id())], today=TODAY)
        await connection.execute(text("INSERT INTO closed_days VALUES (:day, now())"), {"day": TODAY})

    async with database.begin() as connection:
        await insert_records(connection, [make_record(clock.new_id())], today=TODAY)

    assert [calls for _, _, calls in await booked(database)] == [2]  # apart only by the day of booking
    late = "SELECT count(*) FROM usage_records WHERE booked_on IS NOT NULL"
    async with database.begin() as connection:
        assert (await connection.execute(text(late))).scalar_one() == 1


async def test_a_sweeper_whose_clock_is_ahead_closes_and_drops_nothing(database: Database, clock: SetClock) -> None:
    """What day it is, is Postgres's to say: a gateway two years ahead neither closes today nor drops the year."""
    async with database.begin() as connection:
        now = (await connection.execute(text("SELECT extract(epoch FROM now())"))).scalar_one()
    present = SetClock(float(now))
    async with database.begin() as connection:
        await insert_records(connection, [make_record(present.new_id())], today=present.today())
    ahead = SetClock(float(now) + 800 * DAY)

    await Sweeper(database, ahead, Turns(database, ahead)).do_chores()

    assert await closed_days(database) == []
    assert [calls for _, _, calls in await booked(database)] == [1]


@pytest.mark.parametrize("days", [-20_000, -500, 3, 300, 100_000])
async def test_ids_from_any_time_are_rows_of_their_day(
    sweeper: Sweeper, database: Database, clock: SetClock, days: int
) -> None:
    """From before or long after, a row is written once, summed, and goes when its retention is over."""
    other = SetClock(max(1.0, clock.now() + days * DAY))
    record = make_record(other.new_id())
    for _ in range(2):
        async with database.begin() as connection:
            await insert_records(connection, [record], today=TODAY)
    assert await booked(database) == [(other.today(), other.today(), 1)]

    await sweeper.drop_old_rows()

    async with database.begin() as connection:
        left = (await connection.execute(text("SELECT count(*) FROM usage_records"))).scalar_one()
    assert left == (days > -400)
    assert await booked(database) == [(other.today(), other.today(), 1)]


async def test_a_day_in_the_default_partition_stays_there_and_is_dropped_in_its_time(
    sweeper: Sweeper, database: Database, clock: SetClock
) -> None:
    """Its partition cannot be made any more; nothing else suffers, and retention deletes its rows."""
    early = SetClock(clock.now() + 9 * DAY)  # nobody has prepared that day
    async with database.begin() as connection:
        await insert_records(connection, [make_record(early.new_id()) for _ in range(3)], today=TODAY)
    clock.move(9 * DAY)

    await sweeper.do_chores()
    async with database.begin() as connection:
        await insert_records(connection, [make_record(clock.new_id())], today=clock.today())
    assert await places(database) == [("usage_records_rest", 4)]
    clock.move(401 * DAY)
    await sweeper.do_chores()

    assert await places(database) == []
    assert [calls for _, _, calls in await booked(database)] == [4]


def die(owner: Owner) -> None:
    """Let go of what tells neighbours that it lives, as its death does."""
    assert owner._claim is not None
    os.close(owner._claim)


async def hear_of_all(database: Database) -> None:
    """Let every owner have been heard of just now, as the last of them was."""
    async with database.begin() as connection:
        await connection.execute(text("UPDATE owners SET seen_at = (SELECT max(seen_at) FROM owners)"))


async def closed_days(database: Database) -> list[date]:
    """Return the days that are closed."""
    async with database.begin() as connection:
        return list((await connection.execute(text("SELECT day FROM closed_days ORDER BY day"))).scalars())


async def listed(database: Database) -> list[str]:
    """Return the owners that have not ended."""
    async with database.begin() as connection:
        return list(
            (await connection.execute(text("SELECT id FROM owners WHERE ended_at IS NULL ORDER BY id"))).scalars()
        )


async def booked(database: Database) -> list[tuple[object, ...]]:
    """Return day, day of booking and calls of every daily sum."""
    query = text("SELECT day, booked_on, CAST(sum(calls) AS integer) FROM usage_daily GROUP BY 1, 2 ORDER BY 1, 2")
    async with database.begin() as connection:
        return [tuple(row) for row in await connection.execute(query)]


async def places(database: Database) -> list[tuple[object, ...]]:
    """Return the partitions that have rows, and how many."""
    query = text("SELECT CAST(tableoid::regclass AS text), count(*) FROM usage_records GROUP BY 1")
    async with database.begin() as connection:
        return [tuple(row) for row in await connection.execute(query)]
