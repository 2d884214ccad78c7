# How long batch results are kept, and the answer after they were erased: 410 Gone, not an empty result.

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.batch.store import Batch
from gateway.core.clock import Clock
from gateway.core.errors import Gone


async def check_retained(connection: AsyncConnection, clock: Clock, batch: Batch, keep: float) -> None:
    """Raise Gone if the results of a batch, or a part of them, have been erased. ``keep``: seconds from its end."""
    ended = batch.finalizing_at or batch.failed_at
    if ended is None or not batch.total:
        return
    has_items = bool((await connection.execute(HAS_ITEMS, {"batch_id": batch.id})).scalar_one())
    if not has_items or ended < clock.moment() - timedelta(seconds=keep):
        raise Gone(
            f"The results of the batch '{batch.id}' were erased: they are kept for {keep / 86400:.4g} days.",
            param="batch_id",
        )
    lost = [
        name
        for name, file_id, count in (
            ("output", batch.output_file_id, batch.completed),
            ("error", batch.error_file_id, batch.total - batch.completed if batch.expired_at else batch.failed),
        )
        if count and file_id is None
    ]
    if lost:
        left = batch.output_file_id or batch.error_file_id
        there = f" The rest is in GET /v1/files/{left}/content." if left else ""
        raise Gone(
            f"The {' and '.join(lost)} file of the batch '{batch.id}' was deleted, and its results with it.{there}",
            param="batch_id",
        )


async def purge_items(connection: AsyncConnection, keep: float) -> int:
    """Erase what the requests of batches said and were answered, ``keep`` seconds after their end; return how many."""
    return (await connection.execute(PURGE, {"keep": timedelta(seconds=keep)})).rowcount


HAS_ITEMS = text("SELECT EXISTS (SELECT FROM batch_items WHERE batch_id = :batch_id)")
PURGE = text("""
    DELETE FROM batch_items WHERE (batch_id, position) IN (
        SELECT batch_id, position FROM batch_items JOIN batches ON batches.id = batch_id
        WHERE coalesce(finalizing_at, failed_at) < clock_timestamp() - CAST(:keep AS interval)
        LIMIT 5000
    )
""")
