# The sweeper, on real servers: what the dead leave behind.

from __future__ import annotations

from datetime import date, timedelta

import pytest
from sqlalchemy import text

from billing import sweep
from billing.holds import Hold, HoldRequest, Leg, Limits, Scope, Settlement
from billing.ledger import insert_records
from billing.quota_verbs import LEASE
from billing.quotas import Quotas
from billing.records import UsageRecord
from billing.sweep import Sweeper
from gateway.database import Database
from protocol.usage import Usage
from tests.support.clock import SetClock
from tests.support.factories import make_record

TODAY = date(2026, 4, 5)
DAY = 86_400.0
NOTHING = Settlement(Usage(), 0)


@pytest.fixture
def database_url(new_database_url: str) -> str:
    """A database that nobody has prepared for any day."""
    return new_database_url


@pytest.fixture
async def sweeper(database: Database, quotas: Quotas, clock: SetClock) -> Sweeper:
    """A sweeper of a house with one team, which keeps rows for 400 days."""
    async with database.begin() as connection:
        await connection.execute(text("INSERT INTO teams (id, name) VALUES ('team_a', 'A')"))
    return Sweeper(quotas, database, clock, uses_server_time=False)


async def test_the_holds_of_the_dead_are_freed(sweeper: Sweeper, quotas: Quotas, clock: SetClock) -> None:
    """A hold that nobody renews is gone with its lease; one that is renewed stays."""
    dead, alive = await open_hold(quotas, clock), await open_hold(quotas, clock)
    clock.move(LEASE - 1)
    await quotas.renew(alive, NOTHING)
    clock.move(2)

    assert await sweeper.sweep_once() == [dead.request.request_id]
    assert await sweeper.sweep_once() == []

    assert (await quotas.usage("team_a")).day_nanousd_held == 1000


async def test_a_call_in_the_ledger_is_settled_when_its_hold_is_freed(
    sweeper: Sweeper, quotas: Quotas, clock: SetClock, database: Database
) -> None:
    """Its owner died between the flush and the settlement: the counters learn of it from the row."""
    hold = await open_hold(quotas, clock)
    async with database.begin() as connection:
        await insert_records(connection, [make_record(hold.request.request_id, cost_nanousd=700)], today=TODAY)
    clock.move(LEASE + 1)

    await sweeper.sweep_once()

    state = await quotas.usage("team_a")
    assert (state.day_nanousd, state.day_tokens, state.day_nanousd_held) == (700, 120, 0)


async def test_freed_holds_are_looked_up_again_when_the_ledger_was_away(
    sweeper: Sweeper, quotas: Quotas, clock: SetClock, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres lost between the sweep and the look-up: the next round settles what this one freed."""
    hold = await open_hold(quotas, clock)
    async with database.begin() as connection:
        await insert_records(connection, [make_record(hold.request.request_id, cost_nanousd=700)], today=TODAY)
    clock.move(LEASE + 1)

    async def lost(*_: object) -> list[UsageRecord]:
        raise OSError("connection reset")

    with monkeypatch.context() as patch:
        patch.setattr(sweep, "find_records", lost)
        with pytest.raises(OSError, match="reset"):
            await sweeper.sweep_once()
    assert await sweeper.sweep_once() == []

    state = await quotas.usage("team_a")
    assert (state.day_nanousd, state.day_nanousd_held, sweeper.freed) == (700, 0, 1)


async def test_partitions_are_made_ahead_and_dropped_when_their_time_is_over(
    sweeper: Sweeper, database: Database, clock: SetClock
) -> None:
    """A week ahead there is a partition for each day; rows past their retention go, their sums stay."""
    async with database.begin() as connection:
        await insert_records(connection, [make_record(clock.new_id())], today=TODAY)
    await sweeper.do_chores()
    assert await partitions(database) == [TODAY + timedelta(days=ahead) for ahead in range(8)]

    clock.move(401 * DAY)
    await sweeper.do_chores()

    later = TODAY + timedelta(days=401)
    expected = [TODAY + timedelta(days=ahead) for ahead in range(1, 8)]
    assert await partitions(database) == expected + [later + timedelta(days=ahead) for ahead in range(8)]
    async with database.begin() as connection:
        assert (await connection.execute(text("SELECT count(*) FROM usage_records"))).scalar_one() == 0
        assert (await connection.execute(text("SELECT sum(calls) FROM usage_daily"))).scalar_one() == 1
        closed = (await connection.execute(text("SELECT min(day), max(day) FROM closed_days"))).one()
    assert tuple(closed) == (TODAY, later - timedelta(days=1))


async def partitions(database: Database) -> list[date]:
    """Return the days that have a partition."""
    query = text("SELECT tablename FROM pg_tables WHERE tablename LIKE 'usage_records_2%' ORDER BY 1")
    async with database.begin() as connection:
        names = (await connection.execute(query)).scalars().all()
    return [date.fromisoformat(name.removeprefix("usage_records_")) for name in names]


async def open_hold(quotas: Quotas, clock: SetClock) -> Hold:
    """Hold a thousand nano-dollars for team_a."""
    hold = await quotas.open(
        HoldRequest(
            request_id=clock.new_id(),
            team_id="team_a",
            scopes=(Scope("team", "team_a", Limits()), Scope("key", "key_a", Limits())),
            legs=(Leg("a", 100, 1000),),
            valid_until=clock.now() + 5,
        )
    )
    assert isinstance(hold, Hold)
    return hold
