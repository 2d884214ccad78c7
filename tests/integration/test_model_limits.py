# Limits of a team for one model, in the leases: no cap passed however many draw, the other models untouched, what was
# used before a limit is set and while it is set, and an audit that agrees throughout.

from __future__ import annotations

import asyncio
from decimal import Decimal
from uuid import UUID

import pytest
from sqlalchemy import text

from billing.core.holds import HoldRequest, Leg, Limits, RefusedHold
from billing.core.records import CHARGED, UsageRecord
from billing.ledger.corrections import Correction, add_correction
from billing.ledger.ledger import insert_records, write_records
from billing.quotas.lease_store import PostgresLeases
from billing.quotas.leases import Leases
from billing.upkeep.audit import audit
from billing.upkeep.auditor import heal_balance
from gateway.accounts.schemas import ModelLimitsInput, NewTeam, TeamPatch
from gateway.accounts.teams import create_team, update_team
from gateway.calls.call import scopes_of
from gateway.core.clock import Clock
from gateway.core.principals import Caller, Team
from gateway.storage.audit_log import Act
from gateway.storage.database import Database
from tests.support.factories import make_record
from tests.support.waiting import until_found

ACT = Act("test")
COST = 1_000_000  # nano-dollars of a call
WAITING = text("""
    SELECT EXISTS (
        SELECT FROM pg_locks JOIN pg_database ON pg_database.oid = database
        WHERE locktype = 'advisory' AND NOT granted AND datname = current_database()
    )
""")


class House:
    """A team, and processes that hold its calls to "dear", or to "plain" where that one fails."""

    def __init__(self, database: Database) -> None:
        self.database, self.clock = database, Clock()
        self.team = Team(id="team_a", name="")

    async def begin(self) -> House:
        """Make the team."""
        async with self.database.begin() as connection:
            await create_team(connection, NewTeam(id="team_a"), ACT)
        return self

    async def limit(self, model: str = "dear", **limits: Decimal | int | None) -> None:
        """Set limits for a model, as the administration does."""
        patch = TeamPatch(model_limits={model: ModelLimitsInput(**limits)})  # type: ignore[arg-type]
        async with self.database.begin() as connection:
            self.team = (await update_team(connection, "team_a", patch, ACT)).team

    async def process(self, name: str) -> Leases:
        """Start one."""
        store = PostgresLeases(self.database, self.clock)
        await store.begin(name, "")
        leases = Leases(store, self.clock, name, share=0.25)
        leases.living = 2
        return leases

    def ask(self, *legs: tuple[str, int]) -> HoldRequest:
        """Return the request of a call that may go to these models, at these costs."""
        along = tuple(Leg(model, cost // 1_000, cost, model) for model, cost in legs or (("dear", COST),))
        scopes = scopes_of(Caller(team=self.team, key_id="key_a"), along)
        return HoldRequest(request_id=self.clock.new_id(), team_id="team_a", scopes=scopes, legs=along)

    async def hold(self, leases: Leases, request: HoldRequest) -> RefusedHold | None:
        """Hold a call, or hear why not."""
        return None if leases.try_hold(request) else await leases.hold(request)

    async def held(self, leases: Leases) -> HoldRequest:
        """Hold a call that must have room."""
        request = self.ask()
        assert await self.hold(leases, request) is None
        return request

    def row(self, leases: Leases, request: HoldRequest, model: str = "dear", cost: int = COST) -> UsageRecord:
        """End a call at a model; return its row."""
        leases.settle(request.request_id, cost // 1_000, cost, model)
        held = tuple(scope.model for scope in request.scopes if scope.model) or None
        return make_record(
            request.request_id, owner=leases.owner, model_used=model, input_tokens=cost // 1_000, output_tokens=0,
            cached_input_tokens=0, cost_nanousd=cost, held_models=held,
        )  # fmt: skip

    async def book(self, *rows: UsageRecord) -> None:
        """Write rows into the ledger."""
        async with self.database.begin() as connection:
            await insert_records(connection, rows, today=self.clock.today())

    async def figures(self, scope: str = "model:team_a/dear", unit: str = "nanousd") -> tuple[int, int, int | None]:
        """Return what is drawn and spent of a scope's day, and its cap."""
        query = text("""
            SELECT drawn + corrected, (SELECT coalesce(sum(spent), 0) FROM leases
                          WHERE scope = :scope AND unit = :unit AND to_char(day, 'YYYY-MM-DD') = period), cap
            FROM balances WHERE scope = :scope AND unit = :unit AND period = :day
        """)
        values = {"scope": scope, "unit": unit, "day": f"{self.clock.today()}"}
        async with self.database.begin() as connection:
            drawn, spent, cap = (await connection.execute(query, values)).one()
            return int(drawn), int(spent), cap

    async def differences(self) -> list[object]:
        """Compare the books."""
        return list((await audit(self.database, self.clock.today())).differences)


@pytest.fixture
async def house(database: Database) -> House:
    """The team, without limits."""
    return await House(database).begin()


async def test_processes_that_draw_at_once_pass_no_limit_of_a_model(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of forty calls from two processes a limit for ten lets ten through; those to another model all go."""
    for bound in ("draws.ASK_WITHIN", "draws.GIVE_UP_AFTER", "callers.ROOM_IS_THERE", "callers.WAIT_FOR_ROOM"):
        monkeypatch.setattr(f"billing.quotas.{bound}", 60.0)  # else load refuses what has room
    await house.limit(usd_per_day=Decimal("0.01"), usd_per_month=Decimal(1))
    processes = [await house.process(name) for name in ("host:1", "host:2")]
    requests = [(leases, house.ask()) for leases in processes for _ in range(20)]

    refused = await asyncio.gather(*(house.hold(leases, request) for leases, request in requests))
    others = [await house.hold(leases, house.ask(("plain", COST))) for leases in processes for _ in range(20)]

    held = [pair for pair, why in zip(requests, refused, strict=True) if why is None]
    assert len(held) == 10 and not any(others)
    assert {(why.scope.name, why.limit.value, why.cap) for why in refused if why is not None} == {
        ("model:team_a/dear", "usd_per_day", 10 * COST)
    }
    assert await house.figures() == (10 * COST, 0, 10 * COST)
    await house.book(*(house.row(leases, request) for leases, request in held))
    assert await house.figures() == (10 * COST, 10 * COST, 10 * COST)
    assert await house.differences() == []


async def test_a_hold_covers_each_limited_model_by_its_own_legs_and_spends_the_one_that_answered(house: House) -> None:
    """A call to a dear model with a cheap one behind it holds the cheap one's price of the cheap one's limit."""
    await house.limit(usd_per_day=Decimal(1))
    await house.limit("cheap", usd_per_day=Decimal("0.0001"))  # a tenth of what the dear one costs
    leases = await house.process("host:1")
    request = house.ask(("dear", COST), ("cheap", COST // 10))

    assert await house.hold(leases, request) is None
    row = house.row(leases, request, "cheap", COST // 20)
    await house.book(row)
    leases.return_idle()
    await leases.returns.tell()

    assert (await house.figures("model:team_a/cheap"))[:2] == (COST // 20, COST // 20)
    assert (await house.figures("model:team_a/dear"))[:2] == (0, 0)
    assert (await house.figures("team:team_a"))[:2] == (COST // 20, COST // 20)
    assert leases.holding.exceeded == 0 and await house.differences() == []
    why = await house.hold(leases, house.ask(("dear", COST), ("cheap", COST // 10)))
    assert why is not None and (why.scope.model, why.wanted, why.used) == ("cheap", COST // 10, COST // 20)


async def test_a_limit_set_at_noon_knows_the_morning(house: House) -> None:
    """Rows and corrections of the model from before count, of other models they do not; taken away and set again, what
    was used in between counts, too. The audit agrees at each step, and heals what is wrong."""
    leases = await house.process("host:1")
    early = [await house.held(leases) for _ in range(3)]
    await house.book(*(house.row(leases, request) for request in early[:2]), house.row(leases, early[2], "plain"))
    moment = house.clock.moment()
    entry = Correction(
        id=UUID(house.clock.new_id()), team_id="team_a", day=moment.date(), model_used="dear", cost_nanousd=-COST // 2,
        reason="goodwill", actor="test", booked_on=moment.date(), created_at=moment,
    )  # fmt: skip
    async with house.database.begin() as connection:
        assert await add_correction(connection, entry) is None
        assert not (await connection.execute(text("SELECT 1 FROM leases WHERE scope LIKE 'model:%'"))).all()

    await house.limit(usd_per_day=Decimal("0.003"))

    assert await house.figures() == (2 * COST - COST // 2, 2 * COST, 3 * COST)
    assert await house.figures(unit="tokens") == (2_000, 2_000, None)
    assert await house.differences() == []
    last = await house.held(leases)
    assert (await house.hold(leases, house.ask())) is not None
    await house.book(house.row(leases, last))

    await house.limit(usd_per_day=None)
    free = await house.held(leases)
    await house.book(house.row(leases, free))
    async with house.database.begin() as connection:
        again = Correction(**{name: getattr(entry, name) for name in entry.__struct_fields__} | {"id": UUID(int=7)})
        assert await add_correction(connection, again) is None
        assert await heal_balance(connection, "model:team_a/dear", "nanousd", f"{moment:%Y-%m}") is None
    await house.limit(usd_per_day=Decimal("0.004"))
    leases.return_idle()
    await leases.returns.tell()
    assert (await house.figures())[:2] == (3 * COST, 4 * COST)
    assert await house.differences() == []
    async with house.database.begin() as connection:
        await connection.execute(text("UPDATE balances SET corrected = 0 WHERE scope LIKE 'model:%'"))
        assert await heal_balance(connection, "model:team_a/dear", "nanousd", f"{moment:%Y-%m-%d}") is not None


async def test_a_call_that_ran_while_its_limit_was_set_gives_its_process_no_room(house: House) -> None:
    """Its row counts against the limit, on a lease of no owner: its process held nothing there that it could use."""
    leases = await house.process("host:1")
    running = await house.held(leases)
    await house.limit(usd_per_day=Decimal("0.002"))
    first = await house.held(leases)
    await house.book(house.row(leases, running))
    leases.return_idle()
    await leases.returns.tell()

    assert (await house.figures())[:2] == (2 * COST, COST)
    assert await house.hold(leases, house.ask()) is not None
    await house.book(house.row(leases, first))
    assert (await house.figures())[:2] == (2 * COST, 2 * COST) and await house.differences() == []


@pytest.mark.parametrize("is_first", [True, False], ids=["row first", "limit first"])
async def test_a_row_on_its_way_while_a_limit_is_set_is_counted_once(house: House, is_first: bool) -> None:
    """Whichever of the two transactions is there first, the other one waits for it and sees what it did."""
    leases = await house.process("host:1")
    running = await house.held(leases)
    row, today = house.row(leases, running), house.clock.today()

    async def waits() -> bool:
        async with house.database.begin() as connection:
            return bool((await connection.execute(WAITING)).scalar_one())

    if is_first:
        async with house.database.begin() as connection:
            await write_records(connection, [row], today=today)
            other = asyncio.create_task(house.limit(usd_per_day=Decimal(1)))
            await until_found(waits)
    else:
        patch = TeamPatch(model_limits={"dear": ModelLimitsInput(usd_per_day=Decimal(1))})
        async with house.database.begin() as connection:
            await update_team(connection, "team_a", patch, ACT)
            other = asyncio.create_task(house.book(row))
            await until_found(waits)
    await other

    assert await house.figures() == (COST, COST, 1000 * COST)
    assert row.status in CHARGED and await house.differences() == []


async def test_a_row_that_is_stored_with_its_answer_does_not_lock_up_with_a_limit(house: House) -> None:
    """An answer that refers to its team is stored first, its row in the same transaction: a limit is set in between."""
    leases = await house.process("host:1")
    row = house.row(leases, await house.held(leases))
    async with house.database.begin() as connection:
        await connection.execute(text("SELECT FROM teams WHERE id = 'team_a' FOR KEY SHARE"))
        await house.limit(usd_per_day=Decimal(1))
        await write_records(connection, [row], today=house.clock.today())

    assert await house.figures() == (COST, COST, 1000 * COST) and await house.differences() == []


async def test_limits_for_models_that_no_call_has_touched_are_free(house: House) -> None:
    """A call to another model draws and books its team's and its key's rooms, and no other."""
    await house.limit(usd_per_day=Decimal(1))
    leases = await house.process("host:1")
    request = house.ask(("plain", COST))
    assert [scope.kind for scope in request.scopes] == ["team", "key"] and await house.hold(leases, request) is None
    await house.book(house.row(leases, request, "plain"))
    async with house.database.begin() as connection:
        scopes = (await connection.execute(text("SELECT DISTINCT scope FROM leases ORDER BY scope"))).scalars().all()

    assert scopes == ["key:key_a", "team:team_a"] and Limits() == house.team.limits
