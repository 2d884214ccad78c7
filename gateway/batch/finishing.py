# How the items of batches end: answered or failed by the worker that holds them, or with their batch, which is late or
# cancelled. Items that end together are stored, billed and counted in one transaction.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec
from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.records import UsageRecord
from billing.ledger.ledger import insert_records
from gateway.batch.claims import STILL_OURS, ClaimedItem
from gateway.batch.results import error_of, response_of
from gateway.batch.store import end_batch
from gateway.core.clock import Clock
from gateway.dialects.table import FOR_BATCHES
from protocol.errors import ServiceError


class ItemResult(Struct, frozen=True, kw_only=True):
    """How a try ended: for good, with ``status`` and what the line says."""

    claim: ClaimedItem
    status: str  # "completed" or "failed"
    request_id: str | None = None
    response: bytes | None = None
    error: bytes | None = None
    record: UsageRecord | None = None  # to be recorded with it: the try that is billed
    is_upstreams_fault: bool = False
    input_tokens: int = 0
    output_tokens: int = 0
    cost_nanousd: int = 0


def failed_result(
    claim: ClaimedItem, request_id: str, error: ServiceError, *, is_upstreams_fault: bool = False
) -> ItemResult:
    """Return the end of an item whose answer is an error, as the endpoint would say it."""
    told = FOR_BATCHES[claim.endpoint].errors.body(error, request_id)
    response = response_of(error.status, request_id, msgspec.json.encode(told))
    return ItemResult(
        claim=claim, status="failed", request_id=request_id, response=response, is_upstreams_fault=is_upstreams_fault
    )


async def finish_items(
    connection: AsyncConnection, clock: Clock, owner: str, ends: Sequence[ItemResult], keep: float
) -> set[str]:
    """Store how items ended, record what they cost, count their batches down; return the names of items held here.

    Idempotent. The count that reaches its total ends its batch. Items that another worker holds now are stored by that
    worker: no usage is recorded for them here.
    """
    told = [
        {
            "batch_id": one.claim.batch_id,
            "position": one.claim.position,
            "tries": one.claim.tries,
            "status": one.status,
            "request_id": one.request_id,
            "response": one.response.decode() if one.response is not None else None,
            "error": one.error.decode() if one.error is not None else None,
        }
        for one in sorted(ends, key=lambda one: (one.claim.batch_id, one.claim.position))
    ]
    # The batches first: every transaction that ends or cancels one takes the same locks in the same order.
    await connection.execute(LOCK, {"ids": sorted({one.claim.batch_id for one in ends})})
    values = {"owner": owner, "ends": msgspec.json.encode(told).decode(), "now": clock.moment()}
    new = {f"{row.batch_id}:{row.position}" for row in (await connection.execute(FINISH, values)).all()}
    # A repeat: the acknowledgement of the first commit was lost.
    known = {f"{row.batch_id}:{row.position}" for row in (await connection.execute(KNOWN, values)).all()}
    ours = [one for one in ends if one.claim.name in new | known]
    await insert_records(connection, [one.record for one in ours if one.record is not None], today=clock.today())
    sums: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for one in ours:
        if one.claim.name not in new:
            continue
        of_batch = sums[one.claim.batch_id]
        of_batch[one.status] += 1
        for name in ("input_tokens", "output_tokens", "cost_nanousd"):
            of_batch[name] += getattr(one, name)
    for batch_id in sorted(sums):
        counted = {name: sums[batch_id][name] for name in COUNTED}
        row = (await connection.execute(COUNT, {"id": batch_id, **counted})).one()
        if row.is_last:
            await end_batch(connection, clock, batch_id, keep)
    return new | known


async def expire_batches(connection: AsyncConnection, clock: Clock, keep: float) -> list[str]:
    """End batches whose window is over; what they have is kept. Return their ids."""
    now = clock.moment()
    late = (await connection.execute(LATE, {"now": now})).scalars().all()
    error = error_of("batch_expired", "This request could not be executed before the completion window expired.")
    for batch_id in late:
        await connection.execute(EXPIRE, {"batch_id": batch_id, "now": now, "error": error})
        await end_batch(connection, clock, batch_id, keep)
    return list(late)


async def finish_cancelled(connection: AsyncConnection, clock: Clock, keep: float) -> None:
    """End cancelled batches whose last items ran in a dead worker."""
    for batch_id in (await connection.execute(DYING)).scalars().all():
        await connection.execute(FINISH_CANCELLED, {"batch_id": batch_id, "now": clock.moment()})
        await end_batch(connection, clock, batch_id, keep)


COUNTED = ("completed", "failed", "input_tokens", "output_tokens", "cost_nanousd")
LOCK = text("SELECT id FROM batches WHERE id = ANY(CAST(:ids AS text[])) ORDER BY id FOR NO KEY UPDATE")
# A request body is erased once it is answered.
FINISH = text(f"""
    UPDATE batch_items AS item
    SET status = mine.status, request_id = mine.request_id, finished_at = :now, lease_owner = NULL, lease_until = NULL,
        body = '', response = convert_to(mine.response, 'UTF8'), error = convert_to(mine.error, 'UTF8')
    FROM json_to_recordset(CAST(:ends AS json)) AS mine
         (batch_id text, position integer, tries integer, status text, request_id uuid, response text, error text)
    WHERE {STILL_OURS}
    RETURNING item.batch_id, item.position
""")  # noqa: S608  (all of it is ours)
KNOWN = text("""
    SELECT item.batch_id, item.position FROM batch_items AS item
    JOIN json_to_recordset(CAST(:ends AS json)) AS mine (batch_id text, position integer, status text, request_id uuid)
    ON item.batch_id = mine.batch_id AND item.position = mine.position AND item.request_id = mine.request_id
       AND item.status = mine.status
""")
COUNT = text(f"""
    UPDATE batches SET {", ".join(f"{name} = {name} + :{name}" for name in COUNTED)}
    WHERE id = :id
    RETURNING status = 'cancelling' OR completed + failed >= total AS is_last
""")  # noqa: S608  (all of it is ours)
LATE = text("""
    SELECT id FROM batches WHERE status IN ('in_progress', 'cancelling') AND expires_at <= :now
    ORDER BY id LIMIT 10 FOR NO KEY UPDATE SKIP LOCKED
""")
EXPIRE = text("""
    UPDATE batch_items SET status = 'expired', body = '', finished_at = :now, error = :error, lease_owner = NULL
    WHERE batch_id = :batch_id AND status IN ('queued', 'running')
""")
DYING = text("""
    SELECT id FROM batches
    WHERE status = 'cancelling' AND NOT EXISTS (
        SELECT FROM batch_items
        WHERE batch_id = id AND status = 'running' AND lease_until >= clock_timestamp()
    )
    ORDER BY id LIMIT 10 FOR NO KEY UPDATE SKIP LOCKED
""")
FINISH_CANCELLED = text("""
    UPDATE batch_items SET status = 'cancelled', body = '', finished_at = :now, lease_owner = NULL
    WHERE batch_id = :batch_id AND status IN ('queued', 'running')
""")
