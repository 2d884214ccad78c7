# A gateway's part in recalibration: it knows what every team's routes ask for, as a worker last worked it out.

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog
from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.store_errors import POSTGRES_AWAY
from gateway.core.clock import Clock
from gateway.storage.database import Database
from router.catalog.catalog import AutoRoute, Catalog

READ_EVERY = 30.0  # seconds
NONE: Mapping[str, float] = {}

log = structlog.get_logger(__name__)


class Recalibrations:
    """The thresholds of teams that go by their own outcomes. What was last read goes on while Postgres is away."""

    def __init__(self, catalog: Catalog, database: Database) -> None:
        self._database = database
        self._catalog = catalog
        self._by_team: dict[str, dict[str, float]] = {}

    def follow(self, catalog: Catalog) -> None:
        """Go by another catalogue from the next reading on."""
        self._catalog = catalog

    def of(self, team_id: str) -> Mapping[str, float]:
        """Return the score that each route asks for where this team does not say another; other routes are missing."""
        return self._by_team.get(team_id, NONE)

    async def run(self) -> None:
        """Read for ever, if there is anything to read."""
        while True:
            try:
                await self.read()
            except POSTGRES_AWAY as exc:
                log.warning("recalibrations_not_read", error=repr(exc))
            await asyncio.sleep(READ_EVERY)

    async def read(self) -> None:
        """Read what holds now."""
        if not any(map(recalibrating, self._catalog.auto.values())):
            self._by_team = {}
            return
        async with self._database.begin() as connection:
            rows = await recalibrations(connection)
        found: dict[str, dict[str, float]] = {}
        for row in rows:
            route = self._catalog.auto.get(row.route)
            # What was measured for another quality of the route holds no more.
            if route is not None and row.team_id in recalibrating(route) and row.quality == route.quality:
                found.setdefault(row.team_id, {})[row.route] = row.applied
        self._by_team = found


def recalibrating(route: AutoRoute) -> frozenset[str]:
    """Return the teams whose own outcomes move their threshold on this route."""
    return frozenset() if route.shadow is None else route.shadow.recalibrate


class Recalibration(Struct, frozen=True, kw_only=True):
    """What a route's quality takes for one team, as measured."""

    team_id: str
    route: str
    quality: float  # the route's own
    applied: float  # the score that is asked for in its place


async def recalibrations(connection: AsyncConnection) -> list[Recalibration]:
    """Return every team's threshold on every route that has one."""
    return [Recalibration(**row) for row in (await connection.execute(RECALIBRATIONS)).mappings()]


async def keep_recalibration(connection: AsyncConnection, clock: Clock, found: Recalibration, outcomes: int) -> None:
    """Store a team's threshold from now on, and how many outcomes it rests on."""
    values = {name: getattr(found, name) for name in found.__struct_fields__}
    await connection.execute(RECALIBRATE, values | {"outcomes": outcomes, "now": clock.moment()})


RECALIBRATIONS = text("SELECT team_id, route, quality, applied FROM recalibrations")
RECALIBRATE = text("""
    INSERT INTO recalibrations (team_id, route, quality, applied, outcomes, changed_at)
    VALUES (:team_id, :route, :quality, :applied, :outcomes, :now)
    ON CONFLICT (team_id, route) DO UPDATE SET quality = excluded.quality, applied = excluded.applied,
        outcomes = excluded.outcomes, changed_at = excluded.changed_at
""")
