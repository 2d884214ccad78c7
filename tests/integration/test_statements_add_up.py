# Whatever was booked, statements add up: over days, over groups, and to what a plain loop over the entries says.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from random import Random
from uuid import UUID

import pytest
from msgspec import Struct

import billing.ledger.statements
from billing.core.ids import date_of
from billing.core.records import CHARGED, REQUESTS, Status, UsageRecord
from billing.ledger.corrections import Correction, add_correction
from billing.ledger.ledger import insert_records
from billing.ledger.statement_queries import Group, GroupBy, Tag
from billing.ledger.statements import Statement, Totals, period
from billing.upkeep.sweep import close_days
from gateway.storage.database import Database
from tests.support.clock import SetClock
from tests.support.factories import make_record

FIRST, LAST = date(2026, 3, 29), date(2026, 4, 3)  # over the border of a month
DAY = 86_400
GROUPINGS: list[tuple[Group, ...]] = [
    (),
    (GroupBy.DAY,),
    (GroupBy.MONTH,),
    (GroupBy.MODEL,),
    (GroupBy.KEY,),
    (GroupBy.TIER,),
    (GroupBy.USER,),
    (Tag("project"),),
    (GroupBy.MODEL, GroupBy.TIER),
    (GroupBy.DAY, GroupBy.USER),
    (Tag("stage"), GroupBy.MONTH, Tag("project")),
]


class Entry(Struct, frozen=True, kw_only=True):
    """One thing that was booked: a call or a correction."""

    day: date
    is_late: bool
    sums: Totals
    record: UsageRecord | None  # the call that it is, or that it corrects
    correction: Correction | None = None


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_range_is_the_sum_of_its_days(database: Database, seed: int) -> None:
    """By every grouping, a period's lines are the sums of the lines of its days, and of the entries themselves."""
    entries = await fill(database, Random(seed))

    for group_by in GROUPINGS:
        whole = await statement(database, FIRST, LAST, *group_by)
        days = [await statement(database, day, day, *group_by) for day in every_day()]

        lines: dict[tuple[str | None, ...], tuple[Totals, Totals]] = defaultdict(lambda: (Totals(), Totals()))
        for line in (line for one in days for line in one.lines):
            total, late = lines[line.groups]
            lines[line.groups] = (total + line.total, late + line.corrections)
        assert {line.groups: (line.total, line.corrections) for line in whole.lines} == dict(lines), group_by
        assert sum((one.total for one in days), Totals()) == whole.total == added(entries, is_late=False)
        assert sum((one.corrections for one in days), Totals()) == whole.corrections == added(entries, is_late=True)
        if group_by:
            assert by_hand(entries, group_by) == dict(lines), group_by


@pytest.mark.parametrize("seed", [4, 5])
async def test_a_house_is_the_sum_of_its_teams(database: Database, seed: int) -> None:
    """The statement of all teams has a line for each, which is that team's own."""
    await fill(database, Random(seed))
    teams = ("team_a", "team_b")

    house = await statement(database, FIRST, LAST, GroupBy.TEAM, team_id=None)
    own = {team: await statement(database, FIRST, LAST, team_id=team) for team in teams}

    assert {line.groups[0]: (line.total, line.corrections) for line in house.lines} == {
        team: (one.total, one.corrections) for team, one in own.items()
    }


async def test_the_rest_is_one_line(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the dearest users, one line sums up the others, so that the lines still make the whole."""
    monkeypatch.setattr(billing.ledger.statements, "MOST_TAGS", 3)
    clock = SetClock(seconds(FIRST))
    costs = {"ann": 50, "bob": 40, None: 30, "cyd": 20, "dan": 10, "eve": 5}
    records = [make_record(clock.new_id(), user_tag=user, cost_nanousd=cost) for user, cost in costs.items()]
    async with database.begin() as connection:
        await insert_records(connection, records, today=FIRST)

    found = await statement(database, FIRST, LAST, GroupBy.USER)

    assert [(line.groups[0], line.total.cost_nanousd, line.others) for line in found.lines] == [
        ("ann", 50, 0),
        ("bob", 40, 0),
        (None, 30, 0),
        (None, 35, 3),
    ]
    assert sum((line.total for line in found.lines), Totals()) == found.total


async def fill(database: Database, dice: Random) -> list[Entry]:
    """Book random calls of two teams, some after their day was closed, and random corrections; return team_a's."""
    entries: list[Entry] = []
    calls = [random_call(dice) for _ in range(120)]
    on_time, late = calls[:80], calls[80:]
    async with database.begin() as connection:
        for day in every_day():
            await insert_records(connection, [one for one in on_time if date_of(one.request_id) == day], today=day)
        closed = await close_days(connection, datetime(2026, 4, 1, 1, tzinfo=UTC))
    assert closed
    async with database.begin() as connection:
        await insert_records(connection, late, today=LAST)
        for _ in range(25):
            corrected = dice.choice([None, *calls])
            correction = random_correction(dice, corrected)
            await add_correction(connection, correction)
            if correction.team_id == "team_a":
                sums = Totals(
                    input_tokens=correction.input_tokens,
                    output_tokens=correction.output_tokens,
                    cost_nanousd=correction.cost_nanousd,
                    entries=1,
                )
                entries.append(
                    Entry(day=correction.day, is_late=True, sums=sums, record=corrected, correction=correction)
                )
    for call in calls:
        if call.team_id == "team_a":
            is_late = call in late and date_of(call.request_id) in closed
            entries.append(Entry(day=date_of(call.request_id), is_late=is_late, sums=sums_of_call(call), record=call))
    return entries


def random_call(dice: Random) -> UsageRecord:
    status = dice.choice(list(Status))
    clock = SetClock(seconds(dice.choice(every_day())) + dice.random() * (DAY - 1))
    return make_record(
        clock.new_id(),
        team_id=dice.choice(["team_a", "team_a", "team_b"]),
        key_id=dice.choice(["key_1", "key_2"]),
        model_used=dice.choice(["small", "large", "=1+1"]),
        tier=dice.choice(["interactive", "batch"]),
        status=status,
        input_tokens=dice.randrange(1000),
        cached_input_tokens=dice.randrange(10),
        output_tokens=dice.randrange(100),
        cost_nanousd=dice.randrange(10**9) if status in CHARGED else 0,
        gpu_cost_nanousd=dice.randrange(10**6),
        user_tag=dice.choice([None, "", "ann", "bob"]),
        metadata=dice.choice([None, {}, {"project": "x"}, {"project": "y", "stage": "test"}, {"stage": ""}]),
    )


def random_correction(dice: Random, call: UsageRecord | None) -> Correction:
    amounts = {
        "input_tokens": dice.randint(-500, 500),
        "output_tokens": dice.randint(-50, 50),
        "cost_nanousd": dice.randint(-(10**9), 10**9),
    }
    booked = datetime(2026, 4, 3, 12, tzinfo=UTC)
    who = {"reason": "a test", "actor": "tests", "booked_on": LAST, "created_at": booked}
    identity = UUID(int=dice.getrandbits(128))
    if call is None:
        key = dice.choice([None, "key_1"])
        model = dice.choice([None, "small"])
        return Correction(
            id=identity,
            team_id="team_a",
            day=dice.choice(every_day()),
            key_id=key,
            model_used=model,
            **amounts,
            **who,
        )
    return Correction(
        id=identity,
        team_id=call.team_id,
        day=date_of(call.request_id),
        key_id=call.key_id,
        model_used=call.model_used,
        tier=call.tier,
        request_id=UUID(call.request_id),
        **amounts,
        **who,
    )


def sums_of_call(call: UsageRecord) -> Totals:
    charged = call.status in CHARGED
    return Totals(
        requests=int(call.status in REQUESTS),
        blocked=int(call.status is Status.BLOCKED),
        failed=int(call.status is Status.FAILED),
        input_tokens=call.input_tokens * charged,
        cached_input_tokens=call.cached_input_tokens * charged,
        output_tokens=call.output_tokens * charged,
        cost_nanousd=call.cost_nanousd,
        gpu_cost_nanousd=call.gpu_cost_nanousd,
    )


def by_hand(entries: list[Entry], group_by: tuple[Group, ...]) -> dict[tuple[str | None, ...], tuple[Totals, Totals]]:
    """Return each group's sums, booked and late, by a loop over the entries."""
    found: dict[tuple[str | None, ...], tuple[Totals, Totals]] = defaultdict(lambda: (Totals(), Totals()))
    for entry in entries:
        names = tuple(NAMES[group](entry) if group in NAMES else tag_of(entry, str(group)) for group in group_by)
        total, late = found[names]
        found[names] = (total, late + entry.sums) if entry.is_late else (total + entry.sums, late)
    return dict(found)


def booked(entry: Entry, name: str) -> str | None:
    """Return a column of what was booked: the correction's own, or the call's."""
    return getattr(entry.correction or entry.record, name)  # type: ignore[no-any-return]


NAMES: dict[object, Callable[[Entry], str | None]] = {
    GroupBy.DAY: lambda entry: str(entry.day),
    GroupBy.MONTH: lambda entry: str(entry.day)[:7],
    GroupBy.MODEL: lambda entry: booked(entry, "model_used"),
    GroupBy.KEY: lambda entry: booked(entry, "key_id"),
    GroupBy.TIER: lambda entry: booked(entry, "tier"),
    GroupBy.USER: lambda entry: entry.record.user_tag if entry.record else None,
}


def tag_of(entry: Entry, group: str) -> str | None:
    return ((entry.record.metadata if entry.record else None) or {}).get(group.removeprefix("metadata:"))


def added(entries: list[Entry], *, is_late: bool) -> Totals:
    return sum((entry.sums for entry in entries if entry.is_late == is_late), Totals())


def every_day() -> list[date]:
    return [FIRST + timedelta(days=number) for number in range((LAST - FIRST).days + 1)]


def seconds(day: date) -> float:
    return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()


async def statement(
    database: Database, first: date, last: date, *group_by: Group, team_id: str | None = "team_a"
) -> Statement:
    async with database.begin() as connection:
        return await period(connection, team_id, first, last, *group_by)
