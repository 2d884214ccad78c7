# Calls one by one from a real Postgres: pages that read a bounded part of the ledger, and the command line over them.

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime
from itertools import chain
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import insert, select
from typer.testing import CliRunner

import gateway.cli
from billing.core.ids import uuid7
from billing.core.records import Attempt, Status
from billing.ledger.ledger import insert_records
from gateway.core.clock import Clock
from gateway.reports import call_list
from gateway.reports.call_filter import read_filter
from gateway.reports.call_list import list_calls, purge_refused, show_call
from gateway.storage.database import Database
from gateway.storage.tables import refused_calls, teams
from tests.support.factories import make_record

DAY = 86_400_000  # milliseconds
TODAY = date(2026, 4, 20)
NOON = int(datetime(2026, 4, 5, 12, tzinfo=UTC).timestamp() * 1000)


def ident(number: int) -> str:
    """Return the id of the call ``number``: three a day, each later than the one before."""
    return uuid7(NOON + number // 3 * DAY + number % 3 * 1000, number)


async def fill(database: Database, count: int = 30) -> list[str]:
    """Book calls of a team, every seventh of it at another model, and as many of another team."""
    ids = [ident(number) for number in range(count)]
    records = [
        make_record(
            request_id=each,
            team_id="t1",
            model_used="rare" if number % 7 == 0 else "usual",
            created_at=(NOON + number // 3 * DAY) / 1000,
        )
        for number, each in enumerate(ids)
    ]
    others = [make_record(request_id=uuid7(NOON + n * DAY, n + 1000), team_id="t2") for n in range(10)]
    async with database.begin() as connection:
        await insert_records(connection, [*records, *others], today=TODAY)
    return ids


async def pages(database: Database, **said: str) -> list[list[str]]:
    """Return the ids of all pages, to the last."""
    found, after = list[list[str]](), None
    now = datetime.fromtimestamp((NOON + 20 * DAY) / 1000, UTC)
    while True:
        wanted = read_filter(said | ({"after": after} if after else {}), now, "t1")
        async with database.begin() as connection:
            page = await list_calls(connection, wanted)
        found.append([call["request_id"] for call in page["data"]])
        if (after := page["next"]) is None:
            return found


async def test_pages_go_through_days(database: Database) -> None:
    """All of a team's calls, each once, newest first; another's are none of them."""
    ids = await fill(database)

    found = await pages(database, limit="7")

    assert list(chain(*found)) == ids[::-1]
    assert [len(page) for page in found] == [7, 7, 7, 7, 2]


async def test_a_page_looks_at_so_many_rows(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where few calls fit, a page may be short, or empty; those after it have the rest."""
    ids = await fill(database)
    monkeypatch.setattr(call_list, "SCANNED", 5)

    found = await pages(database, limit="2", model="rare")

    assert list(chain(*found)) == [each for number, each in enumerate(ids) if number % 7 == 0][::-1]
    assert len(found) > 3 and [] in found


async def test_a_call_of_a_killed_process_says_so(database: Database) -> None:
    """Found in its journal it has no time and no attempt; one that failed at every upstream has both."""
    lost, failed = ident(1), ident(2)
    tried = (Attempt("upstream/us/https://one.example/v1/m", "status_500", 3.0),)
    usual = {"team_id": "t1", "status": Status.FAILED, "cost_nanousd": 0}
    records = [
        make_record(request_id=lost, total_ms=0.0, attempts=(), **usual),
        make_record(request_id=failed, total_ms=5.0, attempts=tried, **usual),
    ]
    async with database.begin() as connection:
        await insert_records(connection, records, today=TODAY)
        told = [await show_call(connection, each, "t1") for each in (lost, failed)]

    assert [call["code"] for call in told] == ["process_lost", None]
    assert "was killed" in told[0]["message"] and "message" not in told[1]


async def test_refused_calls_go_after_a_week(database: Database) -> None:
    """Those of this week stay."""
    now = Clock().now()
    row = {"team_id": "t1", "key_id": "k1", "endpoint": "chat.completions", "http_status": 429, "code": "c"}
    fresh, old = (UUID(uuid7(int((now - days * 86_400) * 1000), 5)) for days in (6, 8))
    async with database.begin() as connection:
        await connection.execute(insert(refused_calls), [{**row, "request_id": each} for each in (fresh, old)])
        await purge_refused(connection, now)
        left = (await connection.execute(select(refused_calls.c.request_id))).scalars().all()

    assert left == [fresh]


@pytest.fixture
def command_line(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    file = tmp_path / "tollgate.yaml"
    file.write_text(
        f"database_url: {database_url}\nredis_url: redis://127.0.0.1:1\nadmin_keys: [tgadmin-of-the-tests]\n"
        "key_pepper: pepper of all the tests\n"
        'providers: {own: {format: openai, self_hosted: true, endpoints: [{region: x, base_url: "http://gpu/v1"}]}}\n'
        "models: {small: {provider: own, price: {input: 1, output: 2}}}\n"
    )
    monkeypatch.setenv("TOLLGATE_CONFIG", str(file))
    monkeypatch.setenv("COLUMNS", "300")
    if not {"calls", "explain"} <= {command.name for command in gateway.cli.app.registered_commands}:
        gateway.cli.add_commands()
    return CliRunner()


def test_the_command_line_tells_of_calls(database_url: str, command_line: CliRunner) -> None:
    """The list, and one call to its price; of a refused one, why."""
    clock = Clock()
    booked, refused = clock.new_id(), clock.new_id()
    record = make_record(
        request_id=booked,
        team_id="t1",
        status=Status.ANSWERED,
        created_at=clock.now(),
        first_token_ms=12.0,
        total_ms=30.0,
        attempts=(Attempt("small@own/x", "ok", 12.0),),
        metadata={"cost_centre": "4711"},
    )
    why = {"code": "insufficient_quota", "limit_name": "team.usd_per_day", "message": "The day's dollars are used up."}
    row = {"team_id": "t1", "key_id": "k1", "endpoint": "chat.completions", "http_status": 429, **why}

    async def fill() -> None:
        async with Database(database_url) as database, database.begin() as connection:
            await connection.execute(insert(teams), [{"id": "t1", "name": "t1"}])
            await insert_records(connection, [record], today=clock.today())
            await connection.execute(insert(refused_calls), [{**row, "request_id": UUID(refused)}])

    asyncio.run(fill())

    listed = command_line.invoke(gateway.cli.app, ["calls", "--team", "t1"])
    csv = command_line.invoke(gateway.cli.app, ["calls", "--status", "refused", "--format", "csv"])
    told = command_line.invoke(gateway.cli.app, ["explain", booked])
    unheard = command_line.invoke(gateway.cli.app, ["explain", refused])
    nothing = command_line.invoke(gateway.cli.app, ["explain", "nothing"])
    wrong = command_line.invoke(gateway.cli.app, ["calls", "--status", "odd"])

    assert booked in listed.stdout and refused in listed.stdout
    assert [line.split(",")[1] for line in csv.stdout.splitlines()] == ["request_id", refused]
    assert "small@own/x" in told.stdout and "first_token 12, total 30" in told.stdout
    assert "cost_centre=4711" in told.stdout
    assert "insufficient_quota" in unheard.stdout and "The day's dollars are used up." in unheard.stdout
    assert (nothing.exit_code, wrong.exit_code) == (1, 2)
