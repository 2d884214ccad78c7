# The outbox: callbacks as rows, written in the transaction that they speak of, claimed by any worker, and kept until
# delivered or given up. A claim is a lease: when its worker dies, another delivers again under the same id.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec import Struct
from sqlalchemy import and_, delete, func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.outbox.schedule import KEEP_TRYING, Delivered, DeliveryResult, GiveUp, NextStep, TryAgain
from gateway.outbox.signing import Event
from gateway.storage.tables import callbacks
from protocol.errors import Unshown

LEASE = 30.0  # seconds; a try takes ten at most
PER_RECEIVER = 4  # tries at once to one host and port, by one worker: a slow one takes no more
PER_TEAM = 8  # tries at once for one team, by one worker, however many hosts it names


class ClaimedCallback(Unshown, Struct, frozen=True, kw_only=True):
    """A callback that this worker is to try now."""

    id: str
    team_id: str
    event: str
    url: str
    receiver: str  # host and port
    body: bytes
    tries: int  # this one included
    expires_at: float  # unix seconds
    lease_until: datetime


async def enqueue(
    connection: AsyncConnection, event: Event, *, team_id: str, url: str, batch_id: str | None = None
) -> str:
    """Put an event into the outbox and return its id. It goes out when the caller's transaction commits, if it does.

    ``url`` as Guard.check returned it.
    """
    now = _moment(event.created_at)
    row = {
        "id": event.id,
        "team_id": team_id,
        "batch_id": batch_id,
        "event": event.type,
        "url": url,
        "body": event.body(),
        "next_try_at": now,
        "created_at": now,
        "expires_at": now + timedelta(seconds=KEEP_TRYING),
    }
    await connection.execute(insert(callbacks).values(**row))
    return event.id


async def claim_due(
    connection: AsyncConnection, *, owner: str, now: float, running: Sequence[ClaimedCallback], at_most: int
) -> list[ClaimedCallback]:
    """Claim up to ``at_most`` callbacks that are due, in turns between receivers. ``running``: what is tried here now.

    What one receiver or one team may have at once bounds what can be claimed, so that none can take all room.
    """
    values = {
        "owner": owner,
        "now": _moment(now),
        "lease_until": _moment(now + LEASE),
        "running_ids": [each.id for each in running],
        "receivers": [each.receiver for each in running],
        "teams": [each.team_id for each in running],
        "per_receiver": PER_RECEIVER,
        "per_team": PER_TEAM,
        "at_most": at_most,
    }
    rows = (await connection.execute(CLAIM, values)).mappings()
    return [
        ClaimedCallback(**{**row, "body": bytes(row["body"]), "expires_at": row["expires_at"].timestamp()})
        for row in rows
    ]


async def record_try(
    connection: AsyncConnection,
    claimed: ClaimedCallback,
    result: DeliveryResult,
    step: NextStep,
    *,
    owner: str,
    now: float,
) -> None:
    """Write down what became of a try. A failure counts only while the lease is ours; a delivery always."""
    values: dict[str, Any] = {
        "last_status": result.status,
        "last_error": result.error,
        "lease_owner": None,
        "lease_until": None,
    }
    ours = and_(callbacks.c.lease_owner == owner, callbacks.c.lease_until == claimed.lease_until)
    query = update(callbacks).where(callbacks.c.id == claimed.id, callbacks.c.delivered_at.is_(None))
    match step:
        case Delivered():
            query = query.values(**values, delivered_at=_moment(now), given_up_at=None)
        case TryAgain(at):
            query = query.where(ours).values(**values, next_try_at=_moment(at))
        case GiveUp():
            query = query.where(ours).values(**values, given_up_at=_moment(now))
    await connection.execute(query)


async def give_back(connection: AsyncConnection, owner: str) -> None:
    """End this worker's leases, so that others need not wait until they run out."""
    query = update(callbacks).where(callbacks.c.lease_owner == owner)
    await connection.execute(query.values(lease_owner=None, lease_until=None))


async def hasten(connection: AsyncConnection, team_id: str) -> None:
    """Make whatever of a team still waits due now: what it waited for may be there."""
    query = update(callbacks).where(callbacks.c.team_id == team_id, OPEN)
    await connection.execute(query.values(next_try_at=func.now()))


async def follow_url(connection: AsyncConnection, team_id: str, before: str, after: str | None) -> None:
    """Send what the team's old URL never took to its new one; without a new one, give it up.

    Callbacks of batches have URLs of their own and stay as they are.
    """
    undelivered = and_(callbacks.c.team_id == team_id, callbacks.c.url == before, callbacks.c.batch_id.is_(None))
    undelivered = and_(undelivered, callbacks.c.delivered_at.is_(None))
    if after is None:
        changes: dict[str, Any] = {"given_up_at": func.now(), "last_error": "The team's webhook_url was taken away."}
        await connection.execute(update(callbacks).where(undelivered, OPEN).values(**changes))
    else:
        await connection.execute(update(callbacks).where(undelivered).values(url=after))
        await hasten(connection, team_id)


async def reopen(connection: AsyncConnection, callback_id: str, now: float) -> Mapping[Any, Any] | None:
    """Have a callback delivered again, from now on for another 24 hours; return its row, None if there is none."""
    if "\0" in callback_id:  # Postgres takes no such text
        return None
    query = update(callbacks).where(callbacks.c.id == callback_id).returning(callbacks)
    changes = {
        "tries": 0,
        "next_try_at": _moment(now),
        "expires_at": _moment(now + KEEP_TRYING),
        "delivered_at": None,
        "given_up_at": None,
    }
    return (await connection.execute(query.values(**changes))).mappings().one_or_none()


async def find_callback(connection: AsyncConnection, callback_id: str) -> Mapping[Any, Any] | None:
    """Return a callback's row, or None."""
    if "\0" in callback_id:
        return None
    query = select(callbacks).where(callbacks.c.id == callback_id)
    return (await connection.execute(query)).mappings().one_or_none()


async def list_callbacks(
    connection: AsyncConnection,
    *,
    team_id: str | None = None,
    is_undelivered: bool = False,
    after: str | None = None,
    limit: int = 100,
) -> list[Mapping[Any, Any]]:
    """Return callbacks, newest first; ``after`` is the id of the last one already seen."""
    query = select(callbacks).order_by(callbacks.c.id.desc()).limit(limit)
    if team_id is not None:
        query = query.where(callbacks.c.team_id == team_id)
    if is_undelivered:
        query = query.where(callbacks.c.given_up_at.is_not(None))
    if after is not None:
        query = query.where(callbacks.c.id < after)
    return list((await connection.execute(query)).mappings())


async def drop_old(connection: AsyncConnection, before: float) -> int:
    """Drop what was delivered or given up before a moment, and return how many."""
    ended = func.coalesce(callbacks.c.delivered_at, callbacks.c.given_up_at)
    return (await connection.execute(delete(callbacks).where(ended < _moment(before)))).rowcount


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


OPEN = and_(callbacks.c.delivered_at.is_(None), callbacks.c.given_up_at.is_(None))

IS_DUE = (
    "delivered_at IS NULL AND given_up_at IS NULL AND next_try_at <= :now "
    "AND (lease_until IS NULL OR lease_until <= :now)"
)
# Places count what runs here already, then what is due, oldest first: those beyond what a receiver, then a team may
# have at once wait. The last step checks again what another worker may have claimed since the first one looked.
CLAIM = text(f"""
    WITH due AS (
        SELECT id, team_id, next_try_at,
               row_number() OVER (PARTITION BY receiver ORDER BY next_try_at, id)
               + (SELECT count(*) FROM unnest(CAST(:receivers AS text[])) AS other WHERE other = receiver) AS place
        FROM callbacks
        WHERE {IS_DUE} AND id <> ALL(CAST(:running_ids AS text[]))
    ), admitted AS (
        SELECT id, place, next_try_at,
               row_number() OVER (PARTITION BY team_id ORDER BY place, next_try_at, id)
               + (SELECT count(*) FROM unnest(CAST(:teams AS text[])) AS other WHERE other = team_id) AS team_place
        FROM due
        WHERE place <= :per_receiver
    ), chosen AS (
        SELECT callbacks.id
        FROM admitted JOIN callbacks USING (id)
        WHERE team_place <= :per_team AND {IS_DUE.replace("next_try_at", "callbacks.next_try_at")}
        ORDER BY place, admitted.next_try_at, callbacks.id
        LIMIT :at_most
        FOR UPDATE OF callbacks SKIP LOCKED
    )
    UPDATE callbacks
    SET lease_owner = :owner, lease_until = :lease_until, tries = tries + 1
    FROM chosen
    WHERE callbacks.id = chosen.id
    RETURNING callbacks.id, team_id, event, url, receiver, body, tries, expires_at, callbacks.lease_until
""")  # noqa: S608  (the condition is ours)
