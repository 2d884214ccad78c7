# Contents in Postgres, sealed: written behind the calls, read one at a time and never without a line in the audit log,
# erased when their team's days are over. What the process cannot keep until Postgres takes it is dropped and counted.

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import structlog
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.ids import uuid_of
from gateway.calls.call import Call
from gateway.calls.hooks import ReplyHook
from gateway.contents.keeper import Gathered, Keeper, opened
from gateway.core.errors import ContentsUnreadable
from gateway.storage.audit_log import Act, record_act
from gateway.storage.database import Database
from gateway.storage.encryption import Sealer, Unsealable
from gateway.storage.rows_behind import WrittenBehind
from protocol.errors import NotFound

PURPOSE = "call-contents"  # of the sealer
PURGED_AT_ONCE = 1000  # rows in one transaction

log = structlog.get_logger()


class ContentStore(WrittenBehind[Gathered]):
    """The contents that this process has not written yet. No call waits for any of it."""

    most = 32 * 1024 * 1024  # bytes
    at_once = 100

    def __init__(self, database: Database, sealer: Sealer, retention: float) -> None:
        super().__init__(database, "contents")
        self._retention = retention  # seconds, at the most; 0: none are kept here
        self._sealer = sealer

    def follow(self, retention: float) -> None:
        """Go by another configuration."""
        self._retention = retention

    def keeps(self, call: Call) -> bool:
        """Whether the contents of a call are kept: its team wants it, and the call is its own doing."""
        return call.caller.team.contents is not None and not call.is_internal and self._retention > 0

    def keeper(self, call: Call) -> ReplyHook:
        """Return what gathers the reply of a call and keeps it with what was asked."""
        return Keeper(call, self.add)

    def _weight_of(self, one: Gathered) -> int:
        return one.weight

    async def _write(self, some: Sequence[Gathered]) -> None:
        """Write them, but those that cannot be sealed, which are lost."""
        rows = [row for row in await asyncio.to_thread(self._rows_of, some) if row is not None]
        async with self._database.begin() as connection:
            columns = zip(*rows, strict=True) if rows else ((),) * len(NAMES)
            await connection.execute(PUT, dict(zip(NAMES, map(list, columns), strict=True)))
        self.lost += len(some) - len(rows)

    def _rows_of(self, some: Sequence[Gathered]) -> list[tuple[str, UUID, datetime, bytes] | None]:
        return [self._row_of(each) for each in some]

    def _row_of(self, kept: Gathered) -> tuple[str, UUID, datetime, bytes] | None:
        try:
            made_at = datetime.fromtimestamp(kept.created_at, UTC)
            return kept.team_id, UUID(kept.request_id), made_at, kept.sealed(self._sealer)
        except Exception as exc:  # of one call; those beside it are written
            log.error("contents_not_kept", request_id=kept.request_id, error=type(exc).__name__)
            return None

    async def read(
        self,
        request_id: str,
        act: Act,
        now: datetime,
        team_id: str | None = None,
        may_read: Callable[[str], None] = lambda _: None,
    ) -> dict[str, Any]:
        """Return the contents of a call of that team, or of any, once the audit log says that they were read. Raises
        NotFound, ContentsUnreadable, and what ``may_read`` does of a call to its endpoint."""
        async with self._database.begin() as connection:
            told = (request_id, act, now, self._retention, team_id, may_read)
            return await read_contents(connection, self._sealer, *told)


async def read_contents(
    connection: AsyncConnection,
    sealer: Sealer,
    request_id: str,
    act: Act,
    now: datetime,
    retention: float,
    team_id: str | None = None,
    may_read: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return contents as ``ContentStore.read`` does; they may be told once this transaction is committed."""
    if (key := uuid_of(request_id)) is None:
        words = f"'{request_id[:100]}' is no id of a call: that is the x-request-id of an answer."
        raise NotFound(words, param="request_id", code="call_not_found")
    values = {"request_id": key, "team_id": team_id, "now": now, "retention": retention}
    if (row := (await connection.execute(FIND, values)).one_or_none()) is None:
        words = f"No contents of a call '{request_id[:100]}' are kept. A team's are from when an admin says so on, for"
        raise NotFound(f"{words} as many days (docs/calls.md).", param="request_id", code="contents_not_found")
    which = str(row.request_id)
    try:
        found = await asyncio.to_thread(opened, sealer, row.team_id, which, row.sealed)
    except (Unsealable, zlib.error, msgspec.MsgspecError) as exc:
        raise ContentsUnreadable("These contents were changed, or sealed under another pepper.") from exc
    may_read(found["endpoint"])
    await record_act(connection, act, "contents.read", team_id=row.team_id, subject=which)
    return {"object": "call.contents", "request_id": which, "team_id": row.team_id, **found}


async def purge_contents(database: Database, now: datetime, retention: float) -> int:
    """Erase contents that are past their team's days, or past ``retention`` seconds; return how many."""
    return await database.purge(PURGE, PURGED_AT_ONCE, now=now, retention=retention)


NAMES = ("teams", "ids", "made_at", "sealed")
# The rows of teams that want them now: their own rows are locked against a change of that until these are committed.
PUT = text("""
    INSERT INTO call_contents (request_id, team_id, created_at, sealed)
    SELECT new.request_id, new.team_id, new.created_at, new.sealed
    FROM unnest(CAST(:teams AS text[]), CAST(:ids AS uuid[]), CAST(:made_at AS timestamptz[]),
                CAST(:sealed AS bytea[])) AS new (team_id, request_id, created_at, sealed)
         JOIN (SELECT id FROM teams WHERE id = ANY (CAST(:teams AS text[])) AND contents ->> 'keep_days' IS NOT NULL
               ORDER BY id FOR SHARE) AS wanting ON wanting.id = new.team_id
    ON CONFLICT (request_id) DO NOTHING
""")
SINCE = """
    CAST(:now AS timestamptz) - least(CAST(coalesce(teams.contents ->> 'keep_days', '0') AS double precision) * 86400,
                                      CAST(:retention AS double precision)) * interval '1 second'
"""
FIND = text(f"""
    SELECT kept.request_id, kept.team_id, kept.sealed FROM call_contents AS kept JOIN teams ON teams.id = kept.team_id
    WHERE kept.request_id = :request_id AND kept.team_id = coalesce(CAST(:team_id AS text), kept.team_id)
      AND kept.created_at >= {SINCE}
""")  # noqa: S608  (a constant of ours)
PURGE = text(f"""
    DELETE FROM call_contents WHERE request_id IN (
        SELECT old.request_id
        FROM teams, LATERAL (SELECT request_id FROM call_contents
                             WHERE team_id = teams.id AND created_at < {SINCE} LIMIT :limit) AS old
        LIMIT :limit
    )
""")  # noqa: S608
