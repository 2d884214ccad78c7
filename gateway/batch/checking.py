# Checks the input of a batch that came as a file, in a worker: line by line, in bounded memory, all of it or nothing.
# The lock is the transaction's own, so another worker begins anew when this one dies.

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count

import structlog
from sqlalchemy import delete, text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.store_errors import POSTGRES_AWAY
from gateway.batch.estimate import estimated_completion
from gateway.batch.file_store import read_chunk
from gateway.batch.intake import Intake, read_lines
from gateway.batch.shapes import Fault, Item
from gateway.batch.store import add_items, begin_batch, fail_batch
from gateway.core.clock import Clock
from gateway.storage.database import Database
from gateway.storage.tables import batch_items

GROUP = 500  # items in one COPY
GROUP_BYTES = 4 * 1024 * 1024  # of bodies in one COPY, about

MOST_TRIES = 5  # of an input that cannot be stored, before its batch fails

# A batch whose input could not be stored goes to the back of the queue.
UNCHECKED = text("SELECT id FROM batches WHERE status = 'validating' ORDER BY tries, created_at LIMIT 20")
COUNT_TRY = text("UPDATE batches SET tries = tries + 1 WHERE id = :id AND status = 'validating' RETURNING tries")
TAKE = text("""
    SELECT batches.id, endpoint, input_file_id, priority, files.bytes
    FROM batches LEFT JOIN files ON files.id = input_file_id
    WHERE batches.id = :id AND batches.status = 'validating' AND pg_try_advisory_xact_lock(hashtext(:id))
""")

log = structlog.get_logger(__name__)


class _Faulty(Exception):
    pass


class _Cancelled(Exception):
    pass


async def check_next_input(database: Database, clock: Clock) -> str | None:
    """Check one batch that waits for it, and return its id; None when none does."""
    async with database.begin() as connection:
        waiting = (await connection.execute(UNCHECKED)).scalars().all()
    for batch_id in waiting:
        if await _check(database, clock, batch_id):
            return str(batch_id)
    return None


async def _check(database: Database, clock: Clock, batch_id: str) -> bool:
    faults: list[Fault] = []
    try:
        async with database.begin() as connection:
            batch = (await connection.execute(TAKE, {"id": batch_id})).one_or_none()
            if batch is None:
                return False
            intake = Intake(batch.endpoint)
            await connection.execute(delete(batch_items).where(batch_items.c.batch_id == batch_id))
            size = await _take_in(connection, batch_id, _chunks(connection, batch.input_file_id), intake)
            if size != batch.bytes and not intake.is_full:  # deleted before or while it was read
                faults = [Fault(code="file_not_found", line=None, message="The input file was deleted.")]
            if faults := faults or intake.faults:
                raise _Faulty
            due = await estimated_completion(connection, clock, intake.count, batch.priority)
            if await begin_batch(connection, clock, batch_id, intake.count, intake.model, due) is None:
                raise _Cancelled
            log.info("batch_begun", batch_id=batch_id, requests=intake.count)
    except _Cancelled:
        log.info("batch_cancelled_unchecked", batch_id=batch_id)
    except POSTGRES_AWAY:
        await _count_try(database, clock, batch_id)  # raises too when Postgres is away
        raise
    except _Faulty:
        async with database.begin() as connection:
            await fail_batch(connection, clock, batch_id, faults)
        log.info("batch_input_faulty", batch_id=batch_id, faults=len(faults))
    except Exception:  # a fault in our code: it must not stop the worker, nor block other batches
        log.exception("batch_input_unreadable", batch_id=batch_id)
        await _count_try(database, clock, batch_id)
    return True


async def _count_try(database: Database, clock: Clock, batch_id: str) -> None:
    async with database.begin() as connection:
        tries = (await connection.execute(COUNT_TRY, {"id": batch_id})).scalar_one_or_none()
        if tries is not None and tries >= MOST_TRIES:
            told = "The input could not be read or stored. Send it again, in parts."
            await fail_batch(connection, clock, batch_id, [Fault(code="server_error", line=None, message=told)])


async def _take_in(connection: AsyncConnection, batch_id: str, chunks: AsyncIterator[bytes], intake: Intake) -> int:
    """Store the requests in ``chunks`` as far as they are free of faults; return the bytes that were read."""
    read = 0

    async def counted() -> AsyncIterator[bytes]:
        nonlocal read
        async for chunk in chunks:
            read += len(chunk)
            yield chunk

    group: list[Item] = []
    size = stored = 0
    async for line in read_lines(counted(), intake):
        item = intake.line(line)
        if item is not None and not intake.faults:
            group.append(item)
            size += len(item.body)
        if len(group) >= GROUP or size >= GROUP_BYTES:
            await add_items(connection, batch_id, stored, group)
            stored += len(group)
            group, size = [], 0
        if intake.is_full:
            break
    intake.end()
    if group and not intake.faults:
        await add_items(connection, batch_id, stored, group)
    return read


async def _chunks(connection: AsyncConnection, file_id: str | None) -> AsyncIterator[bytes]:
    for position in count():
        if file_id is None or (data := await read_chunk(connection, file_id, position)) is None:
            return
        yield data
