# The flusher against a Postgres that misbehaves: nothing is lost, nothing comes twice, and the loop never hangs.

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import text

import gateway.storage.database
import migrations
from billing.core.ids import date_of
from billing.core.money import NanoDollars, to_nano
from billing.core.prices import Price, cost_of
from billing.core.records import Status, UsageRecord
from billing.core.store_errors import POSTGRES_AWAY
from billing.journal.journal import Journal
from billing.ledger.ledger import Inserted, forget_days, insert_records, write_records
from billing.ledger.price_editions import PriceEditions, edition_of
from billing.ledger.statements import GroupBy, period
from billing.upkeep import flusher as flusher_module
from billing.upkeep.flusher import Flusher
from gateway.core.background import stop_all
from gateway.core.clock import Clock
from gateway.dev.embedded.postgres import EmbeddedPostgres
from gateway.storage.database import Database
from protocol.usage import Usage
from tests.support.clock import SetClock
from tests.support.factories import make_record
from tests.support.postgres_proxy import postgres_proxy
from tests.support.temporary_stores import temporary_postgres

TODAY = date(2026, 4, 5)


@pytest.fixture
def own_server() -> Iterator[EmbeddedPostgres]:
    """A Postgres that a test may stop, freeze and kill."""
    with temporary_postgres() as server:
        migrations.upgrade(server.url)
        yield server


@asynccontextmanager
async def flushing(journal: Journal, database: Database) -> AsyncIterator[Flusher]:
    """Run a flusher until the block ends."""
    flusher = Flusher(journal, database, Clock())
    task = asyncio.create_task(flusher.run())
    try:
        yield flusher
        assert not task.done()
    finally:
        await stop_all([task])


async def test_a_frozen_postgres_only_delays(
    own_server: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen for longer than a command may take: the flush gives up, calls go on, and all of them arrive once."""
    monkeypatch.setattr(gateway.storage.database, "COMMAND_TIMEOUT", 0.5)
    database, journal = Database(own_server.url), Journal.open(tmp_path, clock=Clock())
    async with flushing(journal, database) as flusher:
        close_calls(journal, 50)
        await until_empty(flusher)
        freeze(own_server)
        try:
            for _ in range(20):
                close_calls(journal, 10)
                await asyncio.sleep(0.1)
            assert flusher.backlog == 200
        finally:
            thaw(own_server)
        await until_empty(flusher)

    assert await count(database) == (250, 250)
    await database.close()


async def test_calls_that_close_while_others_are_flushed_are_gathered(database: Database, tmp_path: Path) -> None:
    """A transaction costs as much as a hundred of its rows: a steady trickle has a few of them a second."""
    journal = Journal.open(tmp_path, clock=Clock())
    async with flushing(journal, database) as flusher:
        for _ in range(100):
            close_calls(journal, 1)
            await asyncio.sleep(0.005)
        await until_empty(flusher)

    async with database.begin() as connection:
        by_transaction = text("SELECT count(*) FROM usage_records GROUP BY CAST(xmin AS text)")
        assert len((await connection.execute(by_transaction)).all()) <= 15


async def test_a_flush_that_hangs_anywhere_is_tried_again(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where no deadline of the driver's helps, a batch has one of its own."""
    monkeypatch.setattr(flusher_module, "FLUSH_WITHIN", 2.0)
    hangs = iter([True])
    real = write_records

    async def hang(*args: Any, **more: Any) -> Inserted:
        written = await real(*args, **more)
        if next(hangs, False):
            await asyncio.Event().wait()
        return written

    monkeypatch.setattr(flusher_module, "write_records", hang)
    journal = Journal.open(tmp_path, clock=Clock())
    close_calls(journal, 7)
    async with flushing(journal, database) as flusher:
        await until_empty(flusher)

    assert await count(database) == (7, 7)


async def test_connections_ended_in_mid_transaction_lose_and_double_nothing(database: Database, tmp_path: Path) -> None:
    """A restart of Postgres, a failover, an impatient administrator: every batch comes whole, and once."""
    journal = Journal.open(tmp_path, clock=Clock())
    other = Database(database.url)
    async with flushing(journal, database) as flusher:
        for _ in range(30):
            close_calls(journal, 300)
            await asyncio.sleep(0.02)
            async with other.begin() as connection:
                await connection.execute(END_OTHERS)
        await until_empty(flusher)
    await other.close()

    assert await count(database) == (9000, 9000)


async def test_adopted_calls_are_spent_once_though_their_commit_was_unheard(database: Database, tmp_path: Path) -> None:
    """Written again they are not new: their rows and what they spent are there, once."""
    dead = Journal.open(tmp_path, clock=Clock())
    close_calls(dead, 3)
    dead.close()

    await adopt_unheard(tmp_path, database)

    assert await count(database) == (3, 3)
    assert await spent(database) == 3 * 400_000


async def test_an_adopted_call_that_the_ledger_refuses_is_not_spent(database: Database, tmp_path: Path) -> None:
    """The call is put aside after a try that was not heard; what the ledger has is spent."""
    dead = Journal.open(tmp_path, clock=Clock())
    close_calls(dead, 3)
    refused = make_record(Clock().new_id(), route_reason="na\0med")
    dead.opened(refused)
    dead.closed(refused)
    dead.close()

    await adopt_unheard(tmp_path, database)

    assert await count(database) == (3, 3)
    assert await spent(database) == 3 * 400_000
    assert refused.request_id in (tmp_path / "rejected.jsonl").read_text()


@pytest.mark.parametrize("state", ["40001", "40P01", "55P03", "57014"])
async def test_a_transaction_that_postgres_gives_up_is_tried_again(
    database: Database, tmp_path: Path, state: str
) -> None:
    """Serialization failure, deadlock, lock timeout, cancelled statement: none of them puts a record aside."""
    async with database.begin() as connection:
        for statement in fails_once(state):
            await connection.execute(text(statement))
    journal = Journal.open(tmp_path, clock=Clock())
    close_calls(journal, 5)
    async with flushing(journal, database) as flusher:
        await until_empty(flusher)

    assert await count(database) == (5, 5)
    assert not (tmp_path / "rejected.jsonl").exists()


async def test_writers_with_calls_in_common_never_lock_up(database: Database) -> None:
    """Eight at once with overlapping calls of the same teams, in any order: each call once, and no deadlock."""
    clock = SetClock()
    records = [make_record(clock.new_id(), team_id=f"team_{n % 9}", key_id=f"key_{n % 23}") for n in range(800)]
    orders = [records[::step][shift:] for step in (1, -1) for shift in (0, 100, 200, 300)]

    async def write(part: list[UsageRecord]) -> int:
        async with database.begin() as connection:
            return await insert_records(connection, part, today=TODAY)

    assert sum(await asyncio.gather(*map(write, orders))) == 800

    assert await count(database) == (800, 800)


async def test_the_figures_of_a_day_come_out_to_the_cent(database: Database, tmp_path: Path) -> None:
    """4,200,000 tokens in and 840,000 out at $2.50 and $10: $18.90, from the journal to the statement."""
    clock = SetClock()
    price = Price(input=to_nano("2.50"), output=to_nano("10"))
    journal = Journal.open(tmp_path, clock=clock)
    for number in range(420):
        usage = Usage(10_000, output_tokens=2_000)
        journal.closed(
            make_record(
                clock.new_id(),
                model_used=f"model-{number % 2}",
                input_tokens=usage.input_tokens,
                cached_input_tokens=0,
                output_tokens=usage.output_tokens,
                cost_nanousd=cost_of(usage, price),
            )
        )
    failed = make_record(clock.new_id(), status=Status.FAILED, cost_nanousd=0)
    journal.closed(failed)
    flusher = Flusher(journal, database, clock)
    while await flusher.flush_once():
        pass

    async with database.begin() as connection:
        statement = await period(connection, "team_a", TODAY, TODAY)
        by_model = await period(connection, "team_a", TODAY, TODAY, GroupBy.MODEL)

    total = statement.total
    assert (total.input_tokens, total.output_tokens, total.requests) == (4_200_000, 840_000, 420)
    assert total.cost_nanousd == to_nano("18.90")
    assert sum(line.total.cost_nanousd for line in by_model.lines) == to_nano("18.90")


END_OTHERS = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
)


def fails_once(state: str) -> list[str]:
    """Return what makes the first insert into the ledger fail: a sequence counts, for it is not rolled back."""
    return [
        "CREATE SEQUENCE tries",
        "CREATE FUNCTION fail_once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF nextval('tries') = 1 THEN RAISE EXCEPTION 'made for a test' USING ERRCODE = '{state}'; END IF; "
        "RETURN NULL; END $$",
        "CREATE TRIGGER fail_once AFTER INSERT ON usage_daily EXECUTE FUNCTION fail_once()",
    ]


def close_calls(journal: Journal, number: int) -> None:
    """Open and close calls."""
    clock = Clock()
    for _ in range(number):
        record = make_record(clock.new_id())
        journal.opened(record)
        journal.closed(record)


async def adopt_unheard(folder: Path, database: Database) -> None:
    """Adopt what is left in ``folder`` and write it, the answer to the first commit being lost."""
    journal = Journal.open(folder, clock=Clock())
    sum(journal.adopt_each())
    with postgres_proxy(database.url) as way:
        by_it = Database(way.url)
        flusher = Flusher(journal, by_it, Clock())
        way.lose_commit_of("INSERT INTO usage_records")
        with pytest.raises(POSTGRES_AWAY):
            await flusher.flush_once()
        assert way.lost == 1
        while await flusher.flush_once():
            pass
        await by_it.close()


async def spent(database: Database) -> int:
    """Return the nano-dollars that all leases of the team have spent."""
    query = text("SELECT sum(spent) FROM leases WHERE scope = 'team:team_a' AND unit = 'nanousd'")
    async with database.begin() as connection:
        return int((await connection.execute(query)).scalar_one())


def freeze(server: EmbeddedPostgres) -> None:
    """Stop every process of a server, as a host that swaps does."""
    _signal(server, signal.SIGSTOP)


def thaw(server: EmbeddedPostgres) -> None:
    """Let it go on."""
    _signal(server, signal.SIGCONT)


def _signal(server: EmbeddedPostgres, number: int) -> None:
    assert server.pid is not None
    process = psutil.Process(server.pid)
    for each in (process, *process.children(recursive=True)):
        os.kill(each.pid, number)


async def until_empty(flusher: Flusher) -> None:
    """Wait until everything is in the ledger."""
    for _ in range(3000):
        if flusher.backlog == 0:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the backlog did not drain within 30 seconds")


async def count(database: Database) -> tuple[int, int]:
    """Return the rows of the ledger, and the calls in the daily sums."""
    query = text("SELECT count(*), (SELECT CAST(sum(calls) AS integer) FROM usage_daily) FROM usage_records")
    async with database.begin() as connection:
        row = (await connection.execute(query)).one()
    return row[0], row[1]


async def test_what_a_database_forgot_is_delivered_again(database: Database, tmp_path: Path) -> None:
    """Every call of the last day's segments, whatever day it began on, but for those of days that are forgotten.

    So is what the price says that they name.
    """
    clock = SetClock()
    journal = Journal.open(tmp_path, clock=clock)
    price = Price(input=NanoDollars(1), output=NanoDollars(2))
    flusher = Flusher(journal, database, clock, prices=PriceEditions([price]))
    records = []
    for _ in range(3):
        records += [make_record(clock.new_id(), price=edition_of(price)) for _ in range(300)]
        clock.move(2 * 86_400)
    for record in records:
        journal.closed(record)
    while await flusher.flush_once():
        pass
    async with database.begin() as connection:
        await connection.execute(text("TRUNCATE usage_records, usage_daily, price_editions"))
        await forget_days(connection, date_of(records[300].request_id))

    for _ in range(2):
        await flusher.deliver_again()

    async with database.begin() as connection:
        rows = (await connection.execute(text("SELECT CAST(request_id AS text) FROM usage_records"))).scalars()
        assert set(rows) == {record.request_id for record in records[300:]}
        assert (await connection.execute(text("SELECT sum(calls) FROM usage_daily"))).scalar_one() == 600
        told = (await connection.execute(text("SELECT edition FROM price_editions"))).scalars().all()
        assert told == [edition_of(price)]
    journal.close()
