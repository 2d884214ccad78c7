# Files of teams, in Postgres, in chunks: uploaded ones are the input of batches. What comes out of a batch is a file
# without chunks: its lines are made from the batch's items when it is read (results.py).

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from itertools import count

from msgspec import Struct
from sqlalchemy import Table, delete, func, insert, literal, select, text, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.storage.database import Database
from gateway.storage.tables import file_chunks, files
from protocol.errors import NotFound, invalid_param

CHUNK = 512 * 1024  # bytes
CHUNKS_PURGED_AT_ONCE = 100  # of files: on a busy machine Postgres takes seconds, and a statement has ten
STALE = 3600.0  # seconds after which an upload that was never finished is dropped


class FileRecord(Struct, frozen=True, kw_only=True):
    """A file as its team sees it."""

    id: str
    team_id: str
    filename: str
    purpose: str
    bytes: int
    status: str  # "uploading", then "processed"
    created_at: datetime
    expires_at: datetime | None


def new_file_id() -> str:
    """Return an unguessable id."""
    return f"file-{secrets.token_hex(12)}"


async def begin_file(connection: AsyncConnection, team_id: str, filename: str, purpose: str) -> str:
    """Make a file that is being uploaded, and return its id."""
    file_id = new_file_id()
    row = {"id": file_id, "team_id": team_id, "filename": filename, "purpose": purpose, "status": "uploading"}
    await connection.execute(insert(files).values(**row))
    return file_id


async def add_chunk(connection: AsyncConnection, file_id: str, position: int, data: bytes) -> None:
    """Append a chunk. Raises NotFound when the file was dropped meanwhile."""
    query = update(files).where(files.c.id == file_id, IS_WANTED).values(bytes=files.c.bytes + len(data))
    if not (await connection.execute(query)).rowcount:
        raise _no_such_file(file_id)
    await connection.execute(insert(file_chunks).values(file_id=file_id, position=position, data=data))


async def end_file(connection: AsyncConnection, file_id: str, size: int, keep: float) -> FileRecord:
    """Let a file of ``size`` bytes be used for ``keep`` seconds. Raises NotFound when it was dropped meanwhile."""
    ends = {"bytes": size, "status": "processed", "expires_at": datetime.now(UTC) + timedelta(seconds=keep)}
    query = update(files).where(files.c.id == file_id, IS_WANTED).values(**ends).returning(files)
    if (row := (await connection.execute(query)).mappings().one_or_none()) is None:
        raise _no_such_file(file_id)
    return FileRecord(**row)


async def get_file(connection: AsyncConnection, team_id: str, file_id: str) -> FileRecord:
    """Return a team's file. Raises NotFound, also for another team's."""
    query = select(files).where(files.c.id == file_id, files.c.team_id == team_id, files.c.status != "uploading")
    if "\x00" in file_id:  # which Postgres cannot even look for
        raise _no_such_file(file_id)
    row = (await connection.execute(query)).mappings().one_or_none()
    if row is None or (row["expires_at"] is not None and row["expires_at"] <= datetime.now(UTC)):
        raise _no_such_file(file_id)
    return FileRecord(**row)


async def list_files(
    connection: AsyncConnection, team_id: str, *, purpose: str | None, after: str | None, limit: int, ascending: bool
) -> list[FileRecord]:
    """Return a team's files, newest first unless ``ascending``; ``after`` is the last id already seen."""
    table = files.c
    order = tuple_(table.created_at, table.id)
    query = select(files).where(table.team_id == team_id, table.status != "uploading", table.expires_at > func.now())
    if purpose is not None:
        query = query.where(table.purpose == purpose)
    if after is not None:
        made = select(table.created_at).where(table.id == after, table.team_id == team_id).scalar_subquery()
        seen = tuple_(made, literal(after))
        query = query.where(order > seen if ascending else order < seen)
    newest = (table.created_at.asc(), table.id.asc()) if ascending else (table.created_at.desc(), table.id.desc())
    rows = (await connection.execute(query.order_by(*newest).limit(limit))).mappings().all()
    if after is not None and not rows:
        await check_seen(connection, files, team_id, after)
    return [FileRecord(**row) for row in rows]


async def check_seen(connection: AsyncConnection, table: Table, team_id: str | None, after: str) -> None:
    """Raise BadRequest unless ``after`` is a team's, or any's: a list would end there as if nothing followed."""
    own = [] if team_id is None else [table.c.team_id == team_id]
    query = select(table.c.id).where(table.c.id == after, *own)
    if (await connection.execute(query)).scalar_one_or_none() is None:
        words = f"There is no '{after[:100]}' to go on after; it may have been deleted. Begin anew without 'after'."
        raise invalid_param("after", words)


async def delete_file(connection: AsyncConnection, team_id: str, file_id: str) -> None:
    """Delete a team's file with its contents; of an output file, the answers in it. Raises NotFound."""
    file = await get_file(connection, team_id, file_id)
    if file.purpose == "batch_output":
        for statement in FORGET:
            await connection.execute(statement, {"file_id": file_id})
    await drop_file(connection, file_id)


async def drop_file(connection: AsyncConnection, file_id: str) -> None:
    """Erase a file, finished or not."""
    await connection.execute(delete(files).where(files.c.id == file_id))


async def read_chunks(database: Database, file_id: str) -> AsyncIterator[bytes]:
    """Yield the contents of an uploaded file, a short transaction for each chunk."""
    for position in count():
        async with database.begin() as connection:
            data = await read_chunk(connection, file_id, position)
        if data is None:
            return
        yield data


async def read_chunk(connection: AsyncConnection, file_id: str, position: int) -> bytes | None:
    """Return one chunk of an uploaded file; None behind the last."""
    query = select(file_chunks.c.data).where(file_chunks.c.file_id == file_id, file_chunks.c.position == position)
    data = (await connection.execute(query)).scalar_one_or_none()
    return None if data is None else bytes(data)


async def purge_files(database: Database) -> None:
    """Drop files that are past their time, and uploads that were never finished: what still comes of one is refused
    from here on, or it would end without the chunks that are gone already."""
    async with database.begin() as connection:
        await connection.execute(GIVE_UP)
    await database.purge(PURGE_CHUNKS, CHUNKS_PURGED_AT_ONCE)
    await database.purge(PURGE, 500)


IS_WANTED = files.c.expires_at.is_(None)  # of a file that is being uploaded
GIVE_UP = text(f"""
    UPDATE files SET expires_at = now()
    WHERE status = 'uploading' AND expires_at IS NULL AND created_at < now() - interval '{STALE} seconds'
""")  # noqa: S608  (all of it is ours)
PURGE_CHUNKS = text("""
    DELETE FROM file_chunks WHERE ctid = ANY(ARRAY(
        SELECT file_chunks.ctid FROM files JOIN file_chunks ON file_chunks.file_id = files.id WHERE expires_at <= now()
        LIMIT :limit
    ))
""")
PURGE = text("""
    DELETE FROM files WHERE id = ANY(ARRAY(
        SELECT id FROM files
        WHERE expires_at <= now() AND NOT EXISTS (SELECT FROM file_chunks WHERE file_id = files.id) LIMIT :limit
    ))
""")


def _no_such_file(file_id: str) -> NotFound:
    return NotFound(f"There is no file '{file_id[:100]}'.", param="file_id", code="file_not_found")


FORGET = (
    text("""
        UPDATE batch_items SET response = NULL
        WHERE batch_id = (SELECT id FROM batches WHERE output_file_id = :file_id) AND status = 'completed'
    """),
    text("""
        UPDATE batch_items SET response = NULL, error = NULL
        WHERE batch_id = (SELECT id FROM batches WHERE error_file_id = :file_id) AND status <> 'completed'
    """),
)
