# What the ledger says of calls by the name that they asked for.

from __future__ import annotations

from datetime import date, timedelta

from billing.core.prices import Price
from billing.core.records import Status
from billing.ledger.choices import Alternative, AskedSum, asked_sums
from billing.ledger.ledger import insert_records
from gateway.storage.database import Database
from protocol.usage import Usage
from tests.support.clock import SetClock
from tests.support.factories import make_record

TODAY = date(2026, 4, 5)
PRICE = Price(input=1, output=1)  # type: ignore[arg-type]
NAMES = [
    Alternative(asked="auto", is_auto=True, price=PRICE),
    Alternative(asked="large", is_auto=False, price=PRICE, quality=0.8),
]


async def asked(database: Database, team_id: str | None = "team_a", day: date = TODAY) -> list[AskedSum]:
    async with database.begin() as connection:
        found = await asked_sums(connection, team_id, day, day, NAMES)
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
