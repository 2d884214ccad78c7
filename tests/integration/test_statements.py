# Statements, on a real Postgres: what finance reads.

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, timedelta
from typing import Any

import pytest
from sqlalchemy import event, text

from billing.core.money import to_nano, to_text
from billing.core.prices import Price, cost_of
from billing.core.records import Status, UsageRecord
from billing.ledger.ledger import insert_records
from billing.ledger.statement_queries import STATUSES, query_for
from billing.ledger.statements import MOST_TAGS, GroupBy, Totals, period
from billing.upkeep.sweep import close_days
from gateway.storage.database import Database
from protocol.usage import Usage
from tests.support.clock import NOON, SetClock
from tests.support.factories import make_record

TODAY = date(2026, 4, 5)
PRICES = {
    "gpt-4o": Price(input=to_nano("2.50"), cached_input=to_nano("1.25"), output=to_nano(10)),
    "llama-3-70b": Price(input=to_nano("0.40"), output=to_nano("0.80")),
}


@pytest.fixture
async def books(database: Database) -> Database:
    """A day of 4,200,000 input and 840,000 output tokens in 840 calls of two keys and two models."""
    clock = SetClock()
    records = []
    for number in range(840):
        model = "gpt-4o" if number % 4 else "llama-3-70b"
        usage = Usage(5000, 2000, 1000)
        records.append(
            make_record(
                clock.new_id(),
                model_used=model,
                key_id=f"key_{number % 2}",
                tier="batch" if number % 3 == 0 else "interactive",
                input_tokens=usage.input_tokens,
                cached_input_tokens=usage.cached_input_tokens,
                output_tokens=usage.output_tokens,
                cost_nanousd=cost_of(usage, PRICES[model]),
            )
        )
    await write(database, records)
    return database


async def test_the_daily_report_comes_out_to_the_cent(books: Database) -> None:
    """630 calls of GPT-4o and 210 of Llama, by hand: 630 x $0.02 and 210 x $0.0028 come to $13.188."""
    async with books.begin() as connection:
        statement = await period(connection, "team_a", TODAY, TODAY)

    assert statement.total == Totals(
        requests=840,
        input_tokens=4_200_000,
        cached_input_tokens=1_680_000,
        output_tokens=840_000,
        cost_nanousd=to_nano("13.188"),
    )
    assert to_text(statement.total.cost_nanousd) == "13.188"
    assert not statement.is_closed


@pytest.mark.parametrize(
    ("group_by", "groups"),
    [
        (GroupBy.MODEL, {"gpt-4o": 630, "llama-3-70b": 210}),
        (GroupBy.KEY, {"key_0": 420, "key_1": 420}),
        (GroupBy.TIER, {"batch": 280, "interactive": 560}),
        (GroupBy.DAY, {"2026-04-05": 840}),
    ],
)
async def test_lines_add_up_to_the_total(books: Database, group_by: GroupBy, groups: dict[str, int]) -> None:
    """Whatever the grouping, every call is on exactly one line."""
    async with books.begin() as connection:
        statement = await period(connection, "team_a", TODAY - timedelta(days=3), TODAY, group_by)

    assert {line.groups[0]: line.total.requests for line in statement.lines} == groups
    assert sum((line.total for line in statement.lines), Totals()) == statement.total


# Enough of them that Postgres does not read them all to find one's.
OTHER_TEAMS = """
    INSERT INTO usage_daily (team_id, day, booked_on, key_id, model_used, tier, status)
    SELECT 'other_' || n, :day, :day, 'key', 'small', 'interactive', 'answered' FROM generate_series(1, 2000) AS n
"""


async def test_the_daily_report_asks_once(books: Database) -> None:
    """One question to Postgres, answered by the daily sums and an index: no call is read."""
    asked: list[str] = []
    event.listen(books.engine.sync_engine, "before_cursor_execute", lambda *words: asked.append(words[2]))
    async with books.begin() as connection:
        await connection.execute(text(OTHER_TEAMS), {"day": TODAY})
        await connection.execute(text("ANALYZE usage_daily"))
        asked.clear()
        await period(connection, "team_a", TODAY, TODAY)
        [question] = asked
        values = {"teams": ["team_a"], "first": TODAY, "last": TODAY, "most": MOST_TAGS, **STATUSES}
        plan = "\n".join((await connection.execute(text(f"EXPLAIN {query_for(()).text}"), values)).scalars())
        await connection.rollback()

    assert "usage_records" not in question
    assert "Index Cond: ((team_id = " in plan and "Seq Scan on usage_daily" not in plan


LINES = """
    INSERT INTO usage_daily (team_id, day, booked_on, key_id, model_used, tier, status, calls, cost_nanousd)
    SELECT 'team_' || n % 4, day, day, 'key_' || n, 'model_' || n % 2, 'interactive', 'answered', 1, 3
    FROM generate_series(1, 40) AS n, (SELECT CAST(:day AS date) - d AS day FROM generate_series(0, 9) AS d) AS days
"""


async def test_each_daily_sum_is_read_once_and_added_up_before_statuses_are_told_apart(database: Database) -> None:
    """The 26 sums of a line are made of a row for each group and status, not of every daily sum: 400 become 2."""
    values = {"first": TODAY - timedelta(days=9), "last": TODAY, "most": MOST_TAGS, **STATUSES}
    query = query_for((GroupBy.MODEL,), of_all=True).text
    async with database.begin() as connection:
        await connection.execute(text(LINES), {"day": TODAY})
        [plan] = (await connection.execute(text(f"EXPLAIN (ANALYZE, FORMAT JSON) {query}"), values)).scalar_one()
        statement = await period(connection, None, values["first"], TODAY, GroupBy.MODEL)  # type: ignore[arg-type]
        await connection.rollback()

    nodes = list(nodes_of(plan["Plan"]))
    assert [node["Actual Rows"] for node in nodes if node.get("Relation Name") == "usage_daily"] == [400]
    assert [node["Actual Rows"] for node in nodes if node["Node Type"] == "Append"] == [2]
    assert [(line.total.requests, line.total.cost_nanousd) for line in statement.lines] == [(200, 600), (200, 600)]


def nodes_of(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every node of a plan."""
    yield plan
    for below in plan.get("Plans", ()):
        yield from nodes_of(below)


async def test_only_charged_calls_count(database: Database) -> None:
    """Failed and superseded calls owe nothing, blocked ones owe what they used; requests are those answered."""
    clock = SetClock()
    costs = {Status.ANSWERED: 7, Status.INTERRUPTED: 5, Status.BLOCKED: 3, Status.FAILED: 0, Status.SUPERSEDED: 0}
    await write(
        database,
        [
            make_record(clock.new_id(), status=status, cost_nanousd=cost, gpu_cost_nanousd=1)
            for status, cost in costs.items()
        ],
    )

    async with database.begin() as connection:
        total = (await period(connection, "team_a", TODAY, TODAY)).total

    assert (total.requests, total.blocked, total.failed, total.cost_nanousd) == (2, 1, 1, 15)
    assert (total.input_tokens, total.output_tokens, total.gpu_cost_nanousd) == (300, 60, 5)


async def test_another_team_and_an_empty_day_show_nothing(books: Database) -> None:
    """A statement is of one team; a day without calls is all zeros."""
    yesterday = TODAY - timedelta(days=1)
    async with books.begin() as connection:
        assert (await period(connection, "team_b", TODAY, TODAY)).total == Totals()
        assert (await period(connection, "team_a", yesterday, yesterday)).total == Totals()


async def test_a_closed_day_never_changes(books: Database) -> None:
    """What comes after the close shows as a correction beside the figures that were sent out."""
    late = SetClock()
    async with books.begin() as connection:
        before = await period(connection, "team_a", TODAY, TODAY)
        assert await close_days(connection, SetClock(NOON + 86_400).moment()) == [TODAY]

    async with books.begin() as connection:
        await insert_records(connection, [make_record(late.new_id(), cost_nanousd=11)], today=TODAY + timedelta(days=1))

    async with books.begin() as connection:
        after = await period(connection, "team_a", TODAY, TODAY)
    assert after.total == before.total
    assert after.corrections.cost_nanousd == 11 and after.corrections.requests == 1
    assert after.is_closed


async def test_a_day_waits_for_every_living_owner(books: Database) -> None:
    """A day closes when every owner has passed it; one that was not seen for an hour is taken as lost."""
    owner = text("""
        INSERT INTO owners (id, started_at, seen_at, watermark) SELECT 'a', seen, seen, to_timestamp(:watermark)
        FROM (SELECT to_timestamp(:seen) AS seen) AS moment
    """)
    tomorrow = NOON + 86_400
    async with books.begin() as connection:
        await connection.execute(owner, {"watermark": NOON, "seen": tomorrow - 3000})

        assert await close_days(connection, SetClock(tomorrow).moment()) == []
        assert await close_days(connection, SetClock(tomorrow + 1000).moment()) == [TODAY]


async def write(database: Database, records: list[UsageRecord]) -> None:
    """Write in one transaction."""
    async with database.begin() as connection:
        await insert_records(connection, records, today=TODAY)
