# Stored responses in Postgres: one row for each turn, sealed, and a conversation as the chain of its turns. One
# statement per verb. A row counts for as long as the retention says, whatever it was when the row was made.

from __future__ import annotations

import zlib
from collections.abc import Collection
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import msgspec
import structlog
from sqlalchemy import TextClause, text

from gateway.core.clock import Clock
from gateway.core.errors import StoredResponseUnreadable
from gateway.overload.body_memory import BodyRoom
from gateway.storage.database import Database
from gateway.storage.encryption import Sealer, Unsealable
from gateway.stored_responses.turns import LARGEST, StoredChat, Turn, seal, unseal
from protocol.chat import MOST_MESSAGES
from protocol.serving.off_loop import in_parallel

HEAVY = 256 * 1024  # bytes; longer turns are packed beside the event loop
PURGED_AT_ONCE = 500  # rows in one transaction
OF_A_CONVERSATION = 512  # bytes that one takes beside its items and its metadata

T = TypeVar("T")
Chain = list[tuple[str, Turn]]  # by their responses' ids, the oldest first

log = structlog.get_logger(__name__)


class ResponseStore:
    """The stored responses of all teams."""

    def __init__(self, database: Database, clock: Clock, sealer: Sealer, room: BodyRoom, retention: float) -> None:
        self.retention = retention  # seconds; 0: nothing is stored, and nothing found
        self._database = database
        self.clock = clock
        self.sealer = sealer
        self.room = room  # for long conversations, as for the bodies that they would else come in

    async def put(
        self, team_id: str, response_id: str, previous_id: str | None, turn: Turn | StoredChat, *, is_open: bool = False
    ) -> int:
        """Store a turn, or a chat; return its bytes, 0 where its conversation would be too long to be stored."""
        plain = msgspec.json.encode(turn)
        if len(plain) > LARGEST:
            return 0
        sealed = await self.sealed(team_id, response_id, plain)
        values = {
            "id": response_id,
            "team_id": team_id,
            "previous_id": previous_id,
            "sealed": sealed,
            "size": len(plain),
            "most": LARGEST,
            "is_open": is_open,
            "now": self.clock.moment(),
        }
        async with self._database.at_once() as connection:
            is_stored = (await connection.execute(PUT, values)).one_or_none() is not None
        return len(sealed) if is_stored else 0

    async def sealed(self, team_id: str, response_id: str, plain: bytes) -> bytes:
        """Return what a row has of a turn in JSON."""
        return await in_parallel(len(plain), HEAVY, partial(seal, self.sealer, team_id, response_id, plain))

    async def find(self, team_id: str, response_ids: Collection[str]) -> dict[str, Turn]:
        """Return those of a team's turns that are there, by their responses' ids. Raises StoredResponseUnreadable."""
        rows = await self.rows(FIND, team_id, ids=sorted(id_ for id_ in response_ids if is_response(id_)))
        return {row.id: (await self._opened(team_id, [row], row.conversation_bytes))[0] for row in rows}

    async def conversation(self, team_id: str, response_id: str) -> tuple[Chain, str | None]:
        """Return a turn and those before it; and the id of one that is missing among them, ``None`` if none is. Raises
        StoredResponseUnreadable."""
        if not is_response(response_id):
            return [], response_id
        asked = {"id": response_id, "most": MOST_MESSAGES}
        rows = await self.rows(CONVERSATION, team_id, **asked, longest=HEAVY)
        if rows and rows[0].sealed is None:
            async with self.room.taken(team_id, rows[0].conversation_bytes):
                rows = await self.rows(CONVERSATION, team_id, **asked, longest=LARGEST)
                return await self._chain(team_id, rows, response_id)
        return await self._chain(team_id, rows, response_id)

    async def bytes_of(self, team_id: str) -> int:
        """Return what a team's rows take."""
        return sum([int((await self.rows(each, team_id))[0].bytes) for each in (BYTES, BYTES_OF_CONVERSATIONS)])

    async def rows(self, statement: TextClause, team_id: str, **values: Any) -> list[Any]:
        """Return the rows of a statement about what a team keeps: it may name ``now``, and ``since`` when that is."""
        now = self.clock.moment()
        values |= {"team_id": team_id, "now": now, "since": now - timedelta(seconds=self.retention)}
        async with self._database.at_once() as connection:
            return list((await connection.execute(statement, values)).all())

    async def _chain(self, team_id: str, rows: list[Any], response_id: str) -> tuple[Chain, str | None]:
        turns = await self._opened(team_id, rows, rows[-1].conversation_bytes if rows else 0)
        chain = [(row.id, turn) for row, turn in zip(rows, turns, strict=True)]
        return chain, (rows[0].previous_id if rows else response_id)

    async def _opened(self, team_id: str, rows: list[Any], size: int) -> list[Turn]:
        """Return the turns of rows that have at most ``size`` bytes in JSON: packed, they can be a hundredth of it."""
        return await in_parallel(size, HEAVY, lambda: [self._turn_in(team_id, row) for row in rows])

    def _turn_in(self, team_id: str, row: Any) -> Turn:
        try:
            return unseal(self.sealer, team_id, row.id, row.sealed, Turn)
        except (Unsealable, zlib.error, msgspec.MsgspecError) as exc:
            log.error("stored_response_unreadable", team_id=team_id, response_id=row.id, error=repr(exc))
            raise StoredResponseUnreadable(
                f"The stored response '{row.id}' cannot be read any more. Send the items of its turns in 'input'."
            ) from exc


def can_be_id(response_id: str) -> bool:
    """Whether Postgres can look for an id: a text of it has no NUL."""
    return "\x00" not in response_id


def is_response(response_id: str) -> bool:
    """Whether an id can be that of a stored response: a chat's row has another kind."""
    return response_id.startswith("resp_") and can_be_id(response_id)


async def purge_responses(database: Database, clock: Clock, retention: float) -> int:
    """Delete the responses and conversations that are past their time; return how many."""
    until = clock.moment() - timedelta(seconds=retention)
    responses = await database.purge(PURGE, PURGED_AT_ONCE, until=until)
    return responses + await database.purge(PURGE_CONVERSATIONS, PURGED_AT_ONCE, until=until)


# Storing twice changes nothing. A conversation's bytes are those of its turns in JSON.
PUT = text("""
    WITH before AS (
        SELECT coalesce((SELECT conversation_bytes FROM stored_responses
                         WHERE id = CAST(:previous_id AS text) AND team_id = :team_id), 0) AS bytes
    )
    INSERT INTO stored_responses (id, team_id, previous_id, sealed, conversation_bytes, is_open, created_at)
    SELECT :id, :team_id, CAST(:previous_id AS text), CAST(:sealed AS bytea),
           before.bytes + CAST(:size AS bigint), CAST(:is_open AS boolean), CAST(:now AS timestamptz)
    FROM before WHERE before.bytes + CAST(:size AS bigint) <= CAST(:most AS bigint)
    ON CONFLICT (id) DO UPDATE SET sealed = excluded.sealed
    WHERE stored_responses.team_id = excluded.team_id
    RETURNING 1
""")

FIND = text("""
    SELECT id, sealed, conversation_bytes FROM stored_responses
    WHERE id = ANY(CAST(:ids AS text[])) AND team_id = :team_id AND created_at > :since
""")

# Of a conversation that has more bytes than ``longest``, the last turn alone, without what it holds.
CONVERSATION = text("""
    WITH RECURSIVE turns AS (
        SELECT id, previous_id, conversation_bytes, 1 AS back,
               CASE WHEN conversation_bytes <= :longest THEN sealed END AS sealed
        FROM stored_responses
        WHERE id = :id AND team_id = :team_id AND created_at > :since
        UNION ALL
        SELECT older.id, older.previous_id, older.conversation_bytes, turns.back + 1, older.sealed
        FROM turns JOIN stored_responses AS older ON older.id = turns.previous_id
        WHERE older.team_id = :team_id AND older.created_at > :since AND turns.back < :most
          AND turns.sealed IS NOT NULL
    )
    SELECT id, previous_id, conversation_bytes, sealed FROM turns ORDER BY back DESC
""")

# Chats have no events; a team may have a million of them.
BYTES = text("""
    SELECT coalesce(sum(octet_length(sealed) + coalesce(events.bytes, 0)), 0) AS bytes
    FROM stored_responses LEFT JOIN LATERAL (
        SELECT sum(octet_length(response_events.sealed)) AS bytes
        FROM response_events WHERE response_id = stored_responses.id AND stored_responses.id LIKE 'resp%'
    ) AS events ON true
    WHERE team_id = :team_id AND created_at > :since
""")
BYTES_OF_CONVERSATIONS = text(f"""
    SELECT coalesce(sum(bytes + octet_length(sealed) + {OF_A_CONVERSATION}), 0) AS bytes
    FROM conversations WHERE team_id = :team_id AND touched_at > :since
""")  # noqa: S608  (a constant of ours)

PURGE = text("""
    DELETE FROM stored_responses WHERE id IN (
        SELECT id FROM stored_responses WHERE created_at <= :until LIMIT :limit FOR UPDATE SKIP LOCKED
    )
""")
PURGE_CONVERSATIONS = text("""
    DELETE FROM conversations WHERE id IN (
        SELECT id FROM conversations WHERE touched_at <= :until LIMIT :limit FOR UPDATE SKIP LOCKED
    )
""")
