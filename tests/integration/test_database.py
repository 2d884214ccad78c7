# The way into Postgres: a server that stands still is found out soon, and leaves nothing broken behind.

from __future__ import annotations

import asyncio
import os
import signal
import time
import traceback

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from gateway.storage import database as module
from gateway.storage.database import COMMAND_TIMEOUT, Database


async def test_a_server_that_stands_still_is_found_out_soon(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a silence it is asked for a sign of life first; the next transaction has a connection that works."""
    monkeypatch.setattr(module, "SILENT_FOR", 0.0)
    monkeypatch.setattr(module, "ANSWERS_WITHIN", 0.2)
    async with database.begin() as connection:
        pid = (await connection.execute(text("SELECT pg_backend_pid()"))).scalar_one()
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            async with database.begin() as connection:
                await connection.execute(text("SELECT 1"))
        taken = time.monotonic() - started
    finally:
        os.kill(pid, signal.SIGCONT)

    async with database.begin() as connection:
        assert (await connection.execute(text("SELECT 7"))).scalar_one() == 7
    assert taken < COMMAND_TIMEOUT - 2


async def test_the_question_is_no_part_of_the_transaction(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction may begin with how it is isolated."""
    monkeypatch.setattr(module, "SILENT_FOR", 0.0)
    async with database.begin() as connection:
        await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
        assert (await connection.execute(text("SHOW transaction_isolation"))).scalar_one() == "repeatable read"


async def test_a_database_that_just_answered_is_not_asked(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load the question costs nothing."""
    async with database.begin() as connection:
        await connection.execute(text("SELECT 1"))

    asked: list[object] = []

    async def greet(connection: object) -> None:
        asked.append(connection)

    monkeypatch.setattr(module, "_greet", greet)
    async with database.begin() as connection:
        await connection.execute(text("SELECT 1"))

    assert asked == []


async def test_who_has_a_deadline_asks_nothing_first(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process at rest says one thing a second, that it lives, and gives it up in time by itself."""
    asked: list[object] = []

    async def greet(connection: object) -> None:
        asked.append(connection)

    monkeypatch.setattr(module, "SILENT_FOR", 0.0)
    monkeypatch.setattr(module, "_greet", greet)
    async with database.in_time() as connection:
        await connection.execute(text("SELECT 1"))
    assert asked == []
    async with database.at_once() as connection:
        await connection.execute(text("SELECT 1"))

    assert len(asked) == 1


SECRET = "CANARY-never-told"
REFUSED = {
    "a constraint": "INSERT INTO refusing VALUES (:said, 1)",
    "a value that the driver has no form for": "SELECT CAST(:said AS integer)",
    "a value that the server cannot read": "SELECT CAST(CAST(:said AS text) AS integer)",
    "JSON that is none": "SELECT CAST(CAST(:said AS text) AS json)",
    "a unique key": "INSERT INTO refusing SELECT :said, 0 FROM generate_series(1, 2)",
}


@pytest.mark.parametrize("statement", REFUSED.values(), ids=REFUSED)
async def test_no_error_quotes_a_value(database: Database, statement: str) -> None:
    """What a statement said stands neither in the error nor in those behind it, as a log would show them."""
    with pytest.raises(DBAPIError) as refused:
        async with database.begin() as connection:
            await connection.execute(text("CREATE TEMPORARY TABLE refusing (said text UNIQUE, n int CHECK (n = 0))"))
            await connection.execute(text(statement), {"said": SECRET})
    told = "".join(traceback.format_exception(refused.value)) + repr(refused.value)

    assert SECRET not in told
    assert "Error: " in told


async def test_rows_that_are_copied_are_quoted_neither(database: Database) -> None:
    """COPY speaks to the driver alone, whose errors are no less closed."""
    with pytest.raises(ConnectionError) as refused:
        async with database.begin() as connection:
            await connection.execute(text("CREATE TEMPORARY TABLE refusing (said text CHECK (said = ''))"))
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            await driver.copy_records_to_table("refusing", records=[(SECRET,)])

    assert SECRET not in "".join(traceback.format_exception(refused.value))


async def test_a_connection_that_was_made_while_the_process_stood_still_is_used(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop sees to timers before sockets: what lies there is read before it is called late."""
    monkeypatch.setattr(module, "CONNECT_TIMEOUT", 0.4)
    async with Database(database.url) as anew:
        asyncio.get_running_loop().call_later(0.0, time.sleep, 1.0)
        async with anew.begin() as connection:
            assert (await connection.execute(text("SELECT 1"))).scalar_one() == 1
