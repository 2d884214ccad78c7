# What `tollgate audit` would print of yesterday and today: where the books differ; and which owners do not answer.

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

from sqlalchemy import text

from billing.upkeep.audit import Difference, audit
from billing.upkeep.owner_list import ListedOwner, list_owners
from gateway.core.clock import Clock
from gateway.storage.database import Database
from tests.support.waiting import PATIENCE

# Answered calls whose price the database cannot tell; an answer of the cache has none.
UNPRICED = text("""
    SELECT CAST(request_id AS text) FROM usage_records
    WHERE status = 'answered' AND input_tokens + output_tokens > 0 AND price NOT IN (SELECT edition FROM price_editions)
""")


async def differences(database_url: str) -> list[Difference | ListedOwner | str]:
    """Compare the books now."""
    today = Clock().today()
    database = Database(database_url, pool_size=1)
    try:
        days = (today - timedelta(days=1), today)
        found: list[Difference | ListedOwner | str]
        found = [one for day in days for one in (await audit(database, day)).differences]
        async with database.begin() as connection:
            found += (await connection.execute(UNPRICED)).scalars().all()
            return [*found, *(one for one in await list_owners(connection) if one.state != "answers")]
    finally:
        await database.close()


def lasting_differences(database_url: str, within: float = PATIENCE) -> list[Difference | ListedOwner | str]:
    """Compare them until they agree and all owners answer, for so many seconds at most."""
    deadline = time.monotonic() + within
    while (found := asyncio.run(differences(database_url))) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found
