# The audit while calls run: a busy house shows no difference, and one nano-dollar that only one book knows is found.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
import typer
from redis.asyncio import Redis
from sqlalchemy import text
from structlog.testing import capture_logs

from billing import audit as audit_module
from billing import auditor, cut_off
from billing import flusher as flusher_module
from billing.audit import Difference, audit, flushed_before
from billing.auditor import Auditor, Found
from billing.corrections import Correction, add_correction
from billing.cut_off import owners_cut_off
from billing.flusher import Flusher
from billing.holds import Hold, HoldRequest, Leg, Limits, Scope, Settlement
from billing.ids import day_of
from billing.journal import Journal
from billing.quotas import Quotas
from billing.scope_state import ScopeState
from gateway.audit_cli import run_audit
from gateway.background import stop_all
from gateway.clock import Clock
from gateway.database import Database
from protocol.usage import Usage
from tests.support.clock import SetClock
from tests.support.factories import make_record
from tests.support.house import settings_for
from tests.support.owners import open_owner
from tests.support.redis_proxy import Way, redis_proxy
from tests.support.servers import execute

TEAMS = ("team_a", "team_b")


class House:
    """Calls that are held, written down, flushed and settled, as a gateway does it."""

    def __init__(self, database: Database, redis: Redis, folder: Path) -> None:
        self.database = database
        self.redis = redis
        self.clock = Clock()
        self.quotas = Quotas(redis, self.clock, deadline=5.0)
        self.journal = Journal.open(folder, clock=self.clock)
        self.flusher = Flusher(self.journal, database, self.clock)

    async def call(self, team_id: str, clock: Clock, pause: float = 0.0) -> None:
        """Make one call whose id ``clock`` makes."""
        scopes = (Scope("team", team_id, Limits(nanousd_per_month=10**12)), Scope("key", "key_a", Limits()))
        request = HoldRequest(
            request_id=clock.new_id(),
            team_id=team_id,
            scopes=scopes,
            legs=(Leg("a", 500, 500_000),),
            valid_until=self.clock.now() + 60,
        )
        hold = await self.quotas.open(request)
        assert isinstance(hold, Hold)
        record = make_record(request.request_id, team_id=team_id)
        self.journal.opened(record)
        await asyncio.sleep(pause)
        self.journal.closed(record)
        await asyncio.sleep(pause)
        await self.quotas.settle(hold, Settlement(Usage(100, output_tokens=20), record.cost_nanousd))

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """Make calls and flush them all the time inside the block."""
        loops = [self._call_for_ever(team_id) for team_id in TEAMS for _ in range(4)]
        tasks = [asyncio.create_task(each) for each in (*loops, self.flusher.run())]
        try:
            await self._until_flushed(40)
            yield
            assert not any(task.done() for task in tasks)
        finally:
            await stop_all(tasks)

    async def _call_for_ever(self, team_id: str) -> None:
        while True:
            await self.call(team_id, self.clock, 0.01)

    async def _until_flushed(self, rows: int) -> None:
        """Wait until so many rows of today are in the ledger; as many calls are settled, or nearly."""
        query = text("SELECT count(*) FROM usage_records WHERE day = :today")
        async with asyncio.timeout(30):
            while True:
                async with self.database.begin() as connection:
                    if (await connection.execute(query, {"today": self.clock.today()})).scalar_one() >= rows:
                        return
                await asyncio.sleep(0.02)

    async def audit(self) -> list[Difference]:
        """Compare the books of the day on which the older calls began, and of today."""
        days = sorted({self.older.today(), self.clock.today()})
        return [one for day in days for one in await audit(self.database, self.quotas, day)]

    @property
    def older(self) -> SetClock:
        """The time ten minutes ago, so that calls are older than the watermark."""
        return SetClock(self.clock.now() - 600)


@pytest.fixture
async def house(database: Database, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    """A house that has had calls ten minutes ago and a correction since."""
    monkeypatch.setattr(audit_module, "PAUSE", 0.05)
    monkeypatch.setattr(cut_off, "LOOK_EVERY", 0.05)
    monkeypatch.setattr(cut_off, "OVERDUE", 1.0)
    monkeypatch.setattr(flusher_module, "REPORT_EVERY", 0.3)
    house = House(database, redis, tmp_path)
    async with database.begin() as connection:
        for team_id in TEAMS:
            await connection.execute(text("INSERT INTO teams (id, name) VALUES (:id, :id)"), {"id": team_id})
    for team_id in TEAMS:
        for _ in range(10):
            await house.call(team_id, house.older)
    while await house.flusher.flush_once():
        pass
    await correct(house)
    return house


async def correct(house: House) -> None:
    """Refund 250 nano-dollars to team_a, nine minutes ago."""
    moment = datetime.fromtimestamp(house.clock.now() - 540, UTC)
    correction = Correction(
        id=UUID(house.older.new_id()),
        team_id="team_a",
        day=house.older.today(),
        cost_nanousd=-250,
        reason="goodwill",
        actor="test",
        booked_on=moment.date(),
        created_at=moment,
    )
    async with house.database.begin() as connection:
        await add_correction(connection, correction)
    day = day_of(house.older.new_id())
    await house.quotas.correct(correction.count_id, "team_a", None, day, 0, -250)


async def was_cut_off(house: House) -> None:
    """Let the house's flusher be one that carried everything and was last seen a minute and a half ago."""
    await house.flusher.report()
    async with house.database.begin() as connection:
        await connection.execute(text("UPDATE flushers SET seen_at = seen_at - interval '90 s', watermark = now()"))


async def lose_last_call(house: House) -> None:
    """Take the last call, which is team_b's, out of the ledger and the statements; the counters keep it."""
    async with house.database.begin() as connection:
        latest = "SELECT max(request_id::text)::uuid FROM usage_records"
        await connection.execute(text(f"DELETE FROM usage_records WHERE request_id = ({latest})"))
        await connection.execute(text("UPDATE usage_daily SET calls = calls - 1, cost_nanousd = cost_nanousd - 400000,"
                                      " input_tokens = input_tokens - 100, output_tokens = output_tokens - 20,"
                                      " cached_input_tokens = cached_input_tokens - 40 WHERE team_id = 'team_b'"
                                      " AND day = (SELECT max(day) FROM usage_daily)"))  # fmt: skip


async def test_a_busy_house_shows_no_difference(house: House) -> None:
    """Twenty audits while calls close, flush and settle: the books agree in each."""
    async with house.busy():
        for _ in range(20):
            assert await house.audit() == []
    async with house.database.begin() as connection:
        rows = (await connection.execute(text("SELECT count(*) FROM usage_records"))).scalar_one()
    assert rows > 40  # there was something to compare


async def test_one_nanodollar_too_many_in_a_counter_is_found_under_load(house: House) -> None:
    """The figures move while we look; at the watermark they stand still, and the difference is named to the unit."""
    day = house.older.today()
    async with house.busy():
        [key] = [key async for key in house.redis.scan_iter(f"*{{team_a}}*:d:team:{(day_of(house.older.new_id()))}")]
        await house.redis.hincrby(key, "c", 1)
        found = await house.audit()

    [one] = [one for one in found if one.day == day]
    assert (one.team_id, one.quantity, (one.counters or 0) - one.ledger) == ("team_a", "cost_nanousd", 1)
    assert one.where.startswith("day before ")


async def test_one_nanodollar_too_many_for_a_key_is_found(house: House) -> None:
    """Keys have limits of their own, so their counters are books too; the team's are in order here."""
    day = day_of(house.older.new_id())
    [key] = [key async for key in house.redis.scan_iter(f"*{{team_a}}*:d:key:key_a:{day}")]
    await house.redis.hincrby(key, "c", 1)

    [one] = await house.audit()

    assert (one.team_id, one.where, one.quantity) == ("team_a", "day of key_a", "cost_nanousd")
    assert (one.counters or 0) - one.ledger == 1


@pytest.mark.parametrize(
    "tampering",
    [
        "UPDATE usage_daily SET cost_nanousd = cost_nanousd + 1 WHERE team_id = 'team_b'",
        "DELETE FROM usage_records WHERE request_id = (SELECT min(request_id::text)::uuid FROM usage_records)",
        "UPDATE usage_records SET output_tokens = output_tokens - 1 WHERE request_id ="
        " (SELECT min(request_id::text)::uuid FROM usage_records)",
    ],
)
async def test_what_was_changed_in_ledger_or_statements_is_found_under_load(house: House, tampering: str) -> None:
    """A sum that was raised, a row that was deleted, a row that was changed: each is named, whatever else goes on."""
    async with house.busy():
        async with house.database.begin() as connection:
            await connection.execute(text(tampering))
        found = await house.audit()

    assert [one for one in found if one.statements is not None and one.statements != one.ledger]


async def test_a_quiet_house_is_compared_to_the_last_call(house: House) -> None:
    """Where nothing moves, a difference of the last minute is found too."""
    await house.call("team_b", house.clock)
    while await house.flusher.flush_once():
        pass
    assert await house.audit() == []

    await lose_last_call(house)
    found = await house.audit()

    day_differences = {one.quantity: (one.counters or 0) - one.ledger for one in found if one.where == "day"}
    assert day_differences == {"cost_nanousd": 400_000, "tokens": 120}


async def test_counters_that_are_lost_while_we_look_are_no_finding(house: House) -> None:
    """What differed at the first look and can be compared no more may have been a call on its way: nobody knows."""

    class Losing(Quotas):
        """Redis is wiped as soon as it has told of every book."""

        async def usage(self, team_id: str, *, day: int | None = None, key_id: str | None = None) -> ScopeState:
            state = await super().usage(team_id, day=day, key_id=key_id)
            asked.append(team_id)
            if len(asked) == 2 * len(TEAMS):  # a team's book and its key's
                await house.redis.flushall()
            return state

    asked: list[str] = []
    async with house.database.begin() as connection:
        await connection.execute(
            text("UPDATE usage_daily SET cost_nanousd = cost_nanousd + 1 WHERE team_id = 'team_b'")
        )
    found = await audit(house.database, Losing(house.redis, house.clock, deadline=5.0), house.older.today())

    assert len(asked) > 2 * len(TEAMS), "the books were looked at once only"
    assert [one for one in found if one.counters is not None] == []


async def test_the_watermark_is_that_of_the_slowest_flusher(house: House, database: Database) -> None:
    """Calls younger than what the slowest living journal has carried are not compared; lost journals do not count."""
    assert await flushed_before(database) is None
    now = house.clock.now()
    row = text("INSERT INTO flushers VALUES (:id, to_timestamp(:watermark), 0, to_timestamp(:seen))")
    async with database.begin() as connection:
        for name, watermark, seen in (("fast", now, now), ("slow", now - 300, now), ("lost", now - 9000, now - 4000)):
            await connection.execute(row, {"id": name, "watermark": watermark, "seen": seen})

    assert await flushed_before(database) == (now - 300 - 60) // 60 * 60


async def test_every_process_shows_what_one_of_them_has_found(
    house: House, database: Database, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One audits in turn, and its finding is everybody's."""
    monkeypatch.setattr(auditor, "CONFIRM_AFTER", 0.1)
    auditors = [Auditor(database, redis, house.quotas, house.clock) for _ in range(2)]
    async with database.begin() as connection:
        await connection.execute(text("UPDATE usage_daily SET calls = calls + 1 WHERE team_id = 'team_b'"))
    tasks = [asyncio.create_task(auditors[0].run())]
    while auditors[0].found == Found():
        await asyncio.sleep(0.02)
    tasks.append(asyncio.create_task(auditors[1].run()))
    while auditors[1].found == Found():
        await asyncio.sleep(0.02)
    await stop_all(tasks)

    assert auditors[0].found == auditors[1].found
    assert (auditors[1].found.statements, auditors[1].found.counters) == (1, 0)
    assert timedelta(0) <= timedelta(seconds=house.clock.now() - auditors[1].found.at) < timedelta(minutes=1)


async def test_what_agrees_at_the_second_look_is_no_finding(
    house: House, database: Database, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that was still on its way alarms nobody."""
    monkeypatch.setattr(auditor, "CONFIRM_AFTER", 0.0)
    found = []

    async def change(by: int) -> None:
        async with database.begin() as connection:
            await connection.execute(
                text("UPDATE usage_daily SET calls = calls + :by WHERE team_id = 'team_b'"), {"by": by}
            )

    async def find(database: Database, quotas: Quotas, day: date) -> list[Difference]:
        found.append(await audit(database, quotas, day))
        if found[-1]:
            await change(-1)
        return found[-1]

    await change(1)
    monkeypatch.setattr(auditor, "audit", find)
    one = Auditor(database, redis, house.quotas, house.clock)
    await one.audit_once()

    assert [len(each) for each in found] == [0, 1, 0, 0]  # yesterday and today, twice
    assert (one.found.statements, one.found.counters) == (0, 0)


async def test_a_call_that_only_a_cut_off_owner_can_flush_is_no_difference(
    house: House, database: Database, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settled, and in the journal of a gateway that has lost Postgres: its last calls cannot be compared yet."""
    monkeypatch.setattr(auditor, "CONFIRM_AFTER", 0.1)
    await was_cut_off(house)
    await house.call("team_a", house.clock)  # and no flush
    one = Auditor(database, redis, house.quotas, house.clock)
    with capture_logs() as logged:
        await one.audit_once()

    assert (one.found.statements, one.found.counters) == (0, 0)
    assert {line["owner"] for line in logged if line["event"] == "books_not_compared"} == {house.flusher.id}
    while await house.flusher.flush_once():
        pass
    await house.flusher.report()
    assert (await house.audit(), await owners_cut_off(database)) == ([], [])


async def test_a_call_that_only_a_cut_off_owner_can_settle_is_no_difference(
    house: House, database: Database, redis_url: str, tmp_path: Path
) -> None:
    """In the ledger, and unsettled by a gateway that has lost Redis: compared again as soon as that has told it."""
    async with redis_proxy(redis_url) as proxy:
        owner = await open_owner(tmp_path / "cut", database, proxy.url)
        try:
            proxy.turn(Way.CUT)
            account = await owner.begin(owner.ask())  # held without Redis, which hears nothing of it
            owner.close(account)
            await account.settle()
            while owner.flusher.backlog:
                await asyncio.sleep(0.02)
            found, cut = await house.audit(), await owners_cut_off(database)
            proxy.turn(Way.OPEN)
            async with asyncio.timeout(20):
                while await owners_cut_off(database):
                    await asyncio.sleep(0.1)
            assert await house.audit() == []
        finally:
            await owner.stop()

    assert found == []
    assert [(one.owner, one.unsettled > 0) for one in cut] == [(owner.flusher.id, True)]


async def test_an_owner_that_is_cut_off_hides_no_older_difference(house: House) -> None:
    """What was lost of calls that it had carried before is found, at the watermark that it has reached."""
    await was_cut_off(house)
    day = house.older.today()
    await lose_last_call(house)
    found = [one for one in await house.audit() if one.day == day]

    assert {(one.team_id, one.quantity, (one.counters or 0) - one.ledger) for one in found} >= {
        ("team_b", "cost_nanousd", 400_000),
        ("team_b", "tokens", 120),
    }
    assert all(" before " in one.where for one in found)


def test_the_command_tells_who_is_cut_off(
    database_url: str, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing differs, as far as it can be compared: exit 0, and a table of the owners whose last calls cannot be."""
    asyncio.run(execute(database_url, "INSERT INTO flushers VALUES ('host:7', now(), 3, now() - interval '90 s')"))

    code = run_audit(settings_for(database_url, redis_url, "http://x", tmp_path), None)

    told = capsys.readouterr().out
    assert code == 0 and "host:7" in told and "as far as they can be compared" in told


def test_an_audit_that_reaches_no_house_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line instead of a traceback, and no word that the books agree."""
    settings = settings_for("postgresql://nobody@127.0.0.1:1/none", "redis://127.0.0.1:1", "http://x", tmp_path)

    with pytest.raises(typer.Exit) as ended:
        run_audit(settings, None)

    told = capsys.readouterr()
    assert ended.value.exit_code == 1
    assert told.out == "" and told.err.startswith("the books cannot be compared now: ")
