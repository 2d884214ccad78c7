# Fixtures that several suites against real servers lean on.

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from gateway.storage.database import Database
from tests.support.clock import SetClock
from tests.support.limited import LimitedQuotas, open_quotas


@pytest.fixture
async def quotas(database: Database, redis: Redis, clock: SetClock) -> AsyncIterator[LimitedQuotas]:
    """Quotas of a listed owner whose time the test decides; teams and keys have the limits that requests name."""
    async with open_quotas(database, redis, clock) as quotas:
        yield quotas
