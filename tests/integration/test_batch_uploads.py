# Uploads on their way into Postgres: what a team may store bounds them while they arrive, however they end.

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text

from gateway.accounts.schemas import NewTeam
from gateway.accounts.teams import create_team
from gateway.batch.file_store import CHUNK, FileRecord
from gateway.batch.upload import receive_file
from gateway.core.errors import StorageFull
from gateway.core.settings import BatchLimits
from gateway.storage.audit_log import Act
from gateway.storage.database import Database
from protocol.errors import BadRequest

TEAM = "team_a"
LIMITS = BatchLimits(stored_bytes=3 * CHUNK)
HEAD = 'Content-Disposition: form-data; name="{}"{}\r\n\r\n'


class Upload:
    """A form as it arrives: ``pieces`` of half a chunk, and its end unless it is broken off."""

    def __init__(self, pieces: int, *, is_broken_off: bool = False) -> None:
        self.sent = 0
        self._pieces = pieces
        self._is_broken_off = is_broken_off

    async def body(self) -> AsyncIterator[bytes]:
        """Yield what is sent, and count the pieces."""
        yield f"--border\r\n{HEAD.format('purpose', '')}batch\r\n--border\r\n".encode()
        yield HEAD.format("file", '; filename="x.jsonl"').encode()
        for _ in range(self._pieces):
            yield b"x" * (CHUNK // 2)
            self.sent += 1
        if self._is_broken_off:
            raise OSError("the client has left")
        yield b"\r\n--border--\r\n"


async def receive(database: Database, upload: Upload) -> FileRecord:
    """Take an upload in."""
    return await receive_file(
        database, TEAM, "multipart/form-data; boundary=border", upload.body(), keep=1000.0, limits=LIMITS
    )


@pytest.fixture(autouse=True)
async def team(database: Database) -> None:
    """A team that may store three chunks."""
    async with database.begin() as connection:
        await create_team(connection, NewTeam(id=TEAM), Act("test"))


async def files(database: Database) -> int:
    """Return how many files there are, finished or not."""
    async with database.begin() as connection:
        return int((await connection.execute(text("SELECT count(*) FROM files"))).scalar_one())


async def test_an_upload_beyond_the_limit_is_refused_as_it_arrives(database: Database) -> None:
    """Its rest is not even read, and nothing of it stays."""
    upload = Upload(pieces=400)

    with pytest.raises(StorageFull):
        await receive(database, upload)

    assert upload.sent < 10
    assert await files(database) == 0
    assert (await receive(database, Upload(pieces=6))).bytes == 3 * CHUNK


async def test_what_was_broken_off_counts_until_it_is_dropped(database: Database) -> None:
    """Whoever begins uploads and ends none fills nobody's disk."""
    for _ in range(2):
        with pytest.raises(OSError, match="has left"):
            await receive(database, Upload(pieces=3, is_broken_off=True))

    with pytest.raises(StorageFull):
        await receive(database, Upload(pieces=4))
    assert await files(database) == 2
    assert (await receive(database, Upload(pieces=2))).bytes == CHUNK


async def test_a_form_that_is_at_fault_leaves_nothing(database: Database) -> None:
    """An empty file is none."""
    with pytest.raises(BadRequest):
        await receive(database, Upload(pieces=0))

    assert await files(database) == 0
