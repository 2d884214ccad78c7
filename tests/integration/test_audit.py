# The audit while calls run: a busy house shows no difference, one nano-dollar that only one book knows is found, and a
# balance is healed.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest
import typer
from msgspec.structs import replace
from sqlalchemy import text
from structlog.testing import capture_logs

from billing.core.money import NanoDollars
from billing.core.prices import LaterPrice, Price, PriceStep, cost_of, kept_an_hour
from billing.core.records import units_of
from billing.ledger import price_editions
from billing.ledger.corrections import Correction, add_correction
from billing.ledger.ledger import forget_days, insert_records
from billing.ledger.price_editions import PriceEditions, compare_costs, edition_of
from billing.upkeep.audit import Difference, Report, audit
from billing.upkeep.auditor import EVERY, Auditor, Found
from billing.upkeep.turns import Turns
from gateway.cli import audit as audit_command
from gateway.commands.audit import run_audit
from gateway.config.file import load_settings
from gateway.core.background import stop_all
from gateway.core.clock import Clock
from gateway.core.settings import Settings
from gateway.storage.audit_log import list_acts, record_healing
from gateway.storage.database import Database
from protocol.usage import Usage
from tests.support.clock import SetClock
from tests.support.config_text import write_config
from tests.support.factories import make_record
from tests.support.lessee import Lessee
from tests.support.servers import execute

TEAMS = ("team_a", "team_b")


class House:
    """Two teams' calls that draw room and are booked by two owners; in the time of a real clock."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.clock = Clock()
        self.owners = [Lessee(database, self.clock, f"host:{number}") for number in range(2)]

    async def call(self, owner: Lessee, team_id: str) -> None:
        """Draw room for one call, if there is any, and book it."""
        await owner.draw(500, 500_000, team_id=team_id, key_id=f"key_of_{team_id}")
        await owner.book(make_record(self.clock.new_id(), team_id=team_id, key_id=f"key_of_{team_id}"))

    async def correct(self, cost_nanousd: int = -250) -> None:
        """Book a correction of team_a's day."""
        moment = self.clock.moment()
        correction = Correction(
            id=UUID(self.clock.new_id()),
            team_id="team_a",
            day=moment.date(),
            cost_nanousd=cost_nanousd,
            reason="goodwill",
            actor="test",
            booked_on=moment.date(),
            created_at=moment,
        )
        async with self.database.begin() as connection:
            assert await add_correction(connection, correction) is None

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """Make calls and corrections all the time inside the block."""
        loops = [self._for_ever(lambda o=o, t=t: self.call(o, t)) for o in self.owners for t in TEAMS]  # type: ignore[misc]
        tasks = [asyncio.create_task(each) for each in (*loops, self._for_ever(self.correct))]
        try:
            yield
            assert not any(task.done() for task in tasks)
        finally:
            await stop_all(tasks)

    async def _for_ever(self, act: Any) -> None:
        while True:
            await act()

    async def audit(self) -> list[Difference]:
        """Compare the books of yesterday and today."""
        days = (self.clock.today() - timedelta(days=1), self.clock.today())
        return [one for day in days for one in (await audit(self.database, day)).differences]

    async def change(self, statement: str, **values: Any) -> None:
        """Change a table, as no process of the house does."""
        async with self.database.begin() as connection:
            assert (await connection.execute(text(statement), values)).rowcount


@pytest.fixture
async def house(database: Database) -> House:
    """A house that has had calls and a correction."""
    house = House(database)
    async with database.begin() as connection:
        for team_id in TEAMS:
            limits = '{"nanousd_per_month": 1000000000000}'
            made = text("INSERT INTO teams (id, name, limits) VALUES (:id, :id, CAST(:limits AS jsonb))")
            await connection.execute(made, {"id": team_id, "limits": limits})
    for owner in house.owners:
        await owner.begin()
        for team_id in TEAMS:
            for _ in range(3):
                await house.call(owner, team_id)
    await house.correct()
    return house


def auditor(house: House) -> Auditor:
    """Return one process's audit in the background."""
    return Auditor(house.database, Turns(house.database, house.clock), record=record_healing)


async def test_a_busy_house_shows_no_difference(house: House) -> None:
    """Twenty audits while owners draw, rows are booked and corrections come: the books agree in each."""
    async with house.busy():
        for _ in range(20):
            assert await house.audit() == []
    async with house.database.begin() as connection:
        assert (await connection.execute(text("SELECT count(*) FROM usage_records"))).scalar_one() > 40


async def test_a_row_that_is_not_committed_yet_is_in_no_book(house: House) -> None:
    """Row, daily sum and lease are one transaction, so the audit needs no patience for it."""
    record = make_record(house.clock.new_id(), owner="host:0")
    async with house.database.begin() as connection:
        await insert_records(connection, [record], today=house.clock.today())
        assert await house.audit() == []
    assert await house.audit() == []


MONEY = "WHERE unit = 'nanousd' AND scope = :scope"


@pytest.mark.parametrize("scope", ["team:team_a", "key:key_of_team_a"])
@pytest.mark.parametrize(
    ("tampering", "book", "quantity"),
    [
        (f"UPDATE balances SET drawn = drawn + 1 {MONEY} AND length(period) = 10", "balances", "nanousd drawn"),
        (f"UPDATE balances SET drawn = drawn + 1 {MONEY} AND length(period) = 7", "balances", "nanousd drawn"),
        (
            f"UPDATE balances SET corrected = corrected + 1 {MONEY} AND length(period) = 7",
            "balances",
            "nanousd correct",
        ),
        (f"UPDATE balances SET cap = 5 {MONEY} AND length(period) = 7", "balances", "nanousd cap"),
        (f"UPDATE leases SET spent = spent + 1 {MONEY} AND owner = 'host:0'", "leases", "nanousd"),
    ],
)
async def test_one_nanodollar_too_many_is_found_under_load(
    house: House, scope: str, tampering: str, book: str, quantity: str
) -> None:
    """In a balance's drawn, corrected or cap or in a lease, of a team or a key: named to the unit."""
    async with house.busy():
        await house.change(tampering, scope=scope)
        [one] = [one for one in await house.audit() if one.day == house.clock.today()]

    assert (one.book, one.where.split(" ")[0]) == (book, scope)
    assert one.quantity.startswith(quantity)
    if "cap" not in quantity:
        assert one.found is not None and one.found - (one.expected or 0) == 1


FIRST = "request_id = (SELECT min(request_id::text)::uuid FROM usage_records)"


@pytest.mark.parametrize(
    "tampering",
    [
        "UPDATE usage_daily SET cost_nanousd = cost_nanousd + 1 WHERE team_id = 'team_b'",
        "DELETE FROM usage_daily WHERE team_id = 'team_b'",
        f"DELETE FROM usage_records WHERE {FIRST}",
        f"UPDATE usage_records SET output_tokens = output_tokens - 1 WHERE {FIRST}",
        f"UPDATE usage_records SET model_used = 'gpt-4o-mini' WHERE {FIRST}",
    ],
)
async def test_what_was_changed_in_ledger_or_statements_is_found_under_load(house: House, tampering: str) -> None:
    """A sum that was raised or lost, a row that was deleted, changed or moved: each is named, whatever else goes on."""
    async with house.busy():
        await house.change(tampering)
        found = await house.audit()

    assert [one for one in found if one.book == "statements"]


@pytest.mark.parametrize("most", [1, 2000])
async def test_a_row_that_costs_what_its_price_does_not_say_is_found(
    house: House, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Ledger, sums and leases may agree on a wrong cost; the price that the row names tells. In tier batch, beyond a
    step and after an announced change, too."""
    monkeypatch.setattr(price_editions, "SAMPLE", most)
    now = house.clock.now()
    later = LaterPrice(now - 60, Price(input=NanoDollars(7_000), output=NanoDollars(900)))
    plain = Price(input=NanoDollars(5_001), output=NanoDollars(15_000), cached_input=NanoDollars(3), batch_discount=0.5)
    stepped = replace(plain, steps=(PriceStep(input=NanoDollars(9_000), output=NanoDollars(1), above=99),))
    usage = Usage(100, output_tokens=20, cached_input_tokens=40)
    rows = [
        make_record(
            house.clock.new_id(),
            cost_nanousd=cost_of(usage, price, batch=tier == "batch", at=now),
            price=edition_of(price),
            created_at=now,
            tier=tier,
        )
        for price in (plain, stepped, replace(plain, later=(later,)))
        for tier in ("interactive", "batch")
    ]
    prices = PriceEditions((plain, stepped, replace(plain, later=(later,))))
    async with house.database.begin() as connection:
        prices.note(await prices.tell(connection, rows))
    await house.owners[0].book(*rows)
    async with house.database.begin() as connection:
        assert await compare_costs(connection, house.clock.today()) == (min(most, len(rows)), [])
        wrong = "UPDATE usage_records SET cost_nanousd = cost_nanousd + 1 WHERE price <> ''"
        assert (await connection.execute(text(wrong))).rowcount == len(rows)

    found = [one for one in await house.audit() if one.book == "costs"]

    assert len(found) == min(most, len(rows))
    async with house.database.begin() as connection:
        assert await prices.tell(connection, rows) == set()
        prices.forget()
        assert len(await prices.tell(connection, rows)) == 3
    known = {row.request_id: row.cost_nanousd for row in rows}
    assert all((one.expected, one.found) == (known[one.where], known[one.where] + 1) for one in found)


async def test_a_cache_of_an_hour_is_reckoned_by_its_own_edition(house: House) -> None:
    """A row of such a call names the price that it cost by; the gateway knows it beside the one of its file."""
    said = Price(input=NanoDollars(4_000), output=NanoDollars(9), cache_write_1h=NanoDollars(8_000))
    kept, usage = kept_an_hour(said), Usage(100, output_tokens=20, cached_input_tokens=40, cache_write_tokens=60)
    row = make_record(
        house.clock.new_id(), cost_nanousd=cost_of(usage, kept), cache_write_tokens=60, price=edition_of(kept)
    )
    prices = PriceEditions((said,))
    async with house.database.begin() as connection:
        assert await prices.tell(connection, [row]) == {edition_of(kept)}
    await house.owners[0].book(row)

    async with house.database.begin() as connection:
        assert await compare_costs(connection, house.clock.today()) == (1, [])


async def test_what_is_priced_beside_tokens_is_reckoned_again(house: House) -> None:
    """A row says how many requests its replies were asked for by, each with a fee and a step of its own."""
    step = PriceStep(above=50, input=NanoDollars(9_000), output=NanoDollars(9))
    price = Price(input=NanoDollars(4_000), output=NanoDollars(9), request=NanoDollars(700), steps=(step,))
    usage = Usage(100, output_tokens=20, extra_requests=2)
    row = make_record(
        house.clock.new_id(), cost_nanousd=cost_of(usage, price), price=edition_of(price), units=units_of(usage)
    )
    row = replace(row, input_tokens=100, output_tokens=20, cached_input_tokens=0)
    prices = PriceEditions((price,))
    async with house.database.begin() as connection:
        await prices.tell(connection, [row])
    await house.owners[0].book(row)

    assert row.cost_nanousd == 3 * 700 + 1
    async with house.database.begin() as connection:
        assert await compare_costs(connection, house.clock.today()) == (1, [])


@pytest.mark.parametrize("seconds", [0, 1, 599, 600, 3000, 43_200, 86_399])
async def test_every_moment_of_a_day_is_compared(database: Database, clock: SetClock, seconds: int) -> None:
    """Rows from all over the day agree with their sums; one more, at any moment of it, is found."""
    day = clock.today()
    times = [SetClock(clock.now() - 43_200 + at) for at in (0, 599.999, 600, 1200, 3000, 20_000, 86_399.999)]
    records = [make_record(time.new_id(), key_id=f"key_{number}") for number, time in enumerate(times)]
    async with database.begin() as connection:
        await insert_records(connection, records, today=day)
    assert (await audit(database, day, today=day)).differences == []
    extra = make_record(SetClock(clock.now() - 43_200 + seconds).new_id(), key_id="key_x")
    async with database.begin() as connection:
        await insert_records(connection, [extra], today=day)
        await connection.execute(text("DELETE FROM usage_daily WHERE key_id = 'key_x'"))

    found = [one for one in (await audit(database, day, today=day)).differences if one.book == "statements"]

    assert {one.where for one in found} == {f"team_a {day} {day} key_x gpt-4o interactive answered"}
    assert {one.quantity: one.expected for one in found}["cost_nanousd"] == 400_000


async def test_what_comes_back_does_not_grow_with_the_lines(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that agree are compared in Postgres: however many there are, nothing of them comes back."""
    seen: list[int] = []
    fetch = asyncpg.Connection.fetch

    async def watch(connection: Any, *asked: Any, **how: Any) -> Any:
        rows = await fetch(connection, *asked, **how)
        seen.append(len(rows))
        return rows

    monkeypatch.setattr(asyncpg.Connection, "fetch", watch)
    day = house.clock.today()
    records = [make_record(house.clock.new_id(), key_id=f"key_{number}") for number in range(100)]
    async with house.database.begin() as connection:
        await insert_records(connection, records, today=day)

    report = await audit(house.database, day)

    assert report.differences == [] and seen == [0, 0, 1, 1, 1]  # no row has a known price; then a count for each book
    assert report.books > 100


async def test_days_whose_rows_or_leases_are_gone_are_compared_as_far_as_they_go(
    database: Database, clock: SetClock
) -> None:
    """Retention drops rows, and leases go after two months: what is left is no difference."""
    async with database.begin() as connection:
        await insert_records(connection, [make_record(clock.new_id())], today=clock.today())
    day = clock.today()
    assert (await audit(database, day, today=day)).books > 1
    async with database.begin() as connection:
        await connection.execute(text("DELETE FROM leases"))
        await connection.execute(text("DELETE FROM balances"))
    assert await audit(database, day, today=date(2026, 6, 1)) == Report(1, [])  # the line of the daily sums

    later = SetClock(clock.now() + 90 * 86_400)
    async with database.begin() as connection:
        await forget_days(connection, later.today())
        await connection.execute(text(f"DROP TABLE usage_records_{day:%Y%m%d}"))
        await insert_records(connection, [make_record(later.new_id())], today=later.today())

    assert await audit(database, day, today=later.today()) == Report(0, [])


async def test_a_balance_that_differs_is_healed_and_told(house: House) -> None:
    """Drawn, corrected and cap are made anew from leases, corrections and limits, under load; the log says from what
    to what, and so does the audit log."""
    wrong = "UPDATE balances SET drawn = drawn + 7, corrected = corrected - 5, cap = 9 WHERE scope = 'team:team_a'"
    one = auditor(house)
    async with house.busy():
        await house.change(f"{wrong} AND length(period) = 7")
        with capture_logs() as logged:
            await one.audit_once()
        assert await house.audit() == []

    [healed] = [line for line in logged if line["event"] == "balance_healed"]
    assert (healed["log_level"], healed["scope"], healed["unit"]) == ("error", "team:team_a", "nanousd")
    assert (healed["before"]["cap"], healed["after"]["cap"]) == (9, 10**12)
    assert len([line for line in logged if line["event"] == "books_differ"]) == 3
    assert (one.found.statements, one.found.counters) == (0, 3)
    async with house.database.begin() as connection:
        [act] = await list_acts(connection, action="balance.healed")
    assert (act.team_id, act.subject, act.actor) == ("team_a", healed["scope"], "system")
    assert act.details["before"] == healed["before"] and act.details["after"] == healed["after"]


async def test_a_balance_that_is_missing_is_made_anew(house: House) -> None:
    """What leases and corrections know of it is enough."""
    before = "SELECT * FROM balances WHERE scope = 'team:team_a' ORDER BY unit, period"
    async with house.database.begin() as connection:
        balances = (await connection.execute(text(before))).all()
    await house.change("DELETE FROM balances WHERE scope = 'team:team_a'")

    await auditor(house).audit_once()

    async with house.database.begin() as connection:
        assert (await connection.execute(text(before))).all() == balances


async def test_what_rows_and_sums_disagree_on_is_told_and_left_to_people(house: House) -> None:
    """A ledger is not mended by a program: the difference is there at the next audit too."""
    await house.change("UPDATE usage_daily SET calls = calls + 1 WHERE team_id = 'team_b'")
    one = auditor(house)
    found = []
    for _ in range(2):
        await one.audit_once()
        found.append((one.found.statements, one.found.counters))

    assert found == [(1, 0), (1, 0)]


async def test_every_process_shows_what_one_of_them_has_found(house: House, clock: SetClock) -> None:
    """One audits in turn, its finding is that of all; the next turn comes after a quarter of an hour."""
    await house.change("UPDATE usage_daily SET calls = calls + 1 WHERE team_id = 'team_b'")
    clock.time = round(house.clock.now())
    turns = Turns(house.database, clock, uses_server_time=False)
    auditors = [Auditor(house.database, turns, record=record_healing) for _ in range(3)]
    for one in auditors:
        await one.look_once()
    first = [one.found for one in auditors]
    await house.change("UPDATE usage_daily SET calls = calls - 1 WHERE team_id = 'team_b'")
    clock.move(EVERY + 1)
    for one in auditors:
        await one.look_once()

    assert first == [first[0]] * 3 and first[0] != Found()
    assert (first[0].statements, first[0].counters, first[0].at) == (1, 0, clock.now() - EVERY - 1)
    assert first[0].books > 10
    assert {(one.found.statements, one.found.at) for one in auditors} == {(0, clock.now())}


def test_the_command_says_how_many_books_it_compared(
    database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 0 with their number where they agree; beside it, what owners have still to carry to the ledger."""
    listed = """
        INSERT INTO owners (id, started_at, seen_at, watermark, backlog) VALUES ('host:7', now(), now(), now(), 3)
    """
    asyncio.run(_book_one(database_url))
    asyncio.run(execute(database_url, listed))

    code = run_audit(settings_of(database_url, tmp_path), None)

    told = capsys.readouterr().out.splitlines()
    day = datetime.now(UTC).date()
    assert code == 0
    assert told[0] == "not in the ledger yet: 3 closed calls of 1 owner"
    # A line, four leases, the balances of four days and, with each of the two days, of two months.
    assert told[1] == f"13 books of {day - timedelta(days=1)} and {day} agree"


def test_the_command_shows_where_books_differ(
    database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 1 and a table; nothing is changed by looking."""
    monkeypatch.setenv("COLUMNS", "120")
    asyncio.run(_book_one(database_url))
    asyncio.run(execute(database_url, "UPDATE leases SET spent = spent - 1 WHERE scope LIKE 'team:%'"))
    settings = settings_of(database_url, tmp_path)

    codes = [run_audit(settings, datetime.now(UTC).date()) for _ in range(2)]

    told = capsys.readouterr().out
    assert codes == [1, 1]
    assert told.count("Where the books differ: 2 figures of 11 books") == 2 and "team:team_a" in told


def settings_of(database_url: str, folder: Path) -> Settings:
    """Return the settings of a house that has no Redis: the audit needs none."""
    return load_settings(write_config(folder / "tollgate.yaml", database_url, "redis://127.0.0.1:1"), {})


async def _book_one(database_url: str) -> None:
    database = Database(database_url)
    try:
        clock = Clock()
        async with database.begin() as connection:
            await insert_records(connection, [make_record(clock.new_id())], today=clock.today())
    finally:
        await database.close()


def test_an_audit_that_reaches_no_house_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line instead of a traceback, and no word that the books agree."""
    settings = settings_of("postgresql://nobody@127.0.0.1:1/none", tmp_path)

    with pytest.raises(typer.Exit) as ended:
        run_audit(settings, None)

    told = capsys.readouterr()
    assert ended.value.exit_code == 4  # 1 says that they differ
    assert told.out == "" and told.err.startswith("the books cannot be compared now: ")
    with pytest.raises(typer.Exit) as ended:
        audit_command(tmp_path / "none.yaml", None)
    assert ended.value.exit_code == 4
