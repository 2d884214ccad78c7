# A worker that is told to stop in the very moment in which it claims something.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.core.background import stop_all
from gateway.core.clock import Clock
from gateway.core.draining import Drain
from gateway.run.process import open_process
from gateway.run.worker import batch_runner_of
from gateway.storage.database import Database
from tests.support.house import House, running_house, settings_for
from tests.support.scripted_upstream import ScriptedUpstream

LEASED = "SELECT count(*) FROM batch_items WHERE lease_owner IS NOT NULL"
ITEMS = 3


class SlowToSay(Database):
    """Postgres has committed, and its word is on the way: until ``goes_on`` nobody hears of the first claim."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.has_committed, self.goes_on = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """Wait behind the commit that claims."""
        async with super().begin() as connection:
            yield connection
        if not self.has_committed.is_set() and await self.count_leased():
            self.has_committed.set()
            await self.goes_on.wait()

    async def count_leased(self) -> int:
        """Return how many items somebody has."""
        async with super().begin() as connection:
            return int((await connection.execute(text(LEASED))).scalar_one())


@pytest.fixture
def house(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[House]:
    """A gateway before an upstream that never answers."""
    with ScriptedUpstream(models=("small", "large")) as upstream:
        upstream.script("hang-before-headers")
        with running_house(settings_for(database_url, redis_url, upstream.url, tmp_path)) as house:
            yield house


async def test_what_was_claimed_while_its_worker_was_stopped_is_given_back(house: House) -> None:
    """At once, and not when its lease ends: the next worker has it."""
    ask = {"model": "small", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9}
    async with httpx.AsyncClient(base_url=house.url, headers={"authorization": f"Bearer {house.team_key}"}) as client:
        (await client.post("/v1/batch", json={"requests": [ask] * ITEMS})).raise_for_status()
    database = SlowToSay(house.settings.database_url)
    async with open_process(house.settings, Clock(), Drain()) as parts:
        runner = batch_runner_of(parts, ITEMS, database)
        running = asyncio.create_task(runner.run())
        async with asyncio.timeout(20):
            await database.has_committed.wait()
        claimed = await database.count_leased()
        stopping = asyncio.create_task(stop_all([running]))
        await asyncio.sleep(0)  # it is cancelled
        database.goes_on.set()
        await stopping
        await runner.finish(0.0, asyncio.Event())
        left = await database.count_leased()
    await database.close()

    assert (claimed, left) == (ITEMS, 0)
