# The ledger on a real Postgres: rows are written once, and the daily sums are exactly theirs.

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
from sqlalchemy import text

import migrations
from billing.core.records import CHARGED, MOST_NANOUSD, MOST_TOKENS, Attempt, Status, UsageRecord
from billing.journal.backlog import Closed
from billing.journal.journal import Journal
from billing.ledger.ledger import insert_records
from billing.upkeep.flusher import Flusher
from gateway.core.background import stop_all
from gateway.core.clock import Clock
from gateway.storage.database import Database
from tests.support.clock import SetClock
from tests.support.factories import make_record
from tests.support.temporary_stores import temporary_postgres
from tests.support.waiting import until_found

TODAY = date(2026, 4, 5)
SUMS = "calls, input_tokens, cached_input_tokens, output_tokens, cost_nanousd"


async def test_a_record_delivered_twice_is_one_row(database: Database) -> None:
    """Insert-once: the second delivery changes neither the ledger nor the sums."""
    clock = SetClock()
    records = [make_record(clock.new_id()) for _ in range(5)]

    first = await write(database, records[:3])
    second = await write(database, records + records)

    assert (first, second) == (3, 2)
    assert await rows(database, f"SELECT {SUMS} FROM usage_daily") == [(5, 500, 200, 100, 2_000_000)]


async def test_the_sums_are_exactly_the_rows(database: Database) -> None:
    """After any mix of teams, models, statuses and writers, usage_daily is the sum of usage_records."""
    clock = SetClock()
    records = [
        make_record(
            clock.new_id(),
            team_id=f"team_{n % 3}",
            model_used=f"model_{n % 5}",
            status=(status := list(Status)[n % 5]),
            input_tokens=n,
            cost_nanousd=n * 7 * (status in CHARGED),
        )
        for n in range(200)
    ]

    overlapping = [records[start : start + 80] for start in range(0, 200, 20)]
    written = await asyncio.gather(*(write(database, part) for part in overlapping))

    assert sum(written) == 200
    key = "team_id, day, key_id, model_used, tier, status"
    from_rows = await rows(
        database, f"SELECT {key}, count(*), sum(input_tokens), sum(cost_nanousd) FROM usage_records GROUP BY {key}"
    )
    from_sums = await rows(database, f"SELECT {key}, calls, input_tokens, cost_nanousd FROM usage_daily")
    assert sorted(from_rows) == sorted(from_sums)


async def test_a_row_keeps_every_field(database: Database) -> None:
    """What the journal knew of a call is in its row; text that Postgres cannot store loses only its NULs."""
    request_id = SetClock().new_id()
    record = make_record(
        request_id,
        attempts=(Attempt("openai/us/x/gpt-4o", "ok", 3.5),),
        metadata={"project": "x\0y"},
        user_tag="a\0b",
        gpu_cost_nanousd=5,
        complexity=0.25,
        created_at=SetClock().now(),
    )

    await write(database, [record])

    [row] = await rows(
        database,
        "SELECT day, request_id::text, attempts->0->>'target', metadata->>'project', user_tag, gpu_cost_nanousd,"
        " complexity, extract(epoch FROM created_at)::float8, booked_on FROM usage_records",
    )
    assert row == (TODAY, request_id, "openai/us/x/gpt-4o", "xy", "ab", 5, 0.25, SetClock().now(), None)


async def test_a_late_row_for_a_closed_day_is_booked_today(database: Database) -> None:
    """A closed day never changes: what comes later has its own sums, under the day of its booking."""
    yesterday = SetClock()
    yesterday.move(-86_400)
    await write(database, [make_record(yesterday.new_id())])
    async with database.begin() as connection:
        await connection.execute(text("INSERT INTO closed_days VALUES ('2026-04-04', now())"))

    await write(database, [make_record(yesterday.new_id())])

    assert await rows(database, "SELECT booked_on, count(*) FROM usage_records GROUP BY 1 ORDER BY 1") == [
        (TODAY, 1),
        (None, 1),
    ]
    assert await rows(database, "SELECT day, booked_on, calls FROM usage_daily ORDER BY 2") == [
        (date(2026, 4, 4), date(2026, 4, 4), 1),
        (date(2026, 4, 4), TODAY, 1),
    ]


async def test_a_day_has_its_own_partition(new_database_url: str) -> None:
    """Today's rows lie in today's partition, a day nobody prepared in the default one."""
    clock, past, database = SetClock(), SetClock(), Database(new_database_url)
    past.move(-90 * 86_400)

    await write(database, [make_record(clock.new_id()), make_record(past.new_id())])

    places = await rows(database, "SELECT tableoid::regclass::text FROM usage_records ORDER BY 1")
    await database.close()
    assert places == [("usage_records_20260405",), ("usage_records_rest",)]


async def test_the_flusher_carries_closed_calls_to_the_ledger(database: Database, tmp_path: Path) -> None:
    """A closed call is in the ledger within a second, and its journal is free again."""
    clock = SetClock()
    journal = Journal.open(tmp_path, clock=clock)
    flusher = Flusher(journal, database, clock)
    task = asyncio.create_task(flusher.run())

    for _ in range(10):
        record = make_record(clock.new_id())
        journal.opened(record)
        journal.closed(record)
    await until(lambda: flusher.backlog == 0)
    await stop_all([task])

    assert await rows(database, "SELECT calls FROM usage_daily") == [(10,)]
    journal.close()
    assert list(tmp_path.glob("*.journal")) == []


async def test_a_lost_database_only_delays(database: Database, tmp_path: Path) -> None:
    """While Postgres is away calls go on and wait in the journal; then all of them arrive."""
    clock = SetClock()
    journal = Journal.open(tmp_path, clock=clock)
    away = Database("postgresql://nobody@127.0.0.1:1/none")
    flusher = Flusher(journal, away, clock)
    task = asyncio.create_task(flusher.run())
    record = make_record(clock.new_id())
    journal.opened(record)
    journal.closed(record)
    await asyncio.sleep(0.3)
    assert flusher.backlog == 1

    flusher._database = database
    await until(lambda: flusher.backlog == 0)
    await stop_all([task])

    assert await rows(database, "SELECT calls FROM usage_daily") == [(1,)]


async def test_a_killed_postgres_loses_no_call(tmp_path: Path) -> None:
    """Calls go on over kill -9 and a restart of Postgres; every one has its row, those of the last moment too."""
    clock = Clock()
    with temporary_postgres() as server:
        migrations.upgrade(server.url)
        database = Database(server.url)
        journal = Journal.open(tmp_path, clock=clock)
        flusher = Flusher(journal, database, clock)
        task = asyncio.create_task(flusher.run())
        await answer_calls(journal, clock, 150)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        await answer_calls(journal, clock, 50)
        server.start()
        await answer_calls(journal, clock, 50)
        await until(lambda: flusher.backlog == 0)
        await stop_all([task])

        assert await rows(database, "SELECT count(*) FROM usage_records") == [(250,)]
        assert await rows(database, "SELECT sum(calls)::int FROM usage_daily") == [(250,)]
        await database.close()


async def test_a_record_that_cannot_be_stored_holds_up_no_other(database: Database, tmp_path: Path) -> None:
    """A text that Postgres does not know goes to a file for people; the other calls of the batch are written."""
    clock = SetClock()
    journal = Journal.open(tmp_path, clock=clock)
    flusher = Flusher(journal, database, clock)
    for tokens, reason in ((1, "named"), (2, "na\0med"), (3, "named"), (4, "named")):
        record = make_record(clock.new_id(), output_tokens=tokens, route_reason=reason)
        journal.opened(record)
        journal.closed(record)

    while await flusher.flush_once():
        pass

    assert await rows(database, "SELECT calls, output_tokens FROM usage_daily") == [(3, 8)]
    assert "na\\u0000med" in (tmp_path / "rejected.jsonl").read_text()


async def test_a_record_that_cannot_be_put_aside_waits_alone(database: Database, tmp_path: Path) -> None:
    """On a full disk the other calls of the batch are written all the same; the record is tried again later."""
    clock = SetClock()
    journal = Journal.open(tmp_path, clock=clock)
    flusher = Flusher(journal, database, clock)
    for reason in ("named", "na\0med", "named"):
        record = make_record(clock.new_id(), route_reason=reason)
        journal.opened(record)
        journal.closed(record)
    (tmp_path / "rejected.jsonl").mkdir()  # it takes no bytes, as a full disk does

    assert [await flusher.flush_once(), await flusher.flush_once(), flusher.backlog] == [2, 0, 1]
    assert await rows(database, "SELECT calls FROM usage_daily") == [(2,)]
    (tmp_path / "rejected.jsonl").rmdir()
    assert [await flusher.flush_once(), flusher.backlog] == [1, 0]
    assert "na\\u0000med" in (tmp_path / "rejected.jsonl").read_text()


@pytest.mark.parametrize("fault", [{"created_at": 1e18}, {"user_tag": "\ud800"}, {"total_ms": "long"}])
async def test_a_record_that_cannot_be_made_a_row_holds_up_no_other(
    database: Database, tmp_path: Path, fault: dict[str, object]
) -> None:
    """Whatever one record raises on its way to Postgres, it alone is put aside."""
    clock = SetClock()
    journal = Journal.open(tmp_path, clock=clock)
    flusher = Flusher(journal, database, clock)
    good, bad = make_record(clock.new_id()), make_record(clock.new_id(), **fault)
    for record in (bad, good):
        journal.waiting.in_memory[record.request_id] = Closed(record, None, None, 1)

    while await flusher.flush_once():
        pass

    assert await rows(database, "SELECT request_id::text FROM usage_records") == [(good.request_id,)]
    assert bad.request_id in (tmp_path / "rejected.jsonl").read_text()


async def test_a_number_too_large_for_its_column_is_booked_at_the_most(database: Database, tmp_path: Path) -> None:
    """The row is there, at what its column holds, and the day's sums still have room for the calls after it."""
    clock = SetClock()
    journal = Journal.open(tmp_path, clock=clock)
    flusher = Flusher(journal, database, clock)
    for tokens, cost in ((2**40, 2**63 - 1), (5, 2**63 - 1), (6, 7)):
        record = make_record(clock.new_id(), output_tokens=tokens, cost_nanousd=cost)
        journal.opened(make_record(record.request_id))
        journal.closed(record)

    while await flusher.flush_once():
        pass

    assert await rows(database, "SELECT calls, output_tokens, cost_nanousd::bigint FROM usage_daily") == [
        (3, MOST_TOKENS + 11, 2 * MOST_NANOUSD + 7)
    ]
    assert not (tmp_path / "rejected.jsonl").exists()


async def write(database: Database, records: list[UsageRecord]) -> int:
    """Write in one transaction."""
    async with database.begin() as connection:
        return await insert_records(connection, records, today=TODAY)


async def rows(database: Database, query: str) -> list[tuple[object, ...]]:
    """Return the rows of a query."""
    async with database.begin() as connection:
        return [tuple(row) for row in await connection.execute(text(query))]


async def answer_calls(journal: Journal, clock: Clock, number: int) -> None:
    """Open and close calls, a millisecond apart."""
    for _ in range(number):
        record = make_record(clock.new_id())
        journal.opened(record)
        journal.closed(record)
        await asyncio.sleep(0.001)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that takes a moment."""

    async def look() -> bool:
        return condition()

    await until_found(look)
