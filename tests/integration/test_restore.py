# The counters after Redis lost something: rebuilt from the statements and from what every owner knows, to the unit.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis
from sqlalchemy import text

from billing.holds import Hold, Limits
from gateway.database import Database
from tests.support.owners import Owner, open_owner

TEAM = "team_a"
UNLIMITED = Limits()


@pytest.fixture
async def teams(database: Database, redis: Redis) -> None:
    """A house with one team, on an empty Redis."""
    async with database.begin() as connection:
        await connection.execute(text("INSERT INTO teams (id, name) VALUES ('team_a', 'A')"))


@pytest.fixture
async def owner_of(
    teams: None, database: Database, redis_url: str, tmp_path: Path
) -> AsyncIterator[Callable[[str], Awaitable[Owner]]]:
    """Start owners; all end with the test."""
    owners: list[Owner] = []

    async def start(name: str) -> Owner:
        owner = await open_owner(tmp_path / name, database, redis_url)
        owners.append(owner)
        return owner

    yield start
    for owner in owners:
        await owner.stop()


async def test_an_empty_redis_is_filled_before_the_first_call(owner_of: Callable[[str], Awaitable[Owner]]) -> None:
    """A fresh house counts in Redis at once."""
    owner = await owner_of("a")

    hold = await owner.quotas.open(owner.ask())

    assert isinstance(hold, Hold) and not hold.standalone


async def test_a_wipe_under_load_loses_nothing(
    owner_of: Callable[[str], Awaitable[Owner]], database: Database, redis: Redis
) -> None:
    """Three owners call, close and flush while Redis is wiped three times: afterwards the counters are the ledger."""
    owners = [await owner_of(name) for name in "abc"]
    calls = [asyncio.create_task(owner.call_for_ever()) for owner in owners for _ in range(5)]
    for _ in range(3):
        await asyncio.sleep(0.7)
        await redis.flushall()
    await asyncio.sleep(0.7)
    for owner in owners:
        owner.is_calling = False
    await asyncio.gather(*calls)

    await settled(owners)

    assert await counted(owners[0], "key_a") == await owed(database)
    assert (await owners[0].quotas.usage(TEAM)).live == 0


async def settled(owners: list[Owner]) -> None:
    """Wait until everything is flushed and said."""
    async with asyncio.timeout(20):
        while True:
            if not any(one.quotas.unsaid or one.quotas.is_standalone or one.flusher.backlog for one in owners):
                return
            await asyncio.sleep(0.05)


async def counted(owner: Owner, key_id: str) -> list[tuple[int, int, int]]:
    """Return tokens and cost of today and the month's cost, as the counters of team and key have them."""
    states = [await owner.quotas.usage(TEAM), await owner.quotas.usage(TEAM, key_id=key_id)]
    return [(state.day_tokens, state.day_nanousd, state.month_nanousd) for state in states]


async def owed(database: Database) -> list[tuple[int, int, int]]:
    """Return the same by the statements: one key made all the calls."""
    query = "SELECT sum(input_tokens + output_tokens), sum(cost_nanousd) FROM usage_daily WHERE status = 'answered'"
    async with database.begin() as connection:
        tokens, cost = (await connection.execute(text(query))).one()
    return [(int(tokens), int(cost), int(cost))] * 2
