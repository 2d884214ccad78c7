# Reading the audit log on and on: each entry once, in its order, whichever transaction ends first.

from __future__ import annotations

import asyncio

from gateway.storage.audit_log import Act, list_acts, record_act
from gateway.storage.database import Database


async def test_an_entry_that_is_committed_late_is_not_missed(database: Database) -> None:
    """A reader waits for transactions that add one, though a later one is there already."""
    async with database.begin() as slow:
        await record_act(slow, Act("slow"), "key.created")
        async with database.begin() as quick:
            await record_act(quick, Act("quick", address="10.0.0.1", reason="because"), "key.revoked")

        async def read() -> list[str]:
            async with database.begin() as connection:
                return [entry.actor for entry in await list_acts(connection, after=0)]

        reading = asyncio.create_task(read())
        done, _ = await asyncio.wait([reading], timeout=0.3)
        assert not done
    assert await reading == ["slow", "quick"]
    async with database.begin() as connection:
        newest = (await list_acts(connection, limit=1))[0]
    assert (newest.actor, newest.address, newest.reason) == ("quick", "10.0.0.1", "because")
