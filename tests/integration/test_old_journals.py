# What comes back after the ledger has dropped the rows of its days, on a real Postgres: nothing tells any more whether
# it was booked before, so nothing of it is booked again, whatever way it comes in, and people can look at it.

from __future__ import annotations

import asyncio
import json
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import text
from typer.testing import CliRunner

import gateway.cli
from billing.core.records import Status
from billing.journal.backlog import Closed
from billing.journal.journal import Journal
from billing.ledger.ledger import TooOld, forget_days, insert_records, memory_begins
from billing.ledger.statements import period
from billing.upkeep.flusher import Flusher
from billing.upkeep.sweep import Sweeper
from billing.upkeep.turns import Turns
from gateway.idempotency.store import IdempotencyStore
from gateway.idempotency.stored_answers import Claim, Place, StoredAnswer
from gateway.reports.corrections import NewCorrection, book_correction
from gateway.storage.audit_log import Act
from gateway.storage.database import Database
from gateway.storage.encryption import Sealer
from protocol.errors import NotFound
from protocol.usage import Usage
from tests.support.clock import SetClock
from tests.support.factories import make_record
from tests.support.journals import left_in

THEN = date(2026, 4, 5)  # what the clock shows first
DAY = 86_400.0
KEPT = 30  # days
NOTHING_YET = {"status": Status.FAILED, "output_tokens": 0, "cost_nanousd": 0}


@pytest.fixture
def database_url(new_database_url: str) -> str:
    """A database that nobody has prepared for any day."""
    return new_database_url


@pytest.fixture
async def sweeper(database: Database, clock: SetClock) -> Sweeper:
    """A sweeper of a house with one team, which keeps rows for thirty days."""
    async with database.begin() as connection:
        await connection.execute(text("INSERT INTO teams (id, name) VALUES ('team_a', 'A')"))
    return Sweeper(database, clock, Turns(database, clock, uses_server_time=False), keep_rows=KEPT * DAY)


async def test_a_journal_that_returns_after_retention_bills_nothing_again(
    database: Database, sweeper: Sweeper, clock: SetClock, tmp_path: Path
) -> None:
    """A killed process's volume is mounted again when its days are dropped: the statement stays as it was, to the call;
    the segment is kept, health says so, and its calls can be read."""
    journal = Journal.open(tmp_path, clock=clock)
    paid, running = make_record(clock.new_id()), make_record(clock.new_id(), **NOTHING_YET)
    for record in (paid, running):
        journal.opened(record)
    journal.closed(paid)
    journal.progress(running.request_id, Usage(100, output_tokens=7), 900)
    await flush(journal, database, clock)
    journal.close()  # kill -9 with a call running; the volume is put away
    billed = await statement(database)
    clock.move(40 * DAY)
    await sweeper.do_chores()

    journal = Journal.open(tmp_path, clock=clock)
    assert list(journal.adopt_each()) == [2]
    fresh = make_record(clock.new_id())
    journal.opened(fresh)
    journal.closed(fresh)
    await flush(journal, database, clock)
    await sweeper.do_chores()

    assert await statement(database) == billed == (1, 400_000)
    assert await rows(database) == [fresh.request_id]
    [kept] = tmp_path.glob("*.too-old")
    assert (journal.backlog, journal.check(), journal.quarantined) == (0, "quarantined", 1)
    shown = CliRunner().invoke(gateway.cli.app, ["journal", str(kept)])
    calls = {
        call["request_id"]: (call["status"], call["cost_nanousd"])
        for call in map(json.loads, shown.stdout.splitlines())
    }
    assert shown.exit_code == 0
    assert calls == {paid.request_id: ("answered", 400_000), running.request_id: ("interrupted", 900)}
    kept.unlink()
    assert journal.check() == "ok"
    assert CliRunner().invoke(gateway.cli.app, ["journal", str(kept)]).exit_code == 1


async def test_a_segment_keeps_only_what_is_too_old_from_the_ledger(
    database: Database, sweeper: Sweeper, clock: SetClock, tmp_path: Path
) -> None:
    """Calls of remembered days in it are booked; a record that the disk did not take is put with the rejected."""
    journal = Journal.open(tmp_path, clock=clock)
    records = []
    for _ in range(3):
        records.append(make_record(clock.new_id()))
        journal.opened(records[-1])
        journal.closed(records[-1])
        clock.move(20 * DAY)
    lost = make_record(records[0].request_id[:-4] + "ffff")
    journal.waiting.in_memory[lost.request_id] = Closed(lost, None, None, 1)
    await sweeper.do_chores()
    await flush(journal, database, clock)
    journal.close()

    assert await rows(database) == [record.request_id for record in records[2:]]
    assert sorted(path.name.partition(".")[2] for path in left_in(tmp_path)) == ["jsonl", "too-old"]
    assert json.loads((tmp_path / "rejected.jsonl").read_text())["request_id"] == lost.request_id


async def test_what_is_too_old_and_cannot_be_put_aside_waits_alone(
    database: Database, sweeper: Sweeper, clock: SetClock, tmp_path: Path
) -> None:
    """On a full disk the other calls of the batch are written all the same; the record is tried again later."""
    journal = Journal.open(tmp_path, clock=clock)
    old = make_record(clock.new_id())
    journal.waiting.in_memory[old.request_id] = Closed(old, None, None, 1)
    clock.move(60 * DAY)
    await sweeper.do_chores()
    fresh = make_record(clock.new_id())
    journal.opened(fresh)
    journal.closed(fresh)
    (tmp_path / "rejected.jsonl").mkdir()  # it takes no bytes, as a full disk does
    await flush(journal, database, clock)

    assert await rows(database) == [fresh.request_id]
    assert [closed.record for closed in journal.waiting.take(10)] == [old]
    (tmp_path / "rejected.jsonl").rmdir()
    await flush(journal, database, clock)
    assert json.loads((tmp_path / "rejected.jsonl").read_text())["request_id"] == old.request_id
    assert journal.backlog == 0


async def test_an_answer_is_kept_without_a_row_that_is_too_old(
    database: Database, sweeper: Sweeper, clock: SetClock
) -> None:
    """A stored answer of a process whose clock is a year behind reaches its client; the ledger takes no row of it."""
    await sweeper.do_chores()
    clock.move(-365 * DAY)
    store = IdempotencyStore(database, clock, Sealer("pepper", "idempotency"), retention=DAY)
    claim = Claim(Place("team_a", "chat.completions", "key"), b"digest", clock.new_id())
    await store.claim(claim)

    assert await store.store(claim, StoredAnswer(200, (), b"answer"), make_record(claim.request_id))
    assert await rows(database) == []


async def test_no_transaction_books_what_is_too_old(database: Database, sweeper: Sweeper, clock: SetClock) -> None:
    """The flusher's, a stored answer's and a batch's are all one insert: it books all of its records, or raises."""
    old = make_record(clock.new_id())
    clock.move(31 * DAY)
    fresh = make_record(clock.new_id())
    await sweeper.do_chores()
    with pytest.raises(TooOld) as refused:
        async with database.begin() as connection:
            await insert_records(connection, [fresh, old], today=clock.today())

    assert refused.value.request_ids == [old.request_id]
    assert await rows(database) == []


async def test_a_call_that_is_forgotten_cannot_be_corrected_but_its_day_can(
    database: Database, sweeper: Sweeper, clock: SetClock
) -> None:
    """A correction of a call goes by its row; the statement of a day outlives the rows, and people may put it right."""
    old = make_record(clock.new_id())
    async with database.begin() as connection:
        await insert_records(connection, [old], today=THEN)
    clock.move(40 * DAY)
    await sweeper.do_chores()

    with pytest.raises(NotFound):
        await correct(database, clock, request_id=old.request_id)
    await correct(database, clock, team_id="team_a", date=THEN.isoformat())

    async with database.begin() as connection:
        corrections = (await period(connection, "team_a", THEN, THEN)).corrections
    assert (corrections.entries, corrections.cost_nanousd) == (1, -1_000_000_000)


async def test_the_memory_only_ever_begins_later(database: Database, sweeper: Sweeper, clock: SetClock) -> None:
    """A longer retention, or a clock that is set back, brings no dropped row back."""
    await sweeper.do_chores()
    first = await begins(database)
    sweeper.keep_rows = 400 * DAY
    await sweeper.do_chores()
    clock.move(-10 * DAY)
    await sweeper.do_chores()

    assert first == await begins(database) == THEN - timedelta(days=KEPT)


async def test_days_are_forgotten_once_all_writers_know(database: Database, sweeper: Sweeper, clock: SetClock) -> None:
    """A transaction that has begun to write by the old memory commits first; the next one goes by the new."""
    clock.move(-40 * DAY)
    late, later = make_record(clock.new_id()), make_record(clock.new_id())
    clock.move(40 * DAY)
    async with database.begin() as connection:
        await insert_records(connection, [late], today=THEN)
        forgetting = asyncio.create_task(sweeper.drop_old_rows())
        await asyncio.sleep(0.2)
        assert not forgetting.done()
    await forgetting

    with pytest.raises(TooOld):
        async with database.begin() as connection:
            await insert_records(connection, [later], today=THEN)
    assert await rows(database) == []


@pytest.mark.parametrize("days", [0, 1, KEPT])
async def test_what_is_not_forgotten_is_booked(
    database: Database, sweeper: Sweeper, clock: SetClock, days: int
) -> None:
    """Up to the last day that is kept, a journal that comes late is booked as ever."""
    record = make_record(clock.new_id())
    clock.move(days * DAY)
    await sweeper.do_chores()
    async with database.begin() as connection:
        assert await insert_records(connection, [record, record], today=clock.today()) == 1
    async with database.begin() as connection:
        await forget_days(connection, THEN)

    assert await rows(database) == [record.request_id]


async def flush(journal: Journal, database: Database, clock: SetClock) -> None:
    """Carry everything that is closed."""
    flusher = Flusher(journal, database, clock)
    while await flusher.flush_once():
        pass


async def correct(database: Database, clock: SetClock, **said: str) -> None:
    """Book a refund of a dollar."""
    new = NewCorrection(cost_usd=Decimal(-1), reason="a test", **said)  # type: ignore[arg-type]
    async with database.begin() as connection:
        await book_correction(connection, new, Act("admin:test", "request"), clock, ())


async def statement(database: Database) -> tuple[int, int]:
    """Return the requests and the cost of the day that is put away, late ones included."""
    async with database.begin() as connection:
        found = await period(connection, "team_a", THEN, THEN)
    total = found.total + found.corrections
    return total.requests, total.cost_nanousd


async def rows(database: Database) -> list[str]:
    """Return the ids in the ledger, oldest first."""
    async with database.begin() as connection:
        found = (await connection.execute(text("SELECT request_id FROM usage_records ORDER BY 1"))).scalars()
        return [str(UUID(str(one))) for one in found]


async def begins(database: Database) -> date | None:
    """Return the first day that the ledger remembers."""
    async with database.begin() as connection:
        return await memory_begins(connection)
