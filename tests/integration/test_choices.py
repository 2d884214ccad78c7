# What the ledger says of calls by the name that they asked for.

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

from sqlalchemy import text

from billing.core.prices import Price
from billing.core.records import HEDGE, Status
from billing.ledger.choices import Alternative, AskedSum, asked_sums, unsummed
from billing.ledger.ledger import insert_records
from billing.upkeep.sweep import close_days, sum_asked
from gateway.storage.database import Database
from protocol.usage import Usage
from tests.support.clock import SetClock
from tests.support.factories import make_record

TODAY = date(2026, 4, 5)
PRICE = Price(input=1, output=1)  # type: ignore[arg-type]
NAMES = [
    Alternative(asked="auto", is_auto=True, price=PRICE),
    Alternative(asked="large", is_auto=False, price=PRICE, quality=0.8),
    Alternative(asked="middle", is_auto=False, price=PRICE, quality=0.29),
]


async def asked(database: Database, team_id: str | None = "team_a", day: date = TODAY) -> list[AskedSum]:
    async with database.begin() as connection:
        read = await unsummed(connection, team_id, day, day)
        found = await asked_sums(connection, team_id, day, day, NAMES, read.days)
    return sorted(found, key=lambda one: (one.asked, one.tier, str(one.suffices)))


async def test_calls_are_added_up_by_name_tier_and_verdict(database: Database) -> None:
    """Charged calls that asked for one of the names; the verdict is the route's quality against the complexity."""
    clock = SetClock()
    usual = {"model_asked": "large", "input_tokens": 10, "cached_input_tokens": 4, "output_tokens": 2}
    calls = [
        {"complexity": 0.8},
        {"complexity": 0.79},
        {"complexity": None},
        {"complexity": None, "tier": "batch"},
        {"model_asked": "auto", "complexity": 0.9},
        {"model_asked": "small"},
        {"endpoint": "embeddings"},
        {"status": Status.FAILED, "cost_nanousd": 0},
        {"status": Status.BLOCKED},
        {"team_id": "team_b"},
    ]
    records = [make_record(clock.new_id(), **usual | call) for call in calls]
    async with database.begin() as connection:
        await insert_records(connection, records, today=TODAY)

    found = await asked(database)

    assert [(one.asked, one.tier, one.suffices, one.requests) for one in found] == [
        ("auto", "interactive", True, 1),
        ("large", "batch", None, 1),
        ("large", "interactive", False, 1),
        ("large", "interactive", None, 1),  # the blocked call is no request, as in statements; what it used is there
        ("large", "interactive", True, 1),
    ]
    assert found[3].usage == Usage(20, 8, 4)
    assert found[3].cost_nanousd == 800_000
    assert sorted((one.team_id, one.requests) for one in await asked(database, None) if one.asked == "large") == [
        *[("team_a", 1)] * 4,
        ("team_b", 1),
    ]
    assert await asked(database, day=TODAY - timedelta(days=1)) == []


async def test_a_second_attempt_that_is_alone_on_its_day_costs(database: Database) -> None:
    """Its call began before midnight. It is no request, and what it cost is there."""
    record = make_record(SetClock().new_id(), model_asked="large", route_reason=HEDGE)
    async with database.begin() as connection:
        await insert_records(connection, [record], today=TODAY)

    assert [(one.requests, one.cost_nanousd) for one in await asked(database)] == [(0, record.cost_nanousd)]


async def test_a_closed_day_tells_the_same_by_its_sums(database: Database) -> None:
    """Once it is added up none of its calls is read but late ones, and what it says of names, tiers, verdicts and
    money stays to the last nano-dollar; a day is added up once."""
    clock, morning = SetClock(), datetime(2026, 4, 6, 9, tzinfo=UTC)
    calls: list[dict[str, object]] = [
        {"model_asked": "large", "complexity": score, "tier": tier}
        for score in (0.8, 0.7999, 0.29, 0.0, 1.0, None)
        for tier in ("interactive", "batch")
    ]
    calls += [
        {"model_asked": "auto", "complexity": 0.9, "route_reason": "auto_small"},
        {"model_asked": "middle", "complexity": 0.29},  # a hundred times that is less than 29, to a float
        {"model_asked": "large", "status": Status.BLOCKED},
    ]
    async with database.begin() as connection:
        await insert_records(connection, [make_record(clock.new_id(), **call) for call in calls], today=TODAY)
    before = await asked(database, None)
    async with database.begin() as connection:
        await close_days(connection, morning)
        summed = [await sum_asked(connection, morning) for _ in range(2)]
        late = make_record(clock.new_id(), model_asked="large", complexity=0.29, team_id="team_b")
        await insert_records(connection, [late], today=morning.date())
        await connection.execute(text("DELETE FROM usage_records WHERE booked_on IS NULL"))
    after = await asked(database, None)

    def told(found: list[AskedSum]) -> set[tuple[object, ...]]:  # an automatic route's calls go by no verdict
        of_auto = ((one, None if one.asked == "auto" else one.suffices) for one in found)
        return {
            (one.team_id, one.asked, one.tier, does, one.requests, str(one.usage), one.cost_nanousd)
            for one, does in of_auto
        }

    assert summed == [1, 0] and len(before) == 8
    new = told(after) - told(before)
    assert told(before) <= told(after)
    assert [(one[0], one[3], one[4]) for one in new] == [("team_b", False, 1)]
