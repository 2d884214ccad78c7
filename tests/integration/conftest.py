# Fixtures that several suites against real servers lean on.

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from billing.quotas import Quotas
from tests.support.clock import SetClock


@pytest.fixture
def quotas(redis: Redis, clock: SetClock) -> Quotas:
    """Quotas whose time the test decides."""
    return Quotas(redis, clock, uses_server_time=False, deadline=5.0)
