# Which processes there are, as their rows say, and what lies with those that do not answer: room that nothing can take
# back safely, because calls may have spent it.

from __future__ import annotations

from datetime import datetime

from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

SILENT = 30.0  # seconds since an owner was last seen: a neighbour has adopted its journal by then, if there is one
RETIRED_AFTER = 10.0  # seconds since an owner was last seen, in which it may not be retired


class ListedOwner(Struct, frozen=True, kw_only=True):
    """One process that has begun and not been forgotten. ``state``: "answers", "silent", "lost" or "ended"."""

    id: str
    state: str
    version: str
    started_at: datetime
    seen_at: datetime
    ended_at: datetime | None
    watermark: datetime  # its calls from before are in the ledger
    backlog: int  # closed calls that it has still to carry there, when it was last seen
    scopes: int  # that it has leases of, for days of this month
    unused_tokens: int  # of these leases, by teams alone: what it may still hold or has not carried yet
    unused_nanousd: int


class SilentRoom(Struct, frozen=True):
    """What of a scope lies with owners that do not answer: tokens of today, money of today and of this month."""

    tokens_today: int = 0
    nanousd_today: int = 0
    nanousd_this_month: int = 0

    def __bool__(self) -> bool:
        return any((self.tokens_today, self.nanousd_today, self.nanousd_this_month))


async def list_owners(connection: AsyncConnection, *, with_ended: bool = False) -> list[ListedOwner]:
    """Return the owners, those seen last first."""
    values = {"silent": SILENT, "with_ended": with_ended}
    return [ListedOwner(**row) for row in (await connection.execute(LIST, values)).mappings()]


async def silent_owners(connection: AsyncConnection) -> int:
    """Return how many owners do not answer and hold room of this month that they have not used."""
    return int((await connection.execute(COUNT_SILENT, {"silent": SILENT})).scalar_one())


async def silent_room(connection: AsyncConnection, scope: str) -> SilentRoom:
    """Return what of a scope lies with owners that do not answer."""
    row = (await connection.execute(SILENT_ROOM, {"silent": SILENT, "scope": scope})).one()
    return SilentRoom(*map(int, row))


async def retire_owner(connection: AsyncConnection, owner: str) -> str:
    """End an owner whose journal will not come back, and return what it held to its scopes.

    Returns "retired", or why it was not: "unknown", "ended", or "alive" for one that was seen in the last 10 s. What it
    has spent and not carried to the ledger is not billed; should its journal come back after all, it is booked, past
    whatever cap it meets then.
    """
    row = (await connection.execute(LOCK, {"owner": owner, "alive": RETIRED_AFTER})).one_or_none()
    if row is None:
        return "unknown"
    if row.is_ended:
        return "ended"
    if row.is_alive:
        return "alive"
    await connection.execute(END, {"owner": owner})
    return "retired"


# All by Postgres's clock.
_MONTH = "date_trunc('month', clock_timestamp() AT TIME ZONE 'UTC')"
_IS_SILENT = "owners.ended_at IS NULL AND owners.seen_at < clock_timestamp() - make_interval(secs => :silent)"

LIST = text(f"""
    SELECT id, version, started_at, seen_at, ended_at, watermark, backlog,
           CASE WHEN ended_at IS NOT NULL THEN 'ended'
                WHEN lost_at > seen_at THEN 'lost'
                WHEN {_IS_SILENT} THEN 'silent'
                ELSE 'answers' END AS state,
           held.scopes, held.unused_tokens, held.unused_nanousd
    FROM owners, LATERAL (
        SELECT count(DISTINCT scope) AS scopes,
               CAST(coalesce(sum(unused) FILTER (WHERE unit = 'tokens' AND is_of_team), 0) AS bigint) AS unused_tokens,
               CAST(coalesce(sum(unused) FILTER (WHERE unit = 'nanousd' AND is_of_team), 0) AS bigint) AS unused_nanousd
        FROM (
            SELECT scope, unit, granted - returned - spent AS unused, scope LIKE 'team:%' AS is_of_team FROM leases
            WHERE leases.owner = owners.id AND day >= {_MONTH}
        ) AS lease
    ) AS held
    WHERE ended_at IS NULL OR :with_ended
    ORDER BY seen_at DESC, id
""")  # noqa: S608  (the words are ours)
COUNT_SILENT = text(f"""
    SELECT count(*) FROM owners
    WHERE {_IS_SILENT} AND EXISTS (
        SELECT FROM leases WHERE leases.owner = owners.id AND day >= {_MONTH} AND granted - returned > spent
    )
""")  # noqa: S608
SILENT_ROOM = text(f"""
    SELECT coalesce(sum(unused) FILTER (WHERE unit = 'tokens' AND is_today), 0),
           coalesce(sum(unused) FILTER (WHERE unit = 'nanousd' AND is_today), 0),
           coalesce(sum(unused) FILTER (WHERE unit = 'nanousd'), 0)
    FROM (
        SELECT unit, granted - returned - spent AS unused,
               day = CAST(clock_timestamp() AT TIME ZONE 'UTC' AS date) AS is_today
        FROM leases JOIN owners ON owners.id = leases.owner
        WHERE scope = :scope AND day >= {_MONTH} AND day < {_MONTH} + interval '1 month' AND {_IS_SILENT}
    ) AS lease
""")  # noqa: S608
LOCK = text("""
    SELECT ended_at IS NOT NULL AS is_ended,
           seen_at >= clock_timestamp() - make_interval(secs => :alive) AS is_alive
    FROM owners WHERE id = :owner FOR UPDATE
""")
END = text("SELECT end_owner(:owner, NULL)")
