# Budgets on a real ledger: each threshold is told once, whoever looks and however often.

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime
from decimal import Decimal
from uuid import uuid4

import pytest
from sqlalchemy import insert, text

from billing.core.records import Status
from billing.ledger.ledger import insert_records
from billing.ledger.tables import corrections
from gateway.accounts.schemas import LimitsInput, NewKey, NewTeam, TeamPatch
from gateway.accounts.team_keys import create_key
from gateway.accounts.teams import create_team, update_team
from gateway.outbox.store import list_callbacks
from gateway.storage.audit_log import Act, list_acts
from gateway.storage.database import Database
from gateway.webhooks.budget_alerts import EVENT, LATE, BudgetAlerts, reached_budgets
from tests.support.clock import SetClock
from tests.support.factories import make_record

ADMIN = Act("tests")
URL = "https://hooks.example.com/budget"
TEN_DOLLARS = LimitsInput(usd_per_day=Decimal(10))


class Books:
    """A team that spends, and whoever watches it."""

    def __init__(self, database: Database, clock: SetClock) -> None:
        self.database = database
        self.clock = clock
        self.alerts = BudgetAlerts(database, clock)

    async def team(self, limits: LimitsInput, url: str | None = URL, team_id: str = "search") -> None:
        async with self.database.begin() as connection:
            await create_team(connection, NewTeam(id=team_id, limits=limits, webhook_url=url), ADMIN)

    async def limit(self, limits: LimitsInput) -> None:
        async with self.database.begin() as connection:
            await update_team(connection, "search", TeamPatch(limits=limits), ADMIN)

    async def spend(self, dollars: str, **more: object) -> None:
        self.clock.move(0.01)  # ids of events grow with time
        facts = {"team_id": "search", "cost_nanousd": int(Decimal(dollars) * 10**9)} | more
        async with self.database.begin() as connection:
            await insert_records(connection, [make_record(self.clock.new_id(), **facts)], today=self.clock.today())

    async def correct(self, dollars: str, key_id: str | None = None) -> None:
        row = {
            "id": uuid4(),
            "team_id": "search",
            "day": self.clock.today(),
            "key_id": key_id,
            "input_tokens": 0,
            "output_tokens": 0,
            "cost_nanousd": int(Decimal(dollars) * 10**9),
            "reason": "a test",
            "actor": "tests",
            "booked_on": self.clock.today(),
            "created_at": datetime.fromtimestamp(self.clock.now(), UTC),
        }
        async with self.database.begin() as connection:
            await connection.execute(insert(corrections).values(**row))

    async def look(self) -> list[int]:
        return [each.threshold for each in await self.alerts.look()]

    async def events(self) -> list[dict[str, object]]:
        async with self.database.begin() as connection:
            rows = await list_callbacks(connection)
        return [json.loads(bytes(row["body"]), parse_float=Decimal)["data"] for row in reversed(rows)]


@pytest.fixture
def books(database: Database, clock: SetClock) -> Books:
    """The books of the one team."""
    return Books(database, clock)


async def test_each_threshold_is_told_once(books: Books) -> None:
    """80 when it is reached, 100 when it is; looking again tells nothing."""
    await books.team(TEN_DOLLARS)
    looks = [await books.look()]
    for dollars in ("7.999999999", "0.000000001", "1.5", "0.5", "3"):
        await books.spend(dollars)
        looks += [await books.look(), await books.look()]

    assert looks == [[], [], [], [80], [], [], [], [100], [], [], []]
    assert await books.events() == [
        {
            "team_id": "search",
            "limit": "usd_per_day",
            "threshold": 80,
            "used_usd": Decimal("8.00"),
            "cap": Decimal("10.00"),
            "period": "2026-04-05",
        },
        {
            "team_id": "search",
            "limit": "usd_per_day",
            "threshold": 100,
            "used_usd": Decimal("10.00"),
            "cap": Decimal("10.00"),
            "period": "2026-04-05",
        },
    ]


async def test_both_at_once_are_told_as_the_higher(books: Books) -> None:
    """One event for 100, and none for 80 later."""
    await books.team(TEN_DOLLARS)
    await books.spend("11")

    assert [await books.look(), await books.look()] == [[100], []]
    assert [event["threshold"] for event in await books.events()] == [100]


async def test_many_who_look_at_once_tell_once(books: Books, database: Database, clock: SetClock) -> None:
    """Workers take turns, and a row makes each threshold one."""
    await books.team(TEN_DOLLARS)
    await books.spend("9")
    looks = await asyncio.gather(*(BudgetAlerts(database, clock).look() for _ in range(8)))
    looks.append(await books.alerts.look())

    assert [each.threshold for look in looks for each in look] == [80]
    assert len(await books.events()) == 1


async def test_the_event_and_its_row_stand_or_fall_together(
    books: Books, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What breaks before the commit tells nothing, and the next look tells it."""
    await books.team(TEN_DOLLARS)
    await books.spend("9")

    async def broken(*args: object, **more: object) -> None:
        raise RuntimeError

    with monkeypatch.context() as patched:
        patched.setattr("gateway.webhooks.budget_alerts.record_act", broken)
        with pytest.raises(RuntimeError):
            await books.look()
    none = await books.events()

    assert none == []
    assert await books.look() == [80]
    assert len(await books.events()) == 1


async def test_a_new_period_begins_anew(books: Books, clock: SetClock) -> None:
    """A day's thresholds are reached again the next day; a month's are not, until the next month."""
    await books.team(LimitsInput(usd_per_day=Decimal(10), usd_per_month=Decimal(20)))
    await books.spend("9")
    first = [(each.limit, each.period) for each in await books.alerts.look()]
    clock.move(86400)
    nothing = await books.look()
    await books.spend("9")
    second = [(each.limit, each.period) for each in await books.alerts.look()]
    clock.move(30 * 86400)
    await books.spend("17")
    third = [(each.limit, each.period, each.threshold) for each in await books.alerts.look()]

    assert first == [("usd_per_day", "2026-04-05")]
    assert nothing == []
    assert second == [("usd_per_day", "2026-04-06"), ("usd_per_month", "2026-04")]
    assert third == [("usd_per_day", "2026-05-06", 100), ("usd_per_month", "2026-05", 80)]


async def test_the_last_calls_of_a_day_still_count(books: Books, clock: SetClock) -> None:
    """Rows come a moment after midnight: the day is looked at until they are here."""
    await books.team(TEN_DOLLARS)
    midnight = datetime(2026, 4, 6, tzinfo=UTC).timestamp()
    clock.time = midnight - 0.5
    await books.spend("9")
    clock.time = midnight + 3
    first = [each.period for each in await books.alerts.look()]
    clock.time = midnight + LATE

    assert first == ["2026-04-05"]
    assert await books.look() == []


async def test_tokens_of_a_day_are_a_budget(books: Books) -> None:
    """Input and output of charged calls; failed ones cost a team nothing."""
    await books.team(LimitsInput(tokens_per_day=1000))
    await books.spend("0", input_tokens=700, output_tokens=99)
    await books.spend("0", input_tokens=500, output_tokens=500, status=Status.FAILED)
    before = await books.look()
    await books.spend("0", input_tokens=1, output_tokens=0)

    assert before == []
    assert await books.look() == [80]
    assert await books.events() == [
        {
            "team_id": "search",
            "limit": "tokens_per_day",
            "threshold": 80,
            "used_tokens": 800,
            "cap": 1000,
            "period": "2026-04-05",
        }
    ]


async def test_a_key_has_budgets_of_its_own(books: Books, database: Database) -> None:
    """A key's limit is told with the key; what other keys use does not count, nor does a revoked key."""
    await books.team(LimitsInput())
    async with database.begin() as connection:
        new = NewKey(team_id="search", limits=TEN_DOLLARS)
        mine = (await create_key(connection, "pepper", new, ADMIN, time.time())).record.key_id
        revoked = (await create_key(connection, "pepper", new, ADMIN, time.time())).record.key_id
        await connection.execute(text("UPDATE api_keys SET revoked_at = now() WHERE id = :id"), {"id": revoked})
    await books.spend("9", key_id="key_other")
    await books.spend("9", key_id=revoked)
    before = await books.look()
    await books.spend("8.5", key_id=mine)
    after = await books.look()

    assert (before, after) == ([], [80])
    (event,) = await books.events()
    assert (event["key_id"], event["used_usd"]) == (mine, Decimal("8.50"))


async def test_a_raised_cap_can_be_reached_again(books: Books) -> None:
    """Only after it was no longer reached: a slightly raised one that still is tells nothing, and is shown as it is."""
    await books.team(TEN_DOLLARS)
    await books.spend("9")
    looks = [await books.look()]
    await books.limit(LimitsInput(usd_per_day=Decimal(11)))
    looks.append(await books.look())
    async with books.database.begin() as connection:
        (shown,) = await reached_budgets(connection, books.clock.today(), "search")
    await books.limit(LimitsInput(usd_per_day=Decimal(20)))
    looks.append(await books.look())
    await books.spend("7")
    looks += [await books.look(), await books.look()]

    assert looks == [[80], [], [], [80], []]
    assert [event["cap"] for event in await books.events()] == [Decimal(10), Decimal(20)]
    assert (shown["threshold"], shown["used_usd"], shown["cap"]) == (80, Decimal(9), Decimal(11))


async def test_what_is_reached_is_told_of_the_cap_that_it_reached(books: Books, database: Database) -> None:
    """Where a cap was lowered, its last threshold is not told with the cap before it; of one team or of all."""
    await books.team(TEN_DOLLARS)
    await books.team(TEN_DOLLARS, team_id="other")
    await books.spend("8.5")
    await books.spend("9", team_id="other")
    await books.look()
    await books.limit(LimitsInput(usd_per_day=Decimal(5)))
    await books.look()
    async with database.begin() as connection:
        (told,) = await reached_budgets(connection, books.clock.today(), "search")
        every = await reached_budgets(connection, books.clock.today(), None)

    assert (told["threshold"], told["used_usd"], told["cap"]) == (100, Decimal("8.5"), Decimal(5))
    assert [(one["team_id"], one["threshold"]) for one in every] == [("search", 100), ("other", 80)]


async def test_corrections_count(books: Books) -> None:
    """Money given back is no longer spent, and what is booked later is."""
    await books.team(TEN_DOLLARS)
    await books.spend("9")
    looks = [await books.look()]
    await books.correct("-5")
    looks.append(await books.look())
    await books.correct("4.5")
    looks.append(await books.look())

    assert looks == [[80], [], [80]]


async def test_without_a_webhook_it_is_logged_and_audited(books: Books, database: Database) -> None:
    """Nobody is told later either, when there is one."""
    await books.team(TEN_DOLLARS, url=None)
    await books.spend("9")
    first = await books.look()
    async with database.begin() as connection:
        await update_team(connection, "search", TeamPatch(webhook_url=URL), ADMIN)
        (act,) = await list_acts(connection, team_id="search", action=EVENT)

    assert (first, await books.look(), await books.events()) == ([80], [], [])
    assert (act.actor, act.subject, act.details["threshold"]) == ("system", "search", 80)
    assert (act.details["used_usd"], act.details["callback_id"]) == ("9.00", None)


async def test_every_alert_is_audited_with_its_callback(books: Books, database: Database) -> None:
    """The audit log leads to the outbox."""
    await books.team(TEN_DOLLARS)
    await books.spend("9")
    await books.look()
    async with database.begin() as connection:
        (act,) = await list_acts(connection, action=EVENT)
        (callback,) = await list_callbacks(connection)
        kept = (await connection.execute(text("SELECT callback_id, used, cap FROM budget_alerts"))).one()

    assert act.details["callback_id"] == callback["id"] == kept.callback_id
    assert (callback["url"], callback["event"]) == (URL, EVENT)
    assert (kept.used, kept.cap) == (9 * 10**9, 10 * 10**9)


async def test_teams_without_budgets_cost_nothing(books: Books, database: Database) -> None:
    """Other limits are none of an alert's business, and other teams' spending neither."""
    await books.team(LimitsInput(requests_per_minute=1))
    await books.team(TEN_DOLLARS, team_id="other")
    await books.spend("100")

    assert await books.look() == []
