# Corrections, on a real Postgres: who may say what, what the books say afterwards, and that nothing is ever edited.

from __future__ import annotations

import asyncio
from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text

from billing.core.money import to_nano
from billing.ledger.corrections import list_corrections
from billing.ledger.ledger import insert_records
from billing.ledger.statements import GroupBy, Tag, Totals, period
from billing.upkeep.sweep import close_days
from gateway.accounts.schemas import NewKey, NewTeam
from gateway.accounts.team_keys import create_key
from gateway.accounts.teams import create_team
from gateway.core.errors import Conflict
from gateway.reports.corrections import NewCorrection, book_correction, correction_view
from gateway.storage.audit_log import Act, list_acts
from gateway.storage.database import Database
from protocol.errors import BadRequest, NotFound, ServiceError
from tests.support.clock import NOON, SetClock
from tests.support.factories import make_record

TODAY = date(2026, 4, 5)
ACT = Act("admin:abcd", "request-1")
ID = "0196090a-7c00-7000-8000-000000000001"
MODELS = {"gpt-4o", "llama-3-70b"}


@pytest.fixture
async def books(database: Database) -> Database:
    """A team with a key and one call that day, and another team."""
    async with database.begin() as connection:
        await create_team(connection, NewTeam(id="team_a"), ACT)
        await create_team(connection, NewTeam(id="team_b"), ACT)
    return database


async def book(database: Database, clock: SetClock | None = None, **said: Any) -> dict[str, Any]:
    """Book a correction of a dollar's refund, or what is said instead, and return it as admins see it."""
    usual = {"team_id": "team_a", "date": "2026-04-05", "cost_usd": Decimal("-1"), "reason": "double charge"}
    new = NewCorrection(**(usual | said))
    async with database.begin() as connection:
        booked = await book_correction(connection, new, ACT, clock or SetClock(), MODELS)
    return correction_view(booked)


async def call(database: Database, **fields: Any) -> str:
    """Write one call into the ledger and return its id."""
    record = make_record(SetClock().new_id(), **fields)
    async with database.begin() as connection:
        await insert_records(connection, [record], today=TODAY)
    return record.request_id


async def test_a_correction_says_who_why_and_when(books: Database) -> None:
    """The entry and the audit log agree on who booked what."""
    shown = await book(books, input_tokens=-5, model="gpt-4o")

    assert (shown["who"], shown["reason"]) == ("admin:abcd", "double charge")
    assert (shown["date"], shown["booked_on"], shown["created_at"]) == (
        "2026-04-05",
        "2026-04-05",
        "2026-04-05T12:00:00Z",
    )
    assert (str(shown["cost_usd"]), shown["input_tokens"], shown["model"]) == ("-1.00", -5, "gpt-4o")
    async with books.begin() as connection:
        [act] = await list_acts(connection, action="correction.booked")
    assert (act.actor, act.team_id, act.subject, act.request_id) == ("admin:abcd", "team_a", shown["id"], "request-1")
    assert act.details["reason"] == "double charge"


async def test_statements_show_corrections_apart(books: Database) -> None:
    """Whether the day is closed or not, its total stays as it was and the corrections stand beside it."""
    await call(books, cost_nanousd=to_nano(3), input_tokens=100, output_tokens=20)
    await book(books, cost_usd=Decimal("-0.5"), input_tokens=-10)
    async with books.begin() as connection:
        open_day = await period(connection, "team_a", TODAY, TODAY)
        await close_days(connection, SetClock(NOON + 86_400).moment())
    await book(books, SetClock(NOON + 86_400), cost_usd=Decimal("0.25"), output_tokens=7)

    async with books.begin() as connection:
        closed_day = await period(connection, "team_a", TODAY, TODAY)

    assert open_day.total == closed_day.total
    assert open_day.total.cost_nanousd == to_nano(3)
    assert open_day.corrections == Totals(cost_nanousd=-to_nano("0.5"), input_tokens=-10, entries=1)
    assert closed_day.corrections == Totals(cost_nanousd=-to_nano("0.25"), input_tokens=-10, output_tokens=7, entries=2)


async def test_corrections_that_cancel_out_are_still_shown(books: Database) -> None:
    """An error is corrected by another entry, and finance sees that there are two."""
    await book(books, cost_usd=Decimal("5"))
    await book(books, cost_usd=Decimal("-5"))

    async with books.begin() as connection:
        statement = await period(connection, "team_a", TODAY, TODAY)

    assert statement.corrections == Totals(entries=2)


async def test_a_correction_of_a_call_is_booked_under_what_the_call_says(books: Database) -> None:
    """Team, day, key, model, tier, user and tags are those of the ledger's row, whatever else is left out."""
    request_id = await call(
        books, key_id="key_a", model_used="llama-3-70b", tier="batch", user_tag="ann", metadata={"project": "x"}
    )
    shown = await book(books, team_id=None, date=None, request_id=request_id.upper())

    groups = (GroupBy.MODEL, GroupBy.KEY, GroupBy.TIER, GroupBy.USER, Tag("project"))
    lines = {}
    for group in groups:
        async with books.begin() as connection:
            statement = await period(connection, "team_a", TODAY, TODAY, group)
        lines[str(group)] = [line.groups[0] for line in statement.lines if line.corrections.entries]

    assert (shown["team_id"], shown["date"], shown["request_id"]) == ("team_a", "2026-04-05", request_id)
    assert lines == {
        "model": ["llama-3-70b"],
        "key": ["key_a"],
        "tier": ["batch"],
        "user": ["ann"],
        "metadata:project": ["x"],
    }


async def test_what_is_said_of_a_call_must_agree_with_it(books: Database) -> None:
    """A request id beside another team, day, model or key is a mistake, and none of it is booked."""
    request_id = await call(books, key_id="key_a")
    wrong = {"team_id": "team_b", "date": "2026-04-04", "model": "llama-3-70b", "key_id": "key_b"}

    for name, value in wrong.items():
        with pytest.raises(BadRequest) as refusal:
            await book(books, **{"request_id": request_id, name: value})
        assert refusal.value.param == name

    async with books.begin() as connection:
        assert await list_corrections(connection) == []


async def test_the_same_id_books_once(books: Database) -> None:
    """A repetition hears what was booked the first time, also a day later; another content is a conflict."""
    first = await book(books, id=ID)
    again = await book(books, SetClock(NOON + 86_400), id=ID)

    assert again == first
    for other in ({"cost_usd": Decimal("-2")}, {"reason": "other"}, {"team_id": "team_b"}, {"input_tokens": 1}):
        with pytest.raises(Conflict) as refusal:
            await book(books, **{"id": ID, **other})
        assert (refusal.value.param, refusal.value.code) == ("id", "correction_exists")
    async with books.begin() as connection:
        assert len(await list_corrections(connection)) == 1
        assert len(await list_acts(connection, action="correction.booked")) == 1


async def test_repetitions_at_the_same_moment_book_once(books: Database) -> None:
    """Whoever comes second waits for the first and hears of its entry."""
    shown = await asyncio.gather(*(book(books, id=ID) for _ in range(8)))

    assert all(one == shown[0] for one in shown)
    async with books.begin() as connection:
        assert len(await list_corrections(connection)) == 1
        assert len(await list_acts(connection, action="correction.booked")) == 1


async def test_a_refused_correction_leaves_no_trace(books: Database) -> None:
    """Entry and audit log are one transaction: when it fails, neither is there."""
    with pytest.raises(ZeroDivisionError):
        async with books.begin() as connection:
            new = NewCorrection(team_id="team_a", date="2026-04-05", cost_usd=Decimal("1"), reason="x")
            await book_correction(connection, new, ACT, SetClock(), MODELS)
            raise ZeroDivisionError

    async with books.begin() as connection:
        assert await list_corrections(connection) == []
        assert await list_acts(connection, action="correction.booked") == []


@pytest.mark.parametrize(
    ("said", "error", "param"),
    [
        ({"cost_usd": Decimal("0")}, BadRequest, "cost_usd"),
        ({"cost_usd": Decimal("NaN")}, BadRequest, "cost_usd"),
        ({"cost_usd": Decimal("-Infinity")}, BadRequest, "cost_usd"),
        ({"cost_usd": Decimal("1000000.01")}, BadRequest, "cost_usd"),
        ({"cost_usd": Decimal("1e999999")}, BadRequest, "cost_usd"),
        ({"cost_usd": Decimal("0.0000000001")}, BadRequest, "cost_usd"),
        ({"cost_usd": Decimal("1e-999999")}, BadRequest, "cost_usd"),
        ({"input_tokens": 10**12 + 1}, BadRequest, "input_tokens"),
        ({"output_tokens": -(10**12) - 1}, BadRequest, "output_tokens"),
        ({"reason": ""}, BadRequest, "reason"),
        ({"reason": " \t "}, BadRequest, "reason"),
        ({"reason": "a\x00b"}, BadRequest, "reason"),
        ({"reason": "x" * 501}, BadRequest, "reason"),
        ({"date": None}, BadRequest, "date"),
        ({"date": "2026-04-06"}, BadRequest, "date"),
        ({"date": "2026-W14-7"}, BadRequest, "date"),
        ({"team_id": None}, BadRequest, "team_id"),
        ({"team_id": "nobody"}, NotFound, "team_id"),
        ({"team_id": "NOT\x00an id"}, NotFound, "team_id"),
        ({"model": "gpt-5\x00"}, BadRequest, "model"),
        ({"model": "unheard-of"}, BadRequest, "model"),
        ({"key_id": "key_0"}, NotFound, "key_id"),
        ({"id": "1"}, BadRequest, "id"),
        ({"id": "{0196090a-7c00-7000-8000-000000000001}"}, BadRequest, "id"),
        ({"request_id": "x"}, BadRequest, "request_id"),
        ({"request_id": ID}, NotFound, "request_id"),
    ],
)
async def test_a_faulty_field_is_named(
    books: Database, said: dict[str, Any], error: type[ServiceError], param: str
) -> None:
    """Every field that cannot be is refused by its name."""
    with pytest.raises(error) as refusal:
        await book(books, **said)

    assert refusal.value.param == param


async def test_key_of_another_team_is_refused(books: Database) -> None:
    """A correction names a key of the team that it is of."""
    async with books.begin() as connection:
        made = await create_key(connection, "pepper", NewKey(team_id="team_b"), ACT, NOON)

    with pytest.raises(BadRequest) as refusal:
        await book(books, key_id=made.record.key_id)
    shown = await book(books, team_id="team_b", key_id=made.record.key_id)

    assert refusal.value.param == "key_id"
    assert shown["key_id"] == made.record.key_id


async def test_a_model_that_left_the_catalogue_can_be_corrected(books: Database) -> None:
    """What the books of that day name may be corrected, whatever is offered today."""
    await call(books, model_used="retired-model")

    shown = await book(books, model="retired-model")

    assert shown["model"] == "retired-model"


async def test_balances_are_by_team_key_and_day(books: Database) -> None:
    """Each entry reaches its team and, where it names one, its key: of its day, and for money of its month."""
    async with books.begin() as connection:
        key = (await create_key(connection, "pepper", NewKey(team_id="team_a"), ACT, NOON)).record.key_id
    await book(books, cost_usd=Decimal("2"), input_tokens=3, output_tokens=4)
    await book(books, cost_usd=Decimal("-0.5"), input_tokens=-1)
    await book(books, key_id=key)
    await book(books, date="2026-04-04", output_tokens=9)
    await book(books, team_id="team_b")

    query = "SELECT scope, period, corrected FROM balances WHERE unit = :unit AND corrected <> 0 ORDER BY 1, 2"
    async with books.begin() as connection:
        money = [tuple(row) for row in await connection.execute(text(query), {"unit": "nanousd"})]
        tokens = [tuple(row) for row in await connection.execute(text(query), {"unit": "tokens"})]

    assert money == [
        (f"key:{key}", "2026-04", -to_nano(1)),
        (f"key:{key}", "2026-04-05", -to_nano(1)),
        ("team:team_a", "2026-04", to_nano("-0.5")),
        ("team:team_a", "2026-04-04", -to_nano(1)),
        ("team:team_a", "2026-04-05", to_nano("0.5")),
        ("team:team_b", "2026-04", -to_nano(1)),
        ("team:team_b", "2026-04-05", -to_nano(1)),
    ]
    assert tokens == [("team:team_a", "2026-04-04", 9), ("team:team_a", "2026-04-05", 6)]


async def test_lists_are_newest_first_and_can_be_paged(books: Database) -> None:
    """Pages follow each other without gap or repetition, also where entries share their moment."""
    ids = [(await book(books, SetClock(NOON + number // 2), cost_usd=Decimal("1")))["id"] for number in range(5)]
    seen: list[str] = []
    while True:
        async with books.begin() as connection:
            page = await list_corrections(connection, before=UUID(seen[-1]) if seen else None, limit=2)
        if not page:
            break
        seen += [str(one.id) for one in page]

    assert sorted(seen) == sorted(ids)
    assert set(seen[-2:]) == set(ids[:2])


async def test_entries_are_never_changed(books: Database) -> None:
    """There is no way to edit an entry: what was booked is there to the letter after everything else happened."""
    await book(books, id=ID)
    async with books.begin() as connection:
        before = (await connection.execute(text("SELECT * FROM corrections"))).mappings().one()
    await book(books, id=ID)
    await book(books, cost_usd=Decimal("1"))

    async with books.begin() as connection:
        after = (await connection.execute(text(f"SELECT * FROM corrections WHERE id = '{ID}'"))).mappings().one()
    assert dict(after) == dict(before)
