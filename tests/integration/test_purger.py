# What is past its time is erased by whichever worker comes by.

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy import text

from gateway.core.clock import Clock
from gateway.run import purger as module
from gateway.run.purger import Purger
from gateway.storage.database import Database


async def test_what_cannot_be_erased_holds_up_nothing_else(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault at the stored answers leaves no finding of the safety checks lying, and no file, however many are past
    their time; what admins did stays."""

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
    await Purger(cast(Any, editions), database, Clock(), cast(Any, None)).purge_once()
    async with database.begin() as connection:
        left = (await connection.execute(text("SELECT action FROM audit_log"))).scalars().all()

        kept = (await connection.execute(text("SELECT DISTINCT file_id FROM file_chunks"))).scalars().all()

    assert left == ["team.created"] and kept == ["file-1"]
