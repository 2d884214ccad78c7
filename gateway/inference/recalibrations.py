# A gateway's part in recalibration: it knows what every team's routes ask for, as a worker last worked it out.

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime

import structlog
from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.store_errors import told_if_away
from gateway.storage.database import Database
from protocol.inference import Request
from router.catalog.catalog import AutoRoute, Catalog

Score = Callable[[Request], float]  # how likely a small model suffices

READ_EVERY = 30.0  # seconds
NONE: Mapping[str, float] = {}
NO_SCORES: Mapping[str, Score] = {}

log = structlog.get_logger(__name__)


class Recalibrations:
    """The thresholds of teams that go by their own outcomes. What was last read goes on while Postgres is away."""

    def __init__(self, catalog: Catalog, database: Database, score_of: Callable[[bytes], Score | None]) -> None:
        self._database = database
        self._catalog = catalog
        self._score_of = score_of  # what a worker stored, ready to judge; None: of another complexity model
        self._by_team: dict[str, dict[str, float]] = {}
        self._learned: dict[str, dict[str, Score]] = {}
        self._changed: dict[tuple[str, str], datetime] = {}  # when the scores that are held were stored

    def follow(self, catalog: Catalog) -> None:
        """Go by another catalogue from the next reading on."""
        self._catalog = catalog

    def of(self, team_id: str) -> Mapping[str, float]:
        """Return the score that each route asks for where this team does not say another; other routes are missing."""
        return self._by_team.get(team_id, NONE)

    def learned(self, team_id: str) -> Mapping[str, Score]:
        """Return the team's own scores by route; other routes go by the shipped ones."""
        return self._learned.get(team_id, NO_SCORES)

    async def run(self) -> None:
        """Read for ever, if there is anything to read."""
        while True:
            with told_if_away(log, "recalibrations_not_read"):
                await self.read()
            await asyncio.sleep(READ_EVERY)

    async def read(self) -> None:
        """Read what holds now."""
        if not any(map(recalibrating, self._catalog.auto.values())):
            self._by_team, self._learned, self._changed = {}, {}, {}
            return
        found: dict[str, dict[str, float]] = {}
        learned: dict[str, dict[str, Score]] = {}
        changed: dict[tuple[str, str], datetime] = {}
        async with self._database.begin() as connection:
            for row in await recalibrations(connection):
                route = self._catalog.auto.get(row.route)
                # What was measured for another quality of the route holds no more.
                if route is None or row.team_id not in recalibrating(route) or row.quality != route.quality:
                    continue
                found.setdefault(row.team_id, {})[row.route] = row.applied
                if not row.has_learned or not learns(route, row.team_id):
                    continue
                score = self.learned(row.team_id).get(row.route)
                if score is None or self._changed.get((row.team_id, row.route)) != row.changed_at:
                    data = await learned_scores(connection, row.team_id, row.route)
                    score = None if data is None else self._score_of(data)
                if score is not None:
                    learned.setdefault(row.team_id, {})[row.route] = score
                    changed[row.team_id, row.route] = row.changed_at
        self._by_team, self._learned, self._changed = found, learned, changed


def recalibrating(route: AutoRoute) -> frozenset[str]:
    """Return the teams whose own outcomes move their threshold on this route."""
    return frozenset() if route.shadow is None else route.shadow.recalibrate


def learns(route: AutoRoute, team_id: str) -> bool:
    """Tell whether a team has scores of its own on a route: where calls of both kinds of models are compared."""
    return route.shadow is not None and route.shadow.explore and team_id in route.shadow.recalibrate


class Recalibration(Struct, frozen=True, kw_only=True):
    """What a route's quality takes for one team, as measured."""

    team_id: str
    route: str
    quality: float  # the route's own
    applied: float  # the score that is asked for in its place
    has_learned: bool  # there are scores of its own
    changed_at: datetime


async def recalibrations(connection: AsyncConnection) -> list[Recalibration]:
    """Return every team's threshold on every route that has one."""
    return [Recalibration(**row) for row in (await connection.execute(RECALIBRATIONS)).mappings()]


async def learned_scores(connection: AsyncConnection, team_id: str, route: str) -> bytes | None:
    """Return a team's own scores on a route, as ``router.learning`` packs them."""
    found: bytes | None = await connection.scalar(LEARNED, {"team_id": team_id, "route": route})
    return found


async def keep_recalibration(
    connection: AsyncConnection, found: Recalibration, outcomes: int, learned: bytes | None
) -> None:
    """Store a team's threshold and its own scores from now on, and how many outcomes they rest on."""
    values = {name: getattr(found, name) for name in ("team_id", "route", "quality", "applied", "changed_at")}
    await connection.execute(RECALIBRATE, values | {"outcomes": outcomes, "learned": learned})


RECALIBRATIONS = text("""
    SELECT team_id, route, quality, applied, learned IS NOT NULL AS has_learned, changed_at FROM recalibrations
""")
LEARNED = text("SELECT learned FROM recalibrations WHERE team_id = :team_id AND route = :route")
RECALIBRATE = text("""
    INSERT INTO recalibrations (team_id, route, quality, applied, outcomes, changed_at, learned)
    VALUES (:team_id, :route, :quality, :applied, :outcomes, :changed_at, CAST(:learned AS bytea))
    ON CONFLICT (team_id, route) DO UPDATE SET quality = excluded.quality, applied = excluded.applied,
        outcomes = excluded.outcomes, changed_at = excluded.changed_at, learned = excluded.learned
""")
