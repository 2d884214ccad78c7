# Fixtures that several suites against real servers lean on.

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from billing.lease_store import PostgresLeases
from billing.leases import Leases
from billing.quotas import Quotas
from billing.rates import Rates
from gateway.database import Database
from tests.support.clock import SetClock


@pytest.fixture
async def quotas(database: Database, redis: Redis, clock: SetClock) -> AsyncIterator[Quotas]:
    """Quotas of a listed owner whose time the test decides."""
    store = PostgresLeases(database, clock, uses_server_time=False)
    await store.begin("host:1", "")
    rates = Rates(redis, clock, owner="host:1", uses_server_time=False, deadline=5.0)
    yield Quotas(Leases(store, clock, "host:1", share=0.25), rates)
    await rates.close()
