# Processes as owners of leases, from their start to the end of their journals: beats, crashes, damaged journals,
# a database that forgot, a Redis that was wiped. What is drawn is what rows have spent and living owners hold, always.

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import text

from billing.core.holds import Hold, Limits, RefusedHold
from billing.journal.owner_files import note_told
from billing.quotas.lease_store import NANOUSD, RESERVATIONS, PostgresLeases, Told
from billing.quotas.reservations import Reservations
from billing.upkeep.scope_room import Budget, scope_rooms
from gateway.storage.database import Database
from tests.support.clock import SetClock
from tests.support.factories import make_record
from tests.support.lessee import Lessee
from tests.support.owners import Process, open_process

CAP = Limits(nanousd_per_day=10_000_000)
Start = Callable[[], Awaitable[Process]]


@pytest.fixture
async def start(database: Database, redis: Redis, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts processes on one data directory, for a team with a budget."""
    async with database.begin() as connection:
        await connection.execute(
            text("INSERT INTO teams (id, name, limits) VALUES ('team_a', '', '{\"nanousd_per_day\": 10000000}')")
        )
        await connection.execute(
            text("INSERT INTO api_keys (id, team_id, digest, prefix) VALUES ('key_a', 'team_a', 'x', '')")
        )
    started: list[Process] = []

    async def start() -> Process:
        started.append(await open_process(tmp_path, database, redis))
        return started[-1]

    yield start
    for process in started:
        if process.owner._claim is not None:
            await process.die()


async def money(database: Database) -> tuple[int, int]:
    """Return what is drawn of the team's day, and what its rows cost."""
    async with database.begin() as connection:
        drawn = text("SELECT sum(drawn) FROM balances WHERE scope = 'team:team_a' AND unit = 'nanousd'"
                     " AND length(period) = 10")  # fmt: skip
        cost = text("SELECT sum(cost_nanousd) FROM usage_records")
        of_drawn, of_cost = [(await connection.execute(query)).scalar_one() for query in (drawn, cost)]
        return int(of_drawn or 0), int(of_cost or 0)


async def test_a_clean_end_gives_everything_back(start: Start, database: Database) -> None:
    """What is drawn afterwards is what the rows cost, and the owner is listed as ended."""
    process = await start()
    await process.call(team=CAP)
    assert (await money(database))[0] > 400_000
    await process.stop()

    assert await money(database) == (400_000, 400_000)
    async with database.begin() as connection:
        assert (await connection.execute(text("SELECT count(*) FROM owners WHERE ended_at IS NULL"))).scalar_one() == 0


async def test_a_process_that_was_stopped_as_it_started_has_its_database(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Postgres answered meanwhile is heard, and the first calls find room."""
    monkeypatch.setattr("billing.upkeep.owner.START_WITHIN", 1.0)
    beat = PostgresLeases.beat

    async def beat_slowly(*said: Any) -> Any:
        asyncio.get_running_loop().call_later(0, time.sleep, 1.1)
        await asyncio.sleep(0.01)
        return await beat(*said)

    monkeypatch.setattr(PostgresLeases, "beat", beat_slowly)
    process = await start()

    assert not process.leases.is_away


async def test_a_reservation_is_no_process(start: Start, database: Database) -> None:
    """Room, waits and, without Redis, the rates of a minute are shared among processes alone: what lies with providers
    takes no part."""
    process = await start()
    reservations = Reservations(PostgresLeases(database, process.clock), process.clock)
    for number in range(20):
        await reservations.begin(f"{RESERVATIONS}{number}")
        assert await reservations.keep_alive(f"{RESERVATIONS}{number}")
    await process.owner.beat()

    assert process.leases.living == 1


async def test_a_reservation_keeps_no_database_closed_that_forgot(start: Start, database: Database) -> None:
    """It has no process that could tell its leases again: once all processes have, budgets give room."""
    process = await start()
    store = PostgresLeases(database, process.clock)
    reservations = Reservations(store, process.clock)
    await reservations.begin(f"{RESERVATIONS}1")
    assert await reservations.keep_alive(f"{RESERVATIONS}1")
    await store.found_failover(None)
    await process.owner.beat()

    assert isinstance(await process.quotas.open(process.ask(team=CAP)), Hold)


async def test_a_crash_keeps_room_until_its_journal_is_carried(start: Start, database: Database) -> None:
    """The neighbour that adopts the journal writes its calls once, ends the dead owner, and its idle room is free."""
    dead = await start()
    await dead.call(team=CAP)
    account = await dead.begin(dead.ask(team=CAP))
    assert account.opened is not None
    await dead.die()
    reserved, cost = await money(database)
    assert (reserved > 1_000_000, cost) == (True, 0)
    neighbour = await start()
    await neighbour.flush()
    await neighbour.owner.end_dead()

    assert await money(database) == (400_000, 400_000)  # the one that was cut off had sent nothing
    assert neighbour.owner.buried == 1
    await neighbour.owner.end_dead()
    assert neighbour.owner.buried == 1


async def test_a_damaged_journal_keeps_its_room(start: Start, database: Database, tmp_path: Path) -> None:
    """What its calls cost cannot be known: the lease stays reserved for people to look at."""
    dead = await start()
    await dead.call(team=CAP)
    await dead.die()
    reserved, _ = await money(database)
    for segment in (tmp_path / "journal").glob("*.journal"):
        written = bytearray(segment.read_bytes())
        written[40:60] = bytes(20)
        segment.write_bytes(written)
    neighbour = await start()
    await neighbour.flush()
    await neighbour.owner.end_dead()

    assert neighbour.owner.buried == 0
    assert (await money(database))[0] == reserved


async def test_an_owner_that_was_ended_begins_as_another(start: Start, database: Database) -> None:
    """It stops holding inside what is not its own any more; what runs is settled, and the books agree in the end."""
    process = await start()
    running = await process.begin(process.ask(team=CAP))
    name = process.owner.id
    async with database.begin() as connection:
        await connection.execute(text("SELECT end_owner(:name, NULL)"), {"name": name})
    await process.owner.beat()

    assert process.owner.id != name
    assert not process.leases.try_hold(process.ask(team=CAP))
    await process.owner.beat()
    await process.call(team=CAP)
    process.close(running)
    running.settle()
    await process.stop()
    assert await money(database) == (800_000, 800_000)


async def test_a_database_that_forgot_is_told_again(start: Start, database: Database) -> None:
    """Leases, balances and rows of the lost moments are there again, each once. An answer that comes later to what was
    asked before is no second failover, in which a neighbour that has died since would keep all budgets closed."""
    process = await start()
    await process.call(team=CAP)
    await process.flush()
    asked_before = process.leases.mark
    running = await process.begin(process.ask(team=CAP))
    before = await money(database)
    async with database.begin() as connection:
        for table in ("leases", "balances", "usage_records", "usage_daily"):
            await connection.execute(text(f"DELETE FROM {table}"))
        await connection.execute(text("UPDATE owners SET beat = 0"))
    await process.owner.beat()
    if process.owner._delivering is not None:
        await process.owner._delivering
    process.leases.heard(asked_before, 1)
    await process.owner.beat()

    assert process.owner.recovered == 1
    assert (await money(database))[1] == before[1] == 400_000
    assert (await money(database))[0] >= before[0]
    process.close(running)
    running.settle()
    await process.stop()
    assert await money(database) == (800_000, 800_000)


async def test_a_database_that_forgot_is_told_of_every_return(database: Database, clock: SetClock) -> None:
    """Also where rows that were delivered first spent more than the grants that it remembers: as told, not as fits."""
    owner = await Lessee(database, clock).begin()
    assert await owner.draw(0, 10_000)
    await owner.book(make_record(clock.new_id(), cost_nanousd=12_000))
    told = [Told(scope, NANOUSD, f"{clock.today()}", 10_000, 4_000) for scope in ("team:team_a", "key:key_a")]
    await owner.store.set_again(owner.id, told)

    async with database.begin() as connection:
        query = text("SELECT granted, returned, spent FROM leases WHERE unit = 'nanousd'")
        leases = (await connection.execute(query)).all()
    assert set(leases) == {(16_000, 4_000, 12_000)}
    assert await money(database) == (12_000, 12_000)


async def test_a_balance_that_was_tight_before_the_lost_moments_is_tight_again(
    start: Start, database: Database
) -> None:
    """No bell rings and no beat tells of it: what an owner has drawn meanwhile and does not use goes back unasked."""
    process = await start()
    await process.call(team=CAP)
    await process.flush()
    drawn, cost = await money(database)
    assert drawn > cost
    async with database.begin() as connection:
        await connection.execute(text("UPDATE balances SET tight_since = clock_timestamp() - interval '1 minute'"))
        await connection.execute(text("UPDATE owners SET beat = 0"))
    await process.owner.beat()
    await process.quotas.leases.returns.tell()

    assert await money(database) == (cost, cost)


async def test_a_wiped_redis_forgets_no_money(start: Start, database: Database, redis: Redis) -> None:
    """Budgets are not in it: a call that the budget refuses is refused after a wipe as before."""
    process = await start()
    await process.call(team=CAP, cost=9_500_000)
    await redis.flushall()
    refused = await process.quotas.open(process.ask(team=CAP))

    assert isinstance(refused, RefusedHold)
    assert refused.is_settled
    assert refused.used == 9_500_000


async def test_calls_of_the_dead_that_a_failover_lost_are_delivered_again(start: Start, database: Database) -> None:
    """A process that dies before it hears of a failover delivers nothing again; its neighbour, which has done so
    already for itself, does it for the dead, and ends the dead only then."""
    neighbour, dead = await start(), await start()
    await dead.call(team=CAP)
    await dead.flush()
    note_told(dead.owner._path, 1.0)  # the database that was there before
    await dead.die()
    async with database.begin() as connection:
        for table in ("leases", "balances", "usage_records", "usage_daily"):
            await connection.execute(text(f"DELETE FROM {table}"))
    await neighbour.owner.end_dead()
    assert neighbour.owner.buried == 0
    assert neighbour.owner._delivering is not None
    await neighbour.owner._delivering

    assert await money(database) == (400_000, 400_000)
    await neighbour.owner.end_dead()
    assert neighbour.owner.buried == 1
    assert neighbour.owner._delivering is None


async def test_each_failover_is_found_once(start: Start, database: Database) -> None:
    """Owners that find the same one agree on when it was found; the next one, however soon, is another."""
    process = await start()
    store = process.owner._store
    first = await store.found_failover(None)
    second = await store.found_failover(first)

    assert second > first
    assert await store.found_failover(first) == await store.found_failover(None) == second


async def test_of_a_past_day_all_that_is_not_given_back_is_held(database: Database) -> None:
    """Owners give back what they have drawn ahead of it, and what they tell of running calls is not asked for it."""
    day = text("SELECT CAST(clock_timestamp() AT TIME ZONE 'UTC' AS date)")
    async with database.begin() as connection:
        today = (await connection.execute(day)).scalar_one()
        yesterday = today - timedelta(days=1)
        for statement in (
            "INSERT INTO owners (id, started_at, seen_at, watermark, holds) VALUES ('o', now(), now(), now(), '{}')",
            "INSERT INTO leases (owner, scope, unit, day, granted, returned, spent)"
            " SELECT 'o', 'team:a', 'nanousd', day, 90, 50, 10 FROM unnest(CAST(:days AS date[])) AS day",
        ):
            await connection.execute(text(statement), {"days": [today, yesterday]} if ":days" in statement else {})
        room = (await scope_rooms(connection, {"team:a": CAP}))["team:a"]

    assert room.nanousd_today == Budget(used=10, held=0, cap=10_000_000)
    assert room.nanousd_this_month.held == (30 if yesterday.month == today.month else 0)


async def test_what_is_used_and_not_booked_yet_is_held(start: Start, database: Database) -> None:
    """Or a team would see it as left until its row is there; what was drawn ahead is left before and after."""
    process = await start()
    await process.call(team=CAP)
    seen = []
    for _ in range(2):
        await process.owner.beat()
        async with database.begin() as connection:
            today = (await scope_rooms(connection, {"team:team_a": CAP}))["team:team_a"].nanousd_today
        seen.append((today.used, today.held, today.left))
        await process.flush()

    assert seen == [(0, 400_000, 9_600_000), (400_000, 0, 9_600_000)]
