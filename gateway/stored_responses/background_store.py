# Responses that run in the background, in Postgres: the row of one from its beginning, the events of its stream, and
# its end, which one of three says: the gateway that runs it, its caller, or who finds that its gateway is dead. Who
# runs it, and until when that is believed, is a claim as those of calls with an Idempotency-Key.

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
import structlog
from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.records import UsageRecord
from gateway.core.errors import StoredResponseUnreadable, TooManyInBackground
from gateway.idempotency.keeping import keep_until_known
from gateway.idempotency.store import IdempotencyStore
from gateway.idempotency.stored_answers import Claim, Place, StoredAnswer
from gateway.storage.database import Database
from gateway.storage.encryption import Unsealable
from gateway.stored_responses.event_log import Piece
from gateway.stored_responses.store import ResponseStore, is_response
from gateway.stored_responses.turns import Turn
from protocol.errors import BadRequest

ENDPOINT = "responses.background"  # of their claims
READ_AT_ONCE = 50  # pieces of a stream
HAS_RUN = StoredAnswer(200, (), b"")  # what a claim keeps: the response lies in its own row


class Heard(Struct, frozen=True):
    """What a stream said after an event, as far as it was read."""

    pieces: list[Piece]
    is_over: bool  # whether no more comes


log = structlog.get_logger(__name__)


def place_of(team_id: str, response_id: str) -> Place:
    """Return where a response is claimed."""
    return Place(team_id, ENDPOINT, response_id)


class BackgroundStore:
    """The responses of all teams that run in the background, or did."""

    def __init__(self, responses: ResponseStore, calls: IdempotencyStore, database: Database) -> None:
        self.calls = calls
        self._responses = responses
        self._database = database

    async def begin(self, claim: Claim, previous_id: str | None, turn: Turn, piece: Piece, most: int) -> None:
        """Store a response that is to run here, claimed by this gateway. Raises TooManyInBackground, BadRequest."""
        team_id, response_id = claim.place.team_id, claim.place.key
        async with self._database.at_once() as connection:
            running = (await connection.execute(RUNNING, {"team_id": team_id, "endpoint": ENDPOINT})).scalar_one()
        if running >= most:
            raise TooManyInBackground(
                f"{running} responses of the team run in the background, as many as may at once. Wait for one to end."
            )
        await self.calls.claim(claim)
        if not await self._responses.put(team_id, response_id, previous_id, turn, is_open=True):
            await self.calls.release(claim)
            words = "The conversation is too long to be stored, as it must be in the background. Begin another."
            raise BadRequest(words, param="background")
        await self.append(claim.place, [piece])

    async def append(self, place: Place, pieces: Sequence[Piece]) -> bool:
        """Store what a stream said, twice as once; return whether its response is still to be answered."""
        async with self._database.begin() as connection:
            return await self._append(connection, place, pieces)

    async def progress(self, place: Place, turn: Turn) -> None:
        """Store a response as it is now, unless it has ended."""
        async with self._database.at_once() as connection:
            await self._update(connection, place, turn, is_open=True)

    async def finish(self, claim: Claim, turn: Turn, pieces: Sequence[Piece], record: UsageRecord) -> bool:
        """Store how a response ended, what its stream said last and its usage record, in one transaction; return False
        if it was cancelled, deleted, or taken for dead. While Postgres is away, this waits."""

        async def also(connection: AsyncConnection) -> None:
            await self._append(connection, claim.place, pieces)
            await self._update(connection, claim.place, turn, is_open=False)

        return await keep_until_known(self.calls, claim, HAS_RUN, record, also)

    async def fail(self, claim: Claim, turn: Turn, pieces: Sequence[Piece]) -> None:
        """Store that a response failed here, unless it has ended otherwise. Its call keeps its own books."""
        async with self._database.begin() as connection:
            await self.calls.call_off(connection, claim.place)
            await self._append(connection, claim.place, pieces)
            await self._update(connection, claim.place, turn, is_open=False)

    async def cancel(self, place: Place, turn: Turn) -> bool:
        """End a response wherever it runs: its gateway finds that out. Return False if it has ended."""
        async with self._database.begin() as connection:
            await self.calls.call_off(connection, place)
            return await self._update(connection, place, turn, is_open=False)

    async def end_if_dead(self, place: Place, turn: Turn, events: bytes) -> bool:
        """End a response if its gateway is dead, and return whether it was; ``events`` hold one, still to be
        numbered."""
        async with self._database.begin() as connection:
            if await self.calls.is_alive(connection, place):
                return False
            await self.calls.call_off(connection, place)
            last = (await connection.execute(LAST, _row(place))).scalar_one()
            head, _, tail = events.rpartition(NUMBER)  # its callers may have said the same before
            await self._append(connection, place, [(last + 1, b"%s%d%s" % (head, last + 1, tail))])
            return await self._update(connection, place, turn, is_open=False)

    async def delete(self, team_id: str, response_id: str) -> bool:
        """Delete a response for ever, and end it should it run; whether it was there."""
        if not is_response(response_id):
            return False
        place = place_of(team_id, response_id)
        async with self._database.begin() as connection:
            await self.calls.call_off(connection, place)
            return bool((await connection.execute(DELETE, _row(place) | {"since": self._since()})).one_or_none())

    async def is_open(self, place: Place) -> bool:
        """Whether a response is there that has not ended."""
        async with self._database.at_once() as connection:
            return bool((await connection.execute(IS_OPEN, _row(place))).scalar_one_or_none())

    async def hear(self, place: Place, after: int) -> Heard:
        """Return what a stream said after an event."""
        values = _row(place) | {"after": after, "limit": READ_AT_ONCE, "since": self._since()}
        async with self._database.at_once() as connection:
            rows = (await connection.execute(HEAR, values)).all()
        pieces = [(row.last_event, self._events(place, row)) for row in rows if row.last_event is not None]
        return Heard(pieces, not rows or (not rows[0].is_open and len(pieces) < READ_AT_ONCE))

    async def find_news(self, asked: Sequence[tuple[Place, int]]) -> list[int]:
        """Return the places, from 0, of those among some streams that say more after an event, are over, or whose
        gateway is dead."""
        values = {
            "ids": [place.key for place, _ in asked],
            "teams": [place.team_id for place, _ in asked],
            "afters": [after for _, after in asked],
            "endpoint": ENDPOINT,
            "since": self._since(),
        }
        async with self._database.at_once() as connection:
            return list((await connection.execute(NEWS, values)).scalars())

    async def _append(self, connection: AsyncConnection, place: Place, pieces: Sequence[Piece]) -> bool:
        rows = {
            "lasts": [last for last, _ in pieces],
            "sealed": [
                self._responses.sealer.seal(zlib.compress(events, 1), _label(place, last)) for last, events in pieces
            ],
        }
        return (await connection.execute(APPEND, _row(place) | rows)).scalar_one_or_none() is True

    async def _update(self, connection: AsyncConnection, place: Place, turn: Turn, *, is_open: bool) -> bool:
        plain = msgspec.json.encode(turn)
        sealed = await self._responses.sealed(place.team_id, place.key, plain)
        values = _row(place) | {"sealed": sealed, "size": len(plain), "is_open": is_open}
        return (await connection.execute(UPDATE, values)).one_or_none() is not None

    def _events(self, place: Place, row: Any) -> bytes:
        try:
            return zlib.decompress(self._responses.sealer.unseal(row.sealed, _label(place, row.last_event)))
        except (Unsealable, zlib.error) as exc:
            log.error("stored_response_unreadable", team_id=place.team_id, response_id=place.key, error=repr(exc))
            raise StoredResponseUnreadable(f"The stream of '{place.key}' cannot be read any more.") from exc

    def _since(self) -> datetime:
        return self._responses.clock.moment() - timedelta(seconds=self._responses.retention)


NUMBER = b"-1000001"  # stands for the number of an event that is not known yet


def _row(place: Place) -> dict[str, object]:
    return {"id": place.key, "team_id": place.team_id}


def _label(place: Place, last: int) -> str:
    return f"{place.team_id}\n{place.key}\n{last}"


RUNNING = text("""
    SELECT count(*) FROM idempotency
    WHERE team_id = :team_id AND endpoint = :endpoint AND status IS NULL AND lease_until >= clock_timestamp()
""")

# Returns whether the response is still open; no events are added to one that is not.
APPEND = text("""
    WITH response AS (
        SELECT id FROM stored_responses WHERE id = :id AND team_id = :team_id AND is_open
    ), added AS (
        INSERT INTO response_events (response_id, last_event, sealed)
        SELECT response.id, piece.last_event, piece.sealed
        FROM response, unnest(CAST(:lasts AS bigint[]), CAST(:sealed AS bytea[])) AS piece (last_event, sealed)
        ON CONFLICT DO NOTHING
    )
    SELECT true FROM response
""")

UPDATE = text("""
    UPDATE stored_responses SET sealed = CAST(:sealed AS bytea), is_open = CAST(:is_open AS boolean),
        conversation_bytes = CAST(:size AS bigint) + coalesce((
            SELECT before.conversation_bytes FROM stored_responses AS before
            WHERE before.id = stored_responses.previous_id AND before.team_id = :team_id), 0)
    WHERE id = :id AND team_id = :team_id AND is_open
    RETURNING 1
""")

IS_OPEN = text("SELECT is_open FROM stored_responses WHERE id = :id AND team_id = :team_id")

LAST = text("""
    SELECT coalesce(max(last_event), -1) FROM response_events JOIN stored_responses ON id = response_id
    WHERE id = :id AND team_id = :team_id
""")

HEAR = text("""
    SELECT is_open, piece.last_event, piece.sealed
    FROM stored_responses LEFT JOIN LATERAL (
        SELECT last_event, sealed FROM response_events
        WHERE response_id = stored_responses.id AND last_event > :after
        ORDER BY last_event LIMIT :limit
    ) AS piece ON true
    WHERE id = :id AND team_id = :team_id AND created_at > :since
    ORDER BY piece.last_event
""")

NEWS = text("""
    SELECT asked.number - 1
    FROM unnest(CAST(:ids AS text[]), CAST(:teams AS text[]), CAST(:afters AS bigint[]))
        WITH ORDINALITY AS asked (id, team_id, after, number)
    LEFT JOIN stored_responses AS response
        ON response.id = asked.id AND response.team_id = asked.team_id AND created_at > :since
    WHERE response.is_open IS NOT TRUE
        OR EXISTS (SELECT FROM response_events WHERE response_id = response.id AND last_event > asked.after)
        OR NOT EXISTS (
            SELECT FROM idempotency AS claim
            WHERE claim.team_id = asked.team_id AND endpoint = :endpoint AND key = asked.id
                AND lease_until >= clock_timestamp())
""")

DELETE = text("""
    DELETE FROM stored_responses WHERE id = :id AND team_id = :team_id AND created_at > :since RETURNING 1
""")
