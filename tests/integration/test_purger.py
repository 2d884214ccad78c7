# What is past its time is erased by whichever worker comes by.

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy import text

from gateway.batch.file_store import add_chunk, begin_file, end_file, purge_files
from gateway.core.clock import Clock
from gateway.run import purger as module
from gateway.run.purger import Purger
from gateway.storage.database import Database
from protocol.errors import NotFound


async def test_what_cannot_be_erased_holds_up_nothing_else(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault at the stored answers leaves no finding of the safety checks lying, nor does a backlog of files, of which
    each round erases a part; what admins did stays."""

    async def fail(*_: object) -> int:
        raise TimeoutError

    monkeypatch.setattr(module, "purge_expired", fail)
    async with database.begin() as connection:
        await connection.execute(
            text(
                "INSERT INTO audit_log (created_at, actor, action) SELECT now() - interval '9 days', 'system', action"
                " FROM unnest(ARRAY['safety.input_blocked', 'team.created']) AS action"
            )
        )
        await connection.execute(text("INSERT INTO teams (id, name) VALUES ('team_a', 'A')"))
        await connection.execute(
            text(
                "INSERT INTO files (id, team_id, purpose, filename, bytes, status, created_at, expires_at)"
                " SELECT 'file-' || n, 'team_a', 'batch', 'x', 0, 'processed', now(), now() + n * interval '1 hour'"
                " FROM generate_series(-30, 1) AS n"
            )
        )
        chunks = "INSERT INTO file_chunks SELECT id, n, 'x' FROM files, generate_series(1, 7) AS n"
        await connection.execute(text(chunks))
    retention = SimpleNamespace(batch_files=86400.0, responses=0.0, contents=0.0, usage=8 * 86400.0)
    editions = SimpleNamespace(current=SimpleNamespace(settings=SimpleNamespace(retention=retention)))
    purger = Purger(cast(Any, editions), database, Clock(), cast(Any, None))
    found = []
    for within in (0.0, 15.0):
        monkeypatch.setattr("gateway.storage.database.PURGE_WITHIN", within)
        await purger.purge_once()
        async with database.begin() as connection:
            left = (await connection.execute(text("SELECT action FROM audit_log"))).scalars().all()
            kept = (await connection.execute(text("SELECT count(*) FROM file_chunks"))).scalar_one()
        found.append((left, kept))

    assert found == [(["team.created"], 224 - 100), (["team.created"], 7)]


async def test_an_upload_that_was_given_up_does_not_end(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes longer than an hour comes to its end while a part of it is erased: it is told so, and no file
    without its beginning is left."""
    async with database.begin() as connection:
        await connection.execute(text("INSERT INTO teams (id, name) VALUES ('team_a', 'A')"))
        file_id = await begin_file(connection, "team_a", "x.jsonl", "batch")
        await add_chunk(connection, file_id, 0, b"x")
        await connection.execute(text("UPDATE files SET created_at = now() - interval '2 hours'"))
    purge, ends = database.purge, list[bool]()

    async def purge_and_go_on(*args: Any) -> int:
        count = await purge(*args)
        for goes_on in (add_chunk(connection, file_id, 1, b"y"), end_file(connection, file_id, 2, 1000.0)):
            with pytest.raises(NotFound):
                await goes_on
            ends.append(True)
        return count

    async with database.begin() as connection:
        monkeypatch.setattr(database, "purge", purge_and_go_on)
        await purge_files(database)
    async with database.begin() as connection:
        left = (await connection.execute(text("SELECT id FROM files"))).scalars().all()

    assert left == [] and ends
