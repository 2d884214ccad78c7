# What the guards of the counters ask of Postgres, and what they leave there for each other: who counts, who died with
# something unsaid, and the sums that an epoch begins with.

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sqlalchemy import text

from billing.edges import Clock, Database
from billing.holds import Scope, Sums
from billing.ledger_sums import LedgerSums, read_ledger_sums, read_scope_sums

ALIVE = 30.0  # seconds since an owner was last seen, after which nobody waits for it


class RebuildStore(Protocol):
    """The verbs. Each raises what the database raises."""

    async def owners_alive(self) -> set[str]:
        """Return everybody who may know what the statements do not: all that were seen within 30 s."""

    async def teams(self) -> Sequence[str]:
        """Return the ids of all teams."""

    async def created_at(self, team_id: str) -> float | None:
        """Return when a team was made, in unix seconds by Postgres's clock; None for one that is not there."""

    async def ledger_sums(self, put_back: Sequence[str]) -> LedgerSums:
        """Return the sums of all teams without the calls that were put back."""

    async def scope_sums(self, scope: Scope, team_id: str, day: int) -> Sums:
        """Return what one team or key has used in a day and its month."""

    async def dead_with_unsettled(self) -> Sequence[str]:
        """Return the owners that died while Redis had something to hear of them."""

    async def forgive_dead(self) -> None:
        """Note that the present epoch knows all that they left."""

    async def note_unsettled(self, owner: str, unsettled: int) -> None:
        """Note how many calls Redis has yet to hear of from ``owner``."""

    async def leave(self, owner: str, unsettled: int) -> None:
        """Note that ``owner`` is gone, though calls of its journal are not flushed or not settled."""

    async def forget(self, owner: str) -> None:
        """Note that ``owner`` is gone and left nothing."""


class PostgresStore:
    """The same, on Postgres."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def owners_alive(self) -> set[str]:
        """Return everybody that was seen within 30 s."""
        async with self._database.begin() as connection:
            return set((await connection.execute(OWNERS, {"alive": ALIVE})).scalars())

    async def teams(self) -> Sequence[str]:
        """Return the ids of all teams."""
        async with self._database.begin() as connection:
            return (await connection.execute(text("SELECT id FROM teams"))).scalars().all()

    async def created_at(self, team_id: str) -> float | None:
        """Return when a team was made."""
        async with self._database.begin() as connection:
            created_at = (await connection.execute(CREATED, {"id": team_id})).scalar_one_or_none()
        return None if created_at is None else float(created_at)

    async def ledger_sums(self, put_back: Sequence[str]) -> LedgerSums:
        """Return the sums of all teams without the calls that were put back."""
        async with self._database.begin() as connection:
            return await read_ledger_sums(connection, self._clock.now(), put_back)

    async def scope_sums(self, scope: Scope, team_id: str, day: int) -> Sums:
        """Return what one team or key has used."""
        async with self._database.begin() as connection:
            return await read_scope_sums(connection, scope, team_id, day)

    async def dead_with_unsettled(self) -> Sequence[str]:
        """Return the owners that died with something unsaid."""
        async with self._database.begin() as connection:
            return (await connection.execute(DEAD, {"alive": ALIVE})).scalars().all()

    async def forgive_dead(self) -> None:
        """Forget that they had."""
        async with self._database.begin() as connection:
            await connection.execute(FORGIVE, {"alive": ALIVE})

    async def note_unsettled(self, owner: str, unsettled: int) -> None:
        """Note how many calls are unsaid."""
        async with self._database.begin() as connection:
            await connection.execute(NOTE, {"id": owner, "unsettled": unsettled})

    async def leave(self, owner: str, unsettled: int) -> None:
        """Let nobody wait for an owner; its row still keeps the days of its unflushed calls open."""
        async with self._database.begin() as connection:
            await connection.execute(LEAVE, {"id": owner, "unsettled": unsettled, "alive": ALIVE})

    async def forget(self, owner: str) -> None:
        """Take an owner off the list."""
        async with self._database.begin() as connection:
            await connection.execute(FORGET, {"id": owner})


# All by Postgres's clock, which writes ``seen_at`` too.
OWNERS = text("SELECT id FROM flushers WHERE seen_at >= clock_timestamp() - make_interval(secs => :alive)")
CREATED = text("SELECT extract(epoch FROM created_at) FROM teams WHERE id = :id")
DEAD = text("""
    SELECT id FROM flushers WHERE unsettled > 0 AND seen_at < clock_timestamp() - make_interval(secs => :alive)
""")
FORGIVE = text("""
    UPDATE flushers SET unsettled = 0
    WHERE unsettled > 0 AND seen_at < clock_timestamp() - make_interval(secs => :alive)
""")
NOTE = text(
    "INSERT INTO flushers (id, watermark, backlog, seen_at, unsettled) "
    "VALUES (:id, to_timestamp(0), 0, clock_timestamp(), :unsettled) "
    "ON CONFLICT (id) DO UPDATE SET unsettled = excluded.unsettled"
)
LEAVE = text("""
    UPDATE flushers SET unsettled = :unsettled, seen_at = clock_timestamp() - make_interval(secs => :alive + 1)
    WHERE id = :id
""")
FORGET = text("DELETE FROM flushers WHERE id = :id")
