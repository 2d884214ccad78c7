# Limits of a team for each of its end users and for values of its tags, in the leases: no cap passed however many
# processes draw, scopes made by the calls that name them and no more than so many, swept when idle; the audit agrees.

from __future__ import annotations

import asyncio
from datetime import timedelta
from decimal import Decimal
from typing import Any, cast

import pytest
from sqlalchemy import text

from billing.core.errors import refusal_error
from billing.core.holds import HoldRequest, Leg, LimitName, RefusedHold
from billing.core.records import UsageRecord
from billing.ledger.ledger import insert_records
from billing.quotas import lease_store
from billing.quotas.lease_store import PostgresLeases
from billing.quotas.leases import Leases
from billing.upkeep.audit import audit
from billing.upkeep.sweep import close_days, delete_idle_values, fold_leases
from gateway.accounts.schemas import ModelLimitsInput, NewTeam, TeamPatch
from gateway.accounts.teams import create_team, update_team
from gateway.calls.call import Call, scopes_of, value_scopes_of
from gateway.core.clock import Clock
from gateway.core.principals import Caller, Team
from gateway.storage.audit_log import Act
from gateway.storage.database import Database
from protocol.chat import ChatRequest, Message
from router.catalog.routing_options import RoutingOptions
from tests.support.clock import SetClock
from tests.support.factories import make_record

ACT = Act("test")
COST = 1_000_000  # nano-dollars of a call
OF_A_CENT = ModelLimitsInput(usd_per_day=Decimal("0.01"))  # ten calls


class Deployment:
    """A team, and processes that hold its calls."""

    def __init__(self, database: Database) -> None:
        self.database, self.clock = database, Clock()
        self.team = Team(id="team_a", name="")

    async def limit(self, **patch: Any) -> None:
        """Change the team, as the administration does."""
        async with self.database.begin() as connection:
            self.team = (await update_team(connection, "team_a", TeamPatch(**patch), ACT)).team

    async def process(self, name: str) -> Leases:
        """Start one."""
        store = PostgresLeases(self.database, self.clock)
        await store.begin(name, "")
        leases = Leases(store, self.clock, name, share=0.25)
        leases.living = 2
        return leases

    def ask(self, user: str | None = None, **metadata: str) -> HoldRequest:
        """Return the request of a call."""
        request = ChatRequest(model="m", messages=(Message("user", "hello"),), user=user, metadata=metadata or None)
        call = Call(
            request_id=self.clock.new_id(), caller=Caller(team=self.team, key_id="key_a"), endpoint="chat.completions",
            request=request, routing=RoutingOptions(), created_at=0.0, started=0.0,
        )  # fmt: skip
        return HoldRequest(
            request_id=call.request_id,
            team_id="team_a",
            scopes=scopes_of(call.caller) + value_scopes_of(call),
            legs=(Leg("m", COST // 1_000, COST, "m"),),
        )

    async def hold(self, leases: Leases, request: HoldRequest) -> RefusedHold | None:
        """Hold a call, or hear why not."""
        return None if leases.try_hold(request) else await leases.hold(request)

    async def book(self, leases: Leases, *requests: HoldRequest) -> None:
        """End calls, and write their rows into the ledger."""
        async with self.database.begin() as connection:
            rows = [self.row(leases, request) for request in requests]
            await insert_records(connection, rows, today=self.clock.today())

    def row(self, leases: Leases, request: HoldRequest) -> UsageRecord:
        """End a call; return its row."""
        leases.settle(request.request_id, COST // 1_000, COST)
        held = tuple(scope.name for scope in request.scopes[2:]) or None
        return make_record(
            request.request_id, owner=leases.owner, input_tokens=COST // 1_000, output_tokens=0, cached_input_tokens=0,
            cost_nanousd=COST, held_scopes=held,
        )  # fmt: skip

    async def scopes(self, table: str = "balances") -> dict[str, int]:
        """Return how many rows of end users and tags there are, by scope."""
        query = f"SELECT scope, count(*) FROM {table} WHERE scope ~ '^(user|tag)' GROUP BY scope"
        async with self.database.begin() as connection:
            return {row[0]: row[1] for row in await connection.execute(text(query))}

    async def differences(self) -> list[object]:
        """Compare the books."""
        return list((await audit(self.database, self.clock.today())).differences)


@pytest.fixture
async def deployment(database: Database) -> Deployment:
    """The team, without limits."""
    async with database.begin() as connection:
        await create_team(connection, NewTeam(id="team_a"), ACT)
    return Deployment(database)


async def test_processes_that_draw_at_once_pass_no_limit_of_an_end_user_or_a_tag(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes let ten calls of each end user through, twenty of the one with its own limit, and of the tag as
    many as it may; others all go. No name stands in a scope, and the audit agrees."""
    for bound in ("draws.ASK_WITHIN", "draws.GIVE_UP_AFTER", "callers.ROOM_IS_THERE", "callers.WAIT_FOR_ROOM"):
        monkeypatch.setattr(f"billing.quotas.{bound}", 60.0)  # else load refuses what has room
    await deployment.limit(
        user_limits={"*": OF_A_CENT, "ann@example.com": ModelLimitsInput(usd_per_day=Decimal("0.02"))},
        tag_limits={"agent=research": ModelLimitsInput(usd_per_month=Decimal("0.015"))},
    )
    processes = [await deployment.process(name) for name in ("host:1", "host:2")]
    asked = [(leases, deployment.ask(user)) for leases in processes for user in ("ann@example.com", "bob") * 15]
    refused = await asyncio.gather(*(deployment.hold(*one) for one in asked))
    held = [one for one, why in zip(asked, refused, strict=True) if why is None]
    by_scope = [request.scopes[2].name for _, request in held]
    for leases in processes:
        await deployment.book(leases, *(request for owner, request in held if owner is leases))

    assert sorted(by_scope.count(scope) for scope in set(by_scope)) == [10, 20]
    assert {scope.partition(":")[0] for scope in by_scope} == {"user"} and not any("ann" in one for one in by_scope)
    told = [refusal_error(why) for why in refused if why is not None]
    assert {error.limit for error in told} == {"user.usd_per_day"}
    assert "team team_a for this end user" in told[0].message

    tagged = [(leases, deployment.ask(f"u{n}", agent="research")) for leases in processes for n in range(10)]
    refused = await asyncio.gather(*(deployment.hold(*one) for one in tagged))
    other = await deployment.hold(processes[0], deployment.ask("carl", agent="support"))
    for leases in processes:
        done = [one for (owner, one), why in zip(tagged, refused, strict=True) if owner is leases and why is None]
        await deployment.book(leases, *done)
    assert (refused.count(None), other) == (15, None)
    assert {why.limit.value for why in refused if why is not None} == {"usd_per_month"}
    assert await deployment.differences() == []
    why = await deployment.hold(processes[0], deployment.ask("bob"))
    assert why is not None and why.is_settled
    error = refusal_error(why)
    assert (error.status, error.code) == (429, "insufficient_quota") and "at 00:00 UTC" in error.message

    await deployment.limit(user_limits={"*": ModelLimitsInput(usd_per_day=Decimal("0.02"))})  # open again, at once
    assert await deployment.hold(processes[0], deployment.ask("bob")) is None
    assert await deployment.differences() == []
    async with deployment.database.begin() as connection:
        await connection.execute(text("UPDATE leases SET spent = spent - 1 WHERE scope LIKE 'user:%' AND spent > 0"))
    assert await deployment.differences() != []


async def test_no_more_scopes_are_made_than_a_team_may_have(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fifty made-up end users the first twenty are counted; the others hear so, and leave nothing behind, be it that
    they leave before they hear it."""
    monkeypatch.setattr(lease_store, "MOST_VALUES", 20)
    await deployment.limit(user_limits={"*": OF_A_CENT})
    first, second = [await deployment.process(name) for name in ("host:1", "host:2")]
    refused = [await deployment.hold(first, deployment.ask(f"u{n}")) for n in range(50)]
    again = [await deployment.hold(leases, deployment.ask("u7")) for leases in (first, second)]
    other = await asyncio.gather(*(deployment.hold(second, deployment.ask(f"v{n}")) for n in range(5)))
    for turns in (1, 3):  # before they are asked for, and while they are
        leaving = [asyncio.create_task(deployment.hold(first, deployment.ask(f"w{turns}{n}"))) for n in range(15)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for one in leaving:
            one.cancel()
        await asyncio.wait(leaving)
        await deployment.hold(first, deployment.ask("last"))

    assert [why.limit for why in refused[20:] if why is not None] == [LimitName.SCOPES_PER_DAY] * 30
    assert refused[:20] == [None] * 20 and again == [None, None] and None not in other
    assert len(await deployment.scopes()) == 20 and len(await deployment.scopes("leases")) == 20
    kept = [scope for leases in (first, second) for rooms in leases.rooms.by_day.values() for scope in rooms]
    assert len([scope for scope in kept if scope.startswith("user:")]) == 21
    error = refusal_error(cast(RefusedHold, refused[-1]))
    assert error.code == "insufficient_quota" and "others again at 00:00 UTC" in error.message


async def test_a_call_without_an_end_user_is_refused_or_shares_one_limit(deployment: Deployment) -> None:
    """As the team says; where only named end users have limits it has none."""
    await deployment.limit(user_limits={"*": OF_A_CENT})
    with pytest.raises(Exception, match="say in 'user' for whom the call is"):
        deployment.ask()
    await deployment.limit(calls_without_user="count")
    common, ann = deployment.ask(), deployment.ask("ann")
    await deployment.limit(user_limits={"*": None, "ann": OF_A_CENT})

    assert (common.scopes[2].kind, common.scopes[2] == deployment.ask(None).scopes[1:2]) == ("user", False)
    assert common.scopes[2].name != ann.scopes[2].name
    assert len(deployment.ask().scopes) == 2 and len(deployment.ask("ann").scopes) == 3
    assert "ann" not in repr(deployment.team.hash_of("ann")) and deployment.team.hash_key


async def test_idle_scopes_are_swept_and_those_that_a_month_counts_are_not(deployment: Deployment) -> None:
    """After two days the leases and the days of a scope without a limit of a month go; the books agree throughout."""
    month = ModelLimitsInput(usd_per_month=Decimal(1))
    await deployment.limit(user_limits={"*": OF_A_CENT}, tag_limits={"agent=*": month})
    leases = await deployment.process("host:1")
    request = deployment.ask("ann", agent="research")
    assert await deployment.hold(leases, request) is None
    await deployment.book(leases, request)
    leases.leave()
    await leases.returns.tell()
    await leases.store.end("host:1")
    user, tag = request.scopes[2].name, request.scopes[3].name
    before, now = await deployment.scopes(), deployment.clock.moment()
    clock = SetClock((now + timedelta(days=3)).timestamp())
    async with deployment.database.begin() as connection:
        await close_days(connection, clock.moment())
    async with deployment.database.begin() as connection:
        assert await fold_leases(connection, clock.moment())
        assert await delete_idle_values(connection, now) == 0
        assert await delete_idle_values(connection, clock.moment()) == 4

    assert before == {user: 3, tag: 3}
    assert await deployment.scopes() == {user: 1, tag: 3} and (await deployment.scopes("leases")) == {tag: 2}
    report = await audit(deployment.database, now.date(), today=clock.today())
    assert report.differences == []
