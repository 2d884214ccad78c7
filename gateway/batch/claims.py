# How workers get the items of batches: they claim them under a lease, renew it, and release what cannot run now. A
# lease that ended frees its items for others, and `tries` fences: what a worker reports of a try that is not the last
# one changes nothing. An item that was lost with its worker twice is a suspect: it may crash its workers, so it runs in
# one that runs nothing else, and a crash then tells of it alone. The first two losses prove nothing: what ran beside
# was lost as well.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.batch.fair_schedule import RunnableBatch

LEASE = 30.0  # seconds that a claim lasts without renewal
SUSPECT_AFTER = 2  # losses, from which on an item runs alone


class ClaimedItem(Struct, frozen=True, kw_only=True):
    """An item that a worker runs."""

    batch_id: str
    position: int
    custom_id: str
    body: bytes
    tries: int  # this one included
    losses: int  # tries whose worker died, or let the lease expire
    is_first: bool  # whether it never waited for a try
    endpoint: str
    concurrency_group: str  # whose limit it counts against
    key_id: str
    priority: str
    expires_at: float  # unix seconds; of its batch
    is_internal: bool = False  # its batch was created by the gateway itself
    is_live_only: bool = False  # no batch of a provider answered it

    @property
    def is_of_several(self) -> bool:
        """Whether its batch names several models: one of them failing says nothing about the next."""
        return self.concurrency_group == self.batch_id

    @property
    def name(self) -> str:
        """What its usage records are found under."""
        return f"{self.batch_id}:{self.position}"


async def use_due_index(connection: AsyncConnection) -> None:
    """Let this transaction read items in the order of batch_items_due_idx, whatever the statistics say.

    They lag by minutes: Postgres would estimate a new batch as small, and sort all of it for each claim.
    """
    await connection.execute(BY_INDEX)


async def waiting_batches(connection: AsyncConnection) -> list[RunnableBatch]:
    """Return the batches with items that may run now."""
    rows = (await connection.execute(WAITING)).mappings()
    return [RunnableBatch(**{**row, "expires_at": row["expires_at"].timestamp()}) for row in rows]


async def claim_items(
    connection: AsyncConnection, batch_id: str, owner: str, at_most: int, room: int
) -> list[ClaimedItem]:
    """Claim up to ``at_most`` items of a batch, as they are due, until they have ``room`` bytes; at least one."""
    values = {"batch_id": batch_id, "owner": owner, "at_most": at_most, "room": room, "lease": timedelta(seconds=LEASE)}
    rows = (await connection.execute(CLAIM, values)).mappings()
    return sorted((claimed_item(row) for row in rows), key=lambda claim: claim.position)


def claimed_item(row: Mapping[Any, Any]) -> ClaimedItem:
    """Return the claim that a row of ``CLAIMED`` columns tells of."""
    return ClaimedItem(**{**row, "body": bytes(row["body"]), "expires_at": row["expires_at"].timestamp()})


async def has_suspects(connection: AsyncConnection) -> bool:
    """Return whether an item that must run alone may run now."""
    return (await connection.execute(FIRST_SUSPECT)).first() is not None


async def claim_suspect(connection: AsyncConnection, owner: str) -> ClaimedItem | None:
    """Claim an item that must run alone; None: none is left for this worker."""
    rows = await connection.execute(CLAIM_SUSPECT, {"owner": owner, "lease": timedelta(seconds=LEASE)})
    row = rows.mappings().one_or_none()
    return None if row is None else claimed_item(row)


async def renew_leases(connection: AsyncConnection, owner: str, claims: Sequence[ClaimedItem]) -> None:
    """Renew the leases of items that still run here."""
    values = {"owner": owner, "tries": _tries(claims), "lease": timedelta(seconds=LEASE)}
    await connection.execute(RENEW, values)


async def requeue(connection: AsyncConnection, owner: str, claim: ClaimedItem, wait: float, *, is_try: bool) -> None:
    """Let an item wait ``wait`` seconds for its next try. ``is_try``: this one counts, because an upstream had it."""
    values = {"owner": owner, "tries": _tries([claim]), "wait": timedelta(seconds=wait), "less": 0 if is_try else 1}
    await connection.execute(REQUEUE, values)


def _tries(claims: Sequence[ClaimedItem]) -> str:
    told: list[dict[str, Any]] = [
        {"batch_id": each.batch_id, "position": each.position, "tries": each.tries}
        for each in sorted(claims, key=lambda each: (each.batch_id, each.position))  # the common lock order
    ]
    return msgspec.json.encode(told).decode()


# Items that were never tried come first, in order, then retries by due time: an item that cannot run blocks
# none behind it, and is not even read. A scan of batch_items_due_idx passes over no more than what runs; with a
# volatile clock_timestamp() it would read all.
DUE = "coalesce(not_before, '-infinity')"
IS_DUE = f"""
    status IN ('queued', 'running') AND {DUE} <= statement_timestamp()
    AND (status = 'queued' OR lease_until < statement_timestamp())
"""
LOSSES = "(item.losses + CAST(item.status = 'running' AS integer))"  # with the one that claiming a due item finds
READY = f"{IS_DUE} AND {LOSSES} < {SUSPECT_AFTER}"
TRIES = "json_to_recordset(CAST(:tries AS json)) AS mine (batch_id text, position integer, tries integer)"
STILL_OURS = """
    item.batch_id = mine.batch_id AND item.position = mine.position AND item.tries = mine.tries
    AND item.lease_owner = :owner AND item.status = 'running'
"""
BY_INDEX = text("SET LOCAL enable_sort = off")
GROUP = "coalesce(batches.model, batches.id)"
WAITING = text(f"""
    SELECT batches.id AS batch_id, team_id, teams.weight, priority, expires_at, total - completed - failed AS left,
           {GROUP} AS concurrency_group
    FROM batches JOIN teams ON teams.id = team_id,
    LATERAL (
        SELECT FROM batch_items AS item WHERE batch_id = batches.id AND {READY} ORDER BY {DUE}, position LIMIT 1
    ) AS first
    WHERE batches.status = 'in_progress' AND expires_at > clock_timestamp()
""")  # noqa: S608  (all of it is ours)
RUNS = f"""
    status = 'running', tries = item.tries + 1, losses = {LOSSES}, lease_owner = :owner,
    lease_until = clock_timestamp() + CAST(:lease AS interval)
"""
CLAIMED = f"""
    item.batch_id, item.position, custom_id, body, item.tries, item.losses, endpoint, {GROUP} AS concurrency_group,
    key_id, priority, expires_at, is_aside AS is_internal, item.not_before IS NULL AS is_first,
    is_live_only
"""
# As a common table expression: a subquery with a limit may be run more than once.
CLAIM = text(f"""
    WITH due AS MATERIALIZED (
        SELECT position, octet_length(body) AS size FROM batch_items AS item
        WHERE batch_id = :batch_id AND {READY}
        ORDER BY {DUE}, position LIMIT :at_most FOR UPDATE SKIP LOCKED
    ), fitting AS MATERIALIZED (
        SELECT position, sum(size) OVER (ROWS UNBOUNDED PRECEDING) - size AS before FROM due
    )
    UPDATE batch_items AS item
    SET {RUNS}
    FROM fitting, batches
    WHERE batches.id = :batch_id AND batches.status = 'in_progress'
      AND item.batch_id = :batch_id AND item.position = fitting.position
      AND fitting.before < :room
    RETURNING {CLAIMED}
""")  # noqa: S608  (all of it is ours)
RENEW = text(f"""
    UPDATE batch_items AS item SET lease_until = clock_timestamp() + CAST(:lease AS interval)
    FROM {TRIES} WHERE {STILL_OURS}
""")  # noqa: S608  (all of it is ours)
# A cancelled batch takes nothing back.
REQUEUE = text(f"""
    UPDATE batch_items AS item
    SET status = CASE WHEN batches.status = 'in_progress' THEN 'queued' ELSE 'cancelled' END,
        body = CASE WHEN batches.status = 'in_progress' THEN item.body ELSE '' END,
        tries = item.tries - :less, lease_owner = NULL, lease_until = NULL,
        not_before = clock_timestamp() + CAST(:wait AS interval)
    FROM {TRIES}, batches WHERE {STILL_OURS} AND batches.id = item.batch_id
""")  # noqa: S608  (all of it is ours)
FIND_SUSPECT = f"""
    SELECT batch_id, position FROM batch_items AS item
    WHERE losses > 0 AND {IS_DUE} AND {LOSSES} >= {SUSPECT_AFTER}
      AND batch_id IN (SELECT id FROM batches WHERE status = 'in_progress' AND expires_at > clock_timestamp())
    LIMIT 1
"""  # noqa: S608  (all of it is ours)
FIRST_SUSPECT = text(FIND_SUSPECT)
CLAIM_SUSPECT = text(f"""
    WITH found AS MATERIALIZED ({FIND_SUSPECT} FOR UPDATE SKIP LOCKED)
    UPDATE batch_items AS item
    SET {RUNS}
    FROM found, batches
    WHERE batches.id = found.batch_id AND item.batch_id = found.batch_id AND item.position = found.position
    RETURNING {CLAIMED}
""")  # noqa: S608  (all of it is ours)
