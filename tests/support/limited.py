# Quotas whose limits stand where a call says so: balances have their caps from the rows of teams and keys, so the rows
# are made to say what each request's scopes do, as the administration would have.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import msgspec
from redis.asyncio import Redis
from sqlalchemy import text

from billing.core.edges import Clock
from billing.core.holds import Hold, HoldRequest, Limits, RefusedHold, Scope
from billing.quotas.lease_store import TIGHT_CHANNEL, PostgresLeases
from billing.quotas.leases import Leases
from billing.quotas.quotas import Quotas
from billing.quotas.rates import RateLimits
from gateway.storage.database import Database

TEAM = text("""
    INSERT INTO teams (id, name, limits) VALUES (:id, '', CAST(:limits AS jsonb))
    ON CONFLICT (id) DO UPDATE SET limits = excluded.limits
""")
KEY = text("""
    INSERT INTO api_keys (id, team_id, digest, prefix, limits)
    VALUES (CAST(:id AS text), :team, CAST(CAST(:id AS text) AS bytea), '', CAST(:limits AS jsonb))
    ON CONFLICT (id) DO UPDATE SET limits = excluded.limits
""")


class LimitedQuotas(Quotas):
    """Quotas whose teams and keys have the limits that their requests name."""

    def __init__(self, leases: Leases, rates: RateLimits, database: Database) -> None:
        super().__init__(leases, rates)
        self.database = database
        self.limits: dict[str, Limits] = {}
        self.setting = asyncio.Lock()

    async def open(self, request: HoldRequest) -> Hold | RefusedHold:
        """Hold a call, under the limits that it names."""
        if any(self.limits.get(scope.name) != scope.limits for scope in request.scopes):
            async with self.setting:
                for scope in request.scopes:
                    if self.limits.get(scope.name) != scope.limits:
                        await set_limits(self.database, request.team_id, scope)
                        self.limits[scope.name] = scope.limits
        return await super().open(request)


async def set_limits(database: Database, team_id: str, scope: Scope) -> None:
    """Give a team or key other limits."""
    values = {"id": scope.id, "team": team_id, "limits": msgspec.json.encode(scope.limits).decode()}
    async with database.begin() as connection:
        await connection.execute(TEAM if scope.kind == "team" else KEY, values)
        await connection.execute(text("SELECT follow_limits(:scope)"), {"scope": scope.name})


@asynccontextmanager
async def open_quotas(
    database: Database, redis: Redis, clock: Clock, name: str = "host:1", *, living: int = 1
) -> AsyncIterator[LimitedQuotas]:
    """Give the quotas of a listed owner, which hears of tight balances."""
    store = PostgresLeases(database, clock, uses_server_time=False)
    await store.begin(name, "")
    rates = RateLimits(redis, clock, owner=name, uses_server_time=False, deadline=5.0)
    quotas = LimitedQuotas(Leases(store, clock, name, share=0.25), rates, database)
    quotas.leases.living = living
    listening = await asyncpg.connect(database.url)

    def ring(*said: Any) -> None:
        quotas.leases.recall([said[-1]])

    await listening.add_listener(TIGHT_CHANNEL, ring)
    try:
        yield quotas
    finally:
        await listening.close()
        await rates.close()
