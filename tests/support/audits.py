# What `tollgate audit` would print of yesterday and today: where the books differ, and what cannot be compared yet.

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

from redis.asyncio import Redis

from billing.audit import Difference, audit
from billing.cut_off import CutOff, owners_cut_off
from billing.quotas import Quotas
from gateway.clock import Clock
from gateway.database import Database
from tests.support.waiting import PATIENCE


async def differences(database_url: str, redis_url: str) -> list[Difference | CutOff]:
    """Compare the books now."""
    clock, redis = Clock(), Redis.from_url(redis_url, socket_timeout=5)
    database = Database(database_url, pool_size=1)
    try:
        days = (clock.today() - timedelta(days=1), clock.today())
        found = [one for day in days for one in await audit(database, Quotas(redis, clock, deadline=5.0), day)]
        return [*found, *await owners_cut_off(database)]
    finally:
        await database.close()
        await redis.aclose()


def lasting_differences(database_url: str, redis_url: str, within: float = PATIENCE) -> list[Difference | CutOff]:
    """Compare them until they agree, for so many seconds at most: what runs or was left by the dead is booked yet."""
    deadline = time.monotonic() + within
    while (found := asyncio.run(differences(database_url, redis_url))) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found
