# Items that may crash their workers: each runs in a worker that runs nothing else, so that a crash then tells
# of it alone, and after three of those it fails. The first two losses prove nothing: what ran beside was lost as well.

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.batch.claims import CLAIMED, IS_DUE, LEASE, LOSSES, RUNS, SUSPECT_AFTER, ClaimedItem, claimed_item
from gateway.batch.finishing import ItemResult
from gateway.batch.results import error_of
from gateway.core.clock import Clock

MOST_ALONE = 3  # losses of an item that ran alone


async def has_suspects(connection: AsyncConnection) -> bool:
    """Return whether an item that must run alone may run now."""
    return (await connection.execute(FIRST)).first() is not None


async def claim_suspect(connection: AsyncConnection, owner: str) -> ClaimedItem | None:
    """Claim an item that must run alone; None: none is left for this worker."""
    rows = await connection.execute(CLAIM, {"owner": owner, "lease": timedelta(seconds=LEASE)})
    row = rows.mappings().one_or_none()
    return None if row is None else claimed_item(row)


def result_if_given_up(claim: ClaimedItem, clock: Clock) -> ItemResult | None:
    """Return the end of an item that crashed too many workers; None: it may run."""
    if claim.losses < SUSPECT_AFTER + MOST_ALONE:
        return None
    message = (
        f"{claim.losses} workers died while they ran this request, the last {MOST_ALONE} of them while they ran "
        "nothing else. It is not tried again. Look for what is unusual in it."
    )
    return ItemResult(claim=claim, status="failed", request_id=clock.new_id(), error=error_of("worker_lost", message))


FIND = f"""
    SELECT batch_id, position FROM batch_items AS item
    WHERE losses > 0 AND {IS_DUE} AND {LOSSES} >= {SUSPECT_AFTER}
      AND batch_id IN (SELECT id FROM batches WHERE status = 'in_progress' AND expires_at > clock_timestamp())
    LIMIT 1
"""  # noqa: S608  (all of it is ours)
FIRST = text(FIND)
CLAIM = text(f"""
    WITH found AS MATERIALIZED ({FIND} FOR UPDATE SKIP LOCKED)
    UPDATE batch_items AS item
    SET {RUNS}
    FROM found, batches
    WHERE batches.id = found.batch_id AND item.batch_id = found.batch_id AND item.position = found.position
    RETURNING {CLAIMED}
""")  # noqa: S608  (all of it is ours)
