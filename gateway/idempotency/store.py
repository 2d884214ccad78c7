# Calls that came with an Idempotency-Key, in Postgres: who runs which, until when that is believed, and what was
# answered. One statement or one short transaction per verb. Leases go by Postgres' clock, which all gateways share;
# what was answered is kept sealed, in its place.

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from weakref import WeakValueDictionary

import structlog
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.records import UsageRecord
from billing.core.store_errors import POSTGRES_AWAY, is_about_a_value
from billing.ledger.ledger import TooOld, insert_records
from gateway.core.clock import Clock
from gateway.idempotency.stored_answers import Claim, Place, StoredAnswer, seal, unseal
from gateway.storage.database import Database
from gateway.storage.encryption import Sealer

LEASE = 10.0  # seconds that a call is believed to run after its owner was last heard of
RENEW_EVERY = 3.0  # seconds
PURGED_AT_ONCE = 500  # rows in one transaction


log = structlog.get_logger(__name__)


class Running(Struct, frozen=True):
    """Another gateway or task runs the call."""


class Reused(Struct, frozen=True):
    """The key stands for another request."""


class Answered(Struct, frozen=True):
    """The call has been answered."""

    request_id: str  # of the call that did
    answer: StoredAnswer


# What is stored in the transaction that stores an answer. It may be done again.
Also = Callable[[AsyncConnection], Awaitable[None]]

Found = Claim | Running | Reused | Answered


class Lookout(asyncio.Lock):
    """Of all who wait for one call, one looks at a time; what it has seen answered, the others need not ask for."""

    seen: Answered | None = None


class IdempotencyStore:
    """The calls and answers of all gateways, and the leases of this one's. ``run`` keeps the leases alive."""

    def __init__(
        self, database: Database, clock: Clock, sealer: Sealer, *, retention: float, lease: float = LEASE
    ) -> None:
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._database = database
        self._clock = clock
        self._sealer = sealer
        self._retention = retention  # seconds
        self._lease = lease  # seconds
        self._owned: dict[Claim, float] = {}  # the calls that run here; when each was ours for certain
        self._lookouts: WeakValueDictionary[tuple[Place, bytes], Lookout] = WeakValueDictionary()

    def follow(self, retention: float) -> None:
        """Keep answers for so many seconds from now on."""
        self._retention = retention

    async def claim(self, wanted: Claim) -> Found:
        """Return ``wanted`` if it is this gateway's to run now: it has not run, or its gateway is dead, or the answer
        is past its time. Else say what there is. Raises StoredAnswerUnreadable.
        """
        values = _where(wanted.place) | {"now": self._moment()}
        async with self._database.at_once() as connection:
            row = (await connection.execute(LOOK, values)).one_or_none()
            if row is not None and row.body_digest in wanted.others:  # it began under another pepper
                wanted = replace(wanted, digest=row.body_digest)
            if row is None or (row.is_abandoned and row.body_digest == wanted.digest):
                values |= {
                    "digest": wanted.digest,
                    "request_id": wanted.request_id,
                    "owner": self.owner,
                    "lease": self._lease,
                    "expires_at": self._moment(self._retention),
                }
                is_ours = (await connection.execute(CLAIM, values)).one_or_none() is not None
                return wanted if is_ours else Running()  # another claim was faster; whose, the next look tells
        if row.body_digest != wanted.digest:
            return Reused()
        if row.status is None:
            return Running()
        was = Claim(wanted.place, wanted.digest, row.request_id)
        return Answered(row.request_id, await unseal(self._sealer, was, row.answer or b""))

    async def store(
        self, claim: Claim, answer: StoredAnswer, record: UsageRecord | None, also: Also | None = None
    ) -> bool:
        """Keep the answer and book its usage record, if it has one; return False if the call was taken over or off.

        Both are done, and what is to be stored ``also``, or nothing is. Doing it again changes nothing, so it may be
        tried until Postgres has said that it is done.
        """
        sealed = await seal(self._sealer, claim, answer)
        values = _where(claim.place) | {
            "request_id": claim.request_id,
            "status": answer.status,
            "answer": sealed,
            "expires_at": self._moment(self._retention),
        }
        try:
            return await self._store(values, record, also)
        except (DBAPIError, TooOld) as exc:
            if isinstance(exc, DBAPIError) and not is_about_a_value(exc):
                raise
            # The ledger does not take this record. The journal has it, and operators will find it there.
            log.error("record_not_booked_with_its_answer", request_id=claim.request_id, error=repr(exc))
            return await self._store(values, None, also)

    async def is_stored(self, claim: Claim) -> bool:
        """Whether the call's answer is kept and its record booked, once no earlier try to store it is under way."""
        values = _where(claim.place) | {"request_id": claim.request_id}
        async with self._database.at_once() as connection:
            return (await connection.execute(IS_STORED, values)).scalar_one_or_none() is True

    async def release(self, claim: Claim) -> None:
        """Forget a call that ended without an answer to keep, never an answered one: the next request runs it."""
        values = _where(claim.place) | {"request_id": claim.request_id}
        async with self._database.at_once() as connection:
            await connection.execute(RELEASE, values)

    async def call_off(self, connection: AsyncConnection, place: Place) -> None:
        """Take the call at ``place`` from its gateway, should it run: what it comes to is not stored."""
        await connection.execute(CALL_OFF, _where(place))

    async def is_alive(self, connection: AsyncConnection, place: Place) -> bool:
        """Whether a gateway runs the call at ``place``; the row stays locked."""
        return (await connection.execute(IS_ALIVE, _where(place))).scalar_one_or_none() is True

    def lookout(self, wanted: Claim) -> Lookout:
        """Return what requests share that wait here for the same answer, as long as any does.

        Not with requests for something else under the same key: what one of them sees is no answer to them.
        """
        return self._lookouts.setdefault((wanted.place, wanted.digest), Lookout())

    @contextmanager
    def leased(self, claim: Claim, since: float) -> Iterator[None]:
        """Keep the lease of ``claim`` alive inside the block. ``since``: monotonic seconds, before it was claimed."""
        self._owned[claim] = since
        try:
            yield
        finally:
            self._owned.pop(claim, None)

    def may_be_lost(self, claim: Claim) -> bool:
        """Whether another gateway may run a call by now that is leased here: this one stood still for too long."""
        return self._clock.monotonic() - self._owned.get(claim, 0.0) >= self._lease

    async def run(self) -> None:
        """Renew the leases of what runs here, until cancelled."""
        while True:
            await asyncio.sleep(min(RENEW_EVERY, self._lease / 3))
            try:
                await self.renew()
            except POSTGRES_AWAY as exc:
                log.warning("idempotency_leases_not_renewed", calls=len(self._owned), error=repr(exc))

    async def renew(self) -> None:
        """Renew the leases of what runs here."""
        if not self._owned:
            return
        ids = sorted({claim.request_id for claim in self._owned})  # a key and its response in the background share one
        since, values = self._clock.monotonic(), {"ids": ids, "lease": self._lease}
        async with self._database.begin() as connection:
            rows = (await connection.execute(RENEW, values)).all()
        renewed = {(Place(row.team_id, row.endpoint, row.key), row.request_id) for row in rows}
        self._owned |= {claim: since for claim in self._owned if (claim.place, claim.request_id) in renewed}

    async def _store(self, values: dict[str, object], record: UsageRecord | None, also: Also | None) -> bool:
        async with self._database.begin() as connection:
            is_ours = (await connection.execute(STORE, values)).one_or_none() is not None
            if is_ours and also is not None:
                await also(connection)
            if is_ours and record is not None:
                await insert_records(connection, [record], today=self._clock.today())
        return is_ours

    def _moment(self, ahead: float = 0.0) -> datetime:
        return self._clock.moment() + timedelta(seconds=ahead)


async def purge_expired(database: Database, clock: Clock) -> int:
    """Delete the answers that are past their time, and the calls that were never finished; return how many."""
    return await database.purge(PURGE, PURGED_AT_ONCE, now=clock.moment())


# A row is one of: running (leased, no status), abandoned (its lease is over, no status), answered (status, no lease).

CLAIM = text("""
    INSERT INTO idempotency AS known (team_id, endpoint, key, body_digest, request_id, owner, lease_until, expires_at)
    VALUES (:team_id, :endpoint, :key, :digest, :request_id, :owner,
            clock_timestamp() + make_interval(secs => CAST(:lease AS double precision)), :expires_at)
    ON CONFLICT (team_id, endpoint, key) DO UPDATE
    SET body_digest = excluded.body_digest, request_id = excluded.request_id, owner = excluded.owner,
        lease_until = excluded.lease_until, expires_at = excluded.expires_at, created_at = now(),
        status = NULL, answer = NULL
    WHERE (known.lease_until IS NULL OR known.lease_until < clock_timestamp())
      AND (known.expires_at <= :now OR (known.status IS NULL AND known.body_digest = excluded.body_digest))
    RETURNING 1
""")

LOOK = text("""
    SELECT body_digest, request_id, status, answer,
           status IS NULL AND lease_until < clock_timestamp() AS is_abandoned
    FROM idempotency
    WHERE team_id = :team_id AND endpoint = :endpoint AND key = :key
      AND (expires_at > :now OR lease_until >= clock_timestamp())
""")

STORE = text("""
    UPDATE idempotency SET status = :status, answer = :answer, lease_until = NULL, expires_at = :expires_at
    WHERE team_id = :team_id AND endpoint = :endpoint AND key = :key AND request_id = :request_id
    RETURNING 1
""")

# Waits for a transaction that has updated the row and is still to commit.
IS_STORED = text("""
    SELECT status IS NOT NULL FROM idempotency
    WHERE team_id = :team_id AND endpoint = :endpoint AND key = :key AND request_id = :request_id
    FOR UPDATE
""")

RELEASE = text("""
    DELETE FROM idempotency
    WHERE team_id = :team_id AND endpoint = :endpoint AND key = :key AND request_id = :request_id AND status IS NULL
""")

CALL_OFF = text("""
    DELETE FROM idempotency WHERE team_id = :team_id AND endpoint = :endpoint AND key = :key AND status IS NULL
""")

IS_ALIVE = text("""
    SELECT lease_until >= clock_timestamp() FROM idempotency
    WHERE team_id = :team_id AND endpoint = :endpoint AND key = :key
    FOR UPDATE
""")

RENEW = text("""
    UPDATE idempotency SET lease_until = clock_timestamp() + make_interval(secs => CAST(:lease AS double precision))
    WHERE request_id = ANY(CAST(:ids AS text[])) AND lease_until IS NOT NULL
    RETURNING team_id, endpoint, key, request_id
""")

PURGE = text("""
    DELETE FROM idempotency WHERE (team_id, endpoint, key) IN (
        SELECT team_id, endpoint, key FROM idempotency
        WHERE expires_at <= :now AND (lease_until IS NULL OR lease_until < clock_timestamp())
        LIMIT :limit FOR UPDATE SKIP LOCKED
    )
""")


def _where(place: Place) -> dict[str, object]:
    return {"team_id": place.team_id, "endpoint": place.endpoint, "key": place.key}
