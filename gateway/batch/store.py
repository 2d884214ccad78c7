# Batches in Postgres, as their teams know them: made, looked at, listed, cancelled, and ended with a callback in the
# same transaction. Workers change their items in claims.py.

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct
from sqlalchemy import insert, literal, or_, select, text, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.batch.file_store import check_seen, new_file_id
from gateway.batch.results import ERRORS, LINE
from gateway.batch.shapes import OPEN, WINDOWS, Fault, Item
from gateway.core.clock import Clock
from gateway.outbox.signing import Event
from gateway.outbox.store import enqueue
from gateway.storage.audit_log import Act, record_act
from gateway.storage.database import from_row
from gateway.storage.tables import batch_items, batches, files
from protocol.errors import NotFound, Unshown

COLUMNS = ("batch_id", "position", "custom_id", "body", "status")

# OpenAI's event for each end.
EVENTS = {end: f"batch.{end}" for end in ("completed", "failed", "expired", "cancelled")}


class Batch(Unshown, Struct, frozen=True, kw_only=True):
    """A batch: what it was asked, and how far it is. Moments are None until they come."""

    id: str
    team_id: str
    key_id: str
    endpoint: str
    model: str | None
    status: str
    priority: str
    completion_window: str
    callback_url: str | None
    input_file_id: str | None
    output_file_id: str | None
    error_file_id: str | None
    errors: list[dict[str, Any]] | None
    metadata: dict[str, str] | None
    total: int
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    cost_nanousd: int
    failures: dict[str, int] | None  # by code, once they were asked for; gateway/batch/results.py
    tries: int
    created_at: datetime
    estimated_completion: datetime | None
    in_progress_at: datetime | None
    expires_at: datetime
    finalizing_at: datetime | None
    completed_at: datetime | None
    failed_at: datetime | None
    expired_at: datetime | None
    cancelling_at: datetime | None
    cancelled_at: datetime | None

    @property
    def is_open(self) -> bool:
        """Whether something of it may still run."""
        return self.status in OPEN


async def make_batch(
    connection: AsyncConnection,
    clock: Clock,
    *,
    team_id: str,
    key_id: str,
    endpoint: str,
    window: str = next(iter(WINDOWS)),
    priority: str = "normal",
    callback_url: str | None = None,
    metadata: Mapping[str, str] | None = None,
    input_file_id: str | None = None,
    input_bytes: int = 0,
    is_internal: bool = False,
) -> Batch:
    """Create a batch whose input has yet to be checked. ``is_internal``: the gateway creates it, and not its team."""
    now = clock.moment()
    row = {
        "id": f"batch_{secrets.token_hex(12)}",
        "team_id": team_id,
        "key_id": key_id,
        "endpoint": endpoint,
        "status": "validating",
        "priority": priority,
        "completion_window": window,
        "callback_url": callback_url,
        "metadata": dict(metadata) if metadata is not None else None,
        "input_file_id": input_file_id,
        "input_bytes": input_bytes,
        "is_aside": is_internal,
        "created_at": now,
        "expires_at": now + timedelta(seconds=WINDOWS[window]),
    }
    return from_row(
        Batch, (await connection.execute(insert(batches).values(**row).returning(batches))).mappings().one()
    )


async def add_items(connection: AsyncConnection, batch_id: str, first: int, items: Sequence[Item]) -> None:
    """Add requests to a batch at positions from ``first``, by COPY inside the transaction of ``connection``."""
    rows = [(batch_id, first + place, item.custom_id, item.body, "queued") for place, item in enumerate(items)]
    driver = (await connection.get_raw_connection()).driver_connection
    assert driver is not None
    await driver.copy_records_to_table("batch_items", records=rows, columns=COLUMNS, timeout=30.0)


async def begin_batch(
    connection: AsyncConnection, clock: Clock, batch_id: str, total: int, model: str | None, estimated: datetime | None
) -> Batch | None:
    """Let a checked batch run. None when it was cancelled meanwhile."""
    begun = {"status": "in_progress", "total": total, "model": model, "in_progress_at": clock.moment()}
    query = update(batches).where(batches.c.id == batch_id, batches.c.status == "validating")
    rows = await connection.execute(query.values(**begun, estimated_completion=estimated).returning(batches))
    row = rows.mappings().one_or_none()
    return None if row is None else from_row(Batch, row)


async def fail_batch(connection: AsyncConnection, clock: Clock, batch_id: str, faults: Sequence[Fault]) -> None:
    """End a batch whose input is at fault: nothing of it runs."""
    errors = [{"code": one.code, "line": one.line, "message": one.message, "param": one.param} for one in faults]
    query = update(batches).where(batches.c.id == batch_id, batches.c.status == "validating")
    ended = {"status": "failed", "errors": errors, "failed_at": clock.moment()}
    row = (await connection.execute(query.values(**ended).returning(batches))).mappings().one_or_none()
    if row is not None:
        await _tell(connection, clock, from_row(Batch, row))


async def end_batch(connection: AsyncConnection, clock: Clock, batch_id: str, keep: float) -> Batch | None:
    """End a batch of which nothing runs or waits any more; None when it has ended already, or has not.

    Its row must be locked by this transaction. The files with its lines are made, and the callback is written,
    in the same transaction. ``keep``: seconds that the files are kept.
    """
    row = (await connection.execute(ENDED, {"id": batch_id})).mappings().one()
    if row["status"] not in ("in_progress", "cancelling") or row["is_unfinished"]:
        return None
    end = "cancelled" if row["status"] == "cancelling" else "expired" if row["expired"] else "completed"
    now = clock.moment()
    changes: dict[str, Any] = {"status": end, f"{end}_at": now, "finalizing_at": now}
    for column, name, count, size in (
        ("output_file_id", "output", row["outputs"], row["output_bytes"]),
        ("error_file_id", "error", row["errors"], row["error_bytes"]),
    ):
        if count:
            changes[column] = new_file_id()
            made = {
                "id": changes[column],
                "team_id": row["team_id"],
                "filename": f"{batch_id}_{name}.jsonl",
                "purpose": "batch_output",
                "bytes": size,
                "status": "processed",
                "expires_at": now + timedelta(seconds=keep),
            }
            await connection.execute(insert(files).values(**made))
    query = update(batches).where(batches.c.id == batch_id).values(**changes).returning(batches)
    batch = from_row(Batch, (await connection.execute(query)).mappings().one())
    await _tell(connection, clock, batch)
    return batch


async def cancel_batch(
    connection: AsyncConnection, clock: Clock, team_id: str, batch_id: str, keep: float, act: Act | None = None
) -> Batch:
    """Start nothing more of a batch; what runs comes to its end. A batch that has ended stays as it is. The audit log
    tells of the ``act`` that cancelled one."""
    batch = await get_batch(connection, team_id, batch_id, lock=True)
    if batch.status not in ("validating", "in_progress"):
        return batch
    if act is not None:
        await record_act(connection, act, "batch.cancelled", team_id=team_id, subject=batch_id)
    cancelling = {"status": "cancelling", "cancelling_at": clock.moment()}
    await connection.execute(update(batches).where(batches.c.id == batch_id).values(**cancelling))
    items = update(batch_items).where(batch_items.c.batch_id == batch_id, batch_items.c.status == "queued")
    await connection.execute(items.values(status="cancelled", body=b"", finished_at=clock.moment()))
    return await end_batch(connection, clock, batch_id, keep) or await get_batch(connection, team_id, batch_id)


async def get_batch(connection: AsyncConnection, team_id: str, batch_id: str, *, lock: bool = False) -> Batch:
    """Return a team's batch; ``lock``: until the end of the transaction. Raises NotFound, also for another team's."""
    query = select(batches).where(batches.c.id == batch_id, batches.c.team_id == team_id)
    query = query.with_for_update(key_share=True) if lock else query
    row = None if "\x00" in batch_id else (await connection.execute(query)).mappings().one_or_none()
    if row is None:
        raise NotFound(f"There is no batch '{batch_id[:100]}'.", param="batch_id", code="batch_not_found")
    return from_row(Batch, row)


async def find_batch(connection: AsyncConnection, batch_id: str) -> Batch:
    """Return a batch of any team. Raises NotFound."""
    whose = select(batches.c.team_id).where(batches.c.id == batch_id)
    team_id = None if "\x00" in batch_id else (await connection.execute(whose)).scalar_one_or_none()
    return await get_batch(connection, team_id or "", batch_id)


async def batch_of_output(connection: AsyncConnection, file_id: str) -> Batch | None:
    """Return the batch whose lines a file has."""
    query = select(batches).where((batches.c.output_file_id == file_id) | (batches.c.error_file_id == file_id))
    row = (await connection.execute(query)).mappings().one_or_none()
    return None if row is None else from_row(Batch, row)


async def list_batches(
    connection: AsyncConnection,
    team_id: str | None,
    *,
    after: str | None,
    limit: int,
    before: str | None = None,
    status: str | None = None,
    endpoint: str | None = None,
) -> list[Batch]:
    """Return a team's batches, or all teams', newest first; ``after`` is the last id already seen, ``before`` the
    first, where the nearest of those above it are wanted."""
    table = batches.c
    own = [] if team_id is None else [table.team_id == team_id]
    facts = ((table.status, status), (table.endpoint, endpoint))
    wanted = [*own, *(column == fact for column, fact in facts if fact is not None)]
    query = select(batches).where(*wanted)
    place, is_above = tuple_(table.created_at, table.id), before is not None
    if (seen := after or before) is not None:
        made = select(table.created_at).where(table.id == seen, *own).scalar_subquery()
        edge = tuple_(made, literal(seen))
        query = query.where(place > edge if is_above else place < edge)
    order = [column.asc() if is_above else column.desc() for column in (table.created_at, table.id)]
    rows = (await connection.execute(query.order_by(*order).limit(limit))).mappings().all()
    if seen is not None and not rows:
        await check_seen(connection, batches, team_id, seen)
    found = [from_row(Batch, row) for row in rows]
    return found[::-1] if is_above else found


async def batches_that_run(
    connection: AsyncConnection, team_id: str | None, known: Sequence[str], limit: int
) -> list[Batch]:
    """Return a team's batches, or all teams', that are open or among those ``known``, newest first."""
    own = [] if team_id is None else [batches.c.team_id == team_id]
    running = or_(batches.c.status.in_(OPEN), batches.c.id.in_(known))
    query = select(batches).where(*own, running).order_by(batches.c.created_at.desc()).limit(limit)
    return [from_row(Batch, row) for row in (await connection.execute(query)).mappings()]


async def _tell(connection: AsyncConnection, clock: Clock, batch: Batch) -> None:
    """Write the callback of a batch that has ended into the outbox."""
    if batch.callback_url is not None:
        event = Event.now(clock, EVENTS[batch.status], {"id": batch.id})
        await enqueue(connection, event, team_id=batch.team_id, url=batch.callback_url, batch_id=batch.id)


ENDED = text(f"""
    SELECT status, team_id, items.*
    FROM batches,
    LATERAL (
        SELECT count(*) FILTER (WHERE status IN ('queued', 'running')) > 0 AS is_unfinished,
               count(*) FILTER (WHERE status = 'expired') AS expired,
               count(*) FILTER (WHERE status = 'completed') AS outputs,
               coalesce(sum(octet_length({LINE})) FILTER (WHERE status = 'completed'), 0) AS output_bytes,
               count(*) FILTER (WHERE status IN ('failed', 'expired')) AS errors,
               coalesce(sum(octet_length({LINE})) FILTER (WHERE status IN ('failed', 'expired')), 0) AS error_bytes
        FROM batch_items WHERE batch_id = :id
    ) AS items
    WHERE id = :id
""")  # noqa: S608  (the line is ours)


# The code of an error, or its type, is the first in its line: quotes within a text are escaped there.
FAILURES = text(r"""
    SELECT coalesce(
        substring(told FROM '"code":\s*"([^"]{1,100})"'),
        substring(told FROM '"type":\s*"((?!error")[^"]{1,100})"'),  -- of Anthropic's errors that of the inner object
        status
    ) AS code, count(*) AS items
    FROM (
        SELECT status, convert_from(coalesce(error, response), 'UTF8') AS told
        FROM batch_items WHERE batch_id = :batch_id AND status = ANY(CAST(:statuses AS text[]))
    ) AS failed
    GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 20
""")


async def failures_of(connection: AsyncConnection, batch: Batch) -> dict[str, int] | None:
    """Return how many items of a batch that has ended failed by the code of their error, the most frequent codes first,
    at most 20 of them. The first look counts; the row keeps it for the others, also once the items are erased."""
    if batch.is_open or batch.failures is not None:
        return batch.failures
    found = await connection.execute(FAILURES, {"batch_id": batch.id, "statuses": list(ERRORS)})
    failures = {row.code: row.items for row in found}
    kept = update(batches).where(batches.c.id == batch.id, batches.c.failures.is_(None)).values(failures=failures)
    await connection.execute(kept)
    return failures
