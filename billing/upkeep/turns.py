# Chores that one process does for all, in turn. Each is begun at most once in its time, by whichever process
# looks first, and what it tells is there for all of them.

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.edges import Clock, Database


class Turns:
    """The turns, in Postgres. ``uses_server_time`` False: by the clock, for tests."""

    def __init__(self, database: Database, clock: Clock, *, uses_server_time: bool = True) -> None:
        self._database = database
        self._clock = clock
        self._uses_server_time = uses_server_time

    async def take(self, name: str, every: float) -> bool:
        """Take the turn at a chore, unless a process took it in the last ``every`` seconds. Raises POSTGRES_AWAY.

        Where that process dies over it, the chore waits for the next turn.
        """
        values = {"name": name, "every": every, "moment": self._moment()}
        async with self._database.at_once() as connection:
            return (await connection.execute(TAKE, values)).first() is not None

    async def tell(self, name: str, told: str) -> None:
        """Leave what came of a chore whose turn was taken. Raises POSTGRES_AWAY."""
        async with self._database.at_once() as connection:
            await connection.execute(TELL, {"name": name, "told": told})

    async def told(self, name: str) -> str:
        """Return what came of a chore when it was last done; nothing: it never was. Raises POSTGRES_AWAY."""
        async with self._database.at_once() as connection:
            return (await connection.execute(TOLD, {"name": name})).scalar_one_or_none() or ""

    async def now(self) -> datetime:
        """Return Postgres's time: a local clock that is wrong by days closes and drops nothing. Raises
        POSTGRES_AWAY."""
        async with self._database.at_once() as connection:
            return self._moment() or await database_moment(connection)

    def _moment(self) -> datetime | None:
        return None if self._uses_server_time else datetime.fromtimestamp(self._clock.now(), UTC)


async def database_moment(connection: AsyncConnection) -> datetime:
    """Return Postgres's time."""
    moment: datetime = (await connection.execute(text("SELECT clock_timestamp()"))).scalar_one()
    return moment.astimezone(UTC)


# Looks before it locks: two hundred processes would wait for each other at the row of a chore whose turn is taken.
TAKE = text("""
    INSERT INTO turns (name, taken_at)
    SELECT :name, now.moment
    FROM (SELECT coalesce(CAST(:moment AS timestamptz), clock_timestamp()) AS moment) AS now
    WHERE NOT EXISTS (
        SELECT FROM turns WHERE name = :name
           AND taken_at BETWEEN now.moment - make_interval(secs => :every) AND now.moment
    )
    ON CONFLICT (name) DO UPDATE SET taken_at = excluded.taken_at
    WHERE turns.taken_at NOT BETWEEN excluded.taken_at - make_interval(secs => :every) AND excluded.taken_at
    RETURNING name
""")
TELL = text("UPDATE turns SET told = :told WHERE name = :name")
TOLD = text("SELECT told FROM turns WHERE name = :name")
