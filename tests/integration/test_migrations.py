# The schema's history: forward, back, and the same tables that the code speaks of.

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from typing import Any
from uuid import UUID

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, make_url, text
from sqlalchemy.exc import IntegrityError

import gateway.storage.tables  # noqa: F401  (registers its tables)
import migrations
from billing.ledger.ledger import insert_records
from billing.ledger.tables import metadata
from gateway.storage.database import Database
from gateway.storage.schema import NEEDED
from tests.support import servers
from tests.support.clock import SetClock
from tests.support.factories import make_record


@pytest.fixture
def empty_url(postgres_url: str) -> Iterator[str]:
    """A database without any table."""
    name = "empty_for_migrations"
    asyncio.run(servers.execute(postgres_url, f"CREATE DATABASE {name}"))
    yield servers.text_of(make_url(postgres_url).set(database=name))
    asyncio.run(servers.execute(postgres_url, f"DROP DATABASE {name} WITH (FORCE)"))


def test_there_is_one_head() -> None:
    """Two branches of history would leave gateways on different schemas."""
    heads = ScriptDirectory.from_config(migrations.config_for()).get_heads()

    assert heads == [NEEDED], "gateway/storage/schema.py names another"


def test_every_step_goes_forward_back_and_forward_again(empty_url: str) -> None:
    """Back at the start nothing is left; forward again everything is as the code has it."""
    steps = [script.revision for script in ScriptDirectory.from_config(migrations.config_for()).walk_revisions()]

    for revision in reversed(steps):
        migrations.upgrade(empty_url, revision)
        if revision == "0047":
            asyncio.run(servers.execute(empty_url, ROTATED_TWICE))
    assert asyncio.run(_ask(empty_url, replaced_by)) == ["key_b", None, None]
    assert asyncio.run(_ask(empty_url, read_through)) == 0
    assert differences(empty_url) == []
    migrations.downgrade(empty_url, "base")
    assert tables(empty_url) == {"alembic_version"}
    migrations.upgrade(empty_url)

    assert differences(empty_url) == []


def test_several_gateways_may_migrate_at_once(empty_url: str) -> None:
    """They take turns under a lock; the later ones find it done."""
    command = [sys.executable, "-c", f"import migrations; migrations.upgrade({empty_url!r})"]

    gateways = [subprocess.Popen(command) for _ in range(2)]

    assert [gateway.wait(60) for gateway in gateways] == [0, 0]
    assert differences(empty_url) == []


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"day": "2026-04-06"}, "day"),
        ({"status": "pending", "cost_nanousd": 0}, "status"),
        ({"output_tokens": -1}, "amounts"),
        ({"cached_input_tokens": -1}, "amounts"),
        ({"cost_nanousd": -1}, "amounts"),
        ({"gpu_cost_nanousd": -1}, "amounts"),
        ({"status": "failed"}, "cost"),
        ({"status": "superseded"}, "cost"),
        ({}, None),
        ({"status": "failed", "cost_nanousd": 0}, None),
    ],
)
async def test_a_row_that_cannot_be_true_is_refused_from_every_writer(
    database: Database, clock: SetClock, change: dict[str, Any], fact: str | None
) -> None:
    """Its day is that of its id, its status is known, nothing is negative, and only charged calls cost."""
    async with database.begin() as connection:
        await insert_records(connection, [make_record(clock.new_id())], today=clock.today())
        row = dict((await connection.execute(text("SELECT * FROM usage_records"))).mappings().one())
    other = row | {"request_id": UUID(clock.new_id())} | change
    if isinstance(other["day"], str):
        other["day"] = date.fromisoformat(other["day"])

    async def insert() -> None:
        async with database.begin() as connection:
            await connection.execute(metadata.tables["usage_records"].insert(), other)

    if fact is None:
        await insert()
    else:
        with pytest.raises(IntegrityError, match=f"usage_records_{fact}_check"):
            await insert()


def test_every_column_of_the_ledger_is_there(postgres_url: str) -> None:
    """The contract's columns of usage_records, by name."""
    promised = (
        "day request_id team_id key_id model_asked model_used provider endpoint tier priority input_tokens "
        "cached_input_tokens output_tokens reasoning_tokens cost_nanousd gpu_cost_nanousd queue_ms first_token_ms "
        "prefill_ms decode_ms total_ms status route_reason attempts created_at booked_on"
    )

    assert set(promised.split(" ")) <= set(metadata.tables["usage_records"].columns.keys())
    assert {"teams", "api_keys", "usage_daily", "batches", "batch_items", "files", "callbacks", "audit_log"} <= tables(
        postgres_url
    )


# Of a version that knew by the audit log alone which key stands in another's place.
ROTATED_TWICE = """
    INSERT INTO teams (id, name) VALUES ('t', 't');
    INSERT INTO api_keys (id, team_id, digest, prefix) SELECT key, 't', key::bytea, 'tg-'
    FROM unnest(ARRAY['key_old', 'key_a', 'key_b']) AS key;
    INSERT INTO audit_log (actor, action, team_id, created_at)
    SELECT 'x', 'safety.input_blocked', 't', now() - n * interval '1 second' FROM generate_series(1, 20000) AS n;
    INSERT INTO audit_log (actor, action, team_id, subject, details)
    SELECT 'x', 'key.rotated', 't', 'key_old', jsonb_build_object('replaced_by', next)
    FROM unnest(ARRAY['key_a', 'key_b']) AS next;
    ANALYZE audit_log, api_keys
"""


def replaced_by(connection: Connection) -> Any:
    return list(connection.execute(text("SELECT replaced_by FROM api_keys ORDER BY created_at, id DESC")).scalars())


def read_through(connection: Connection) -> Any:
    """Return how many lines of the audit log were read from its beginning on: gateways look up no key meanwhile."""
    query = text("SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = 'audit_log'")
    return connection.execute(query).scalar_one()


def differences(url: str) -> list[Any]:
    """Return how the database differs from the tables in the code, partitions aside."""

    def compare(connection: Connection) -> list[Any]:
        options = {
            "compare_server_default": True,
            "include_object": lambda _, name, *__: not str(name).startswith("usage_records_"),
        }
        return compare_metadata(MigrationContext.configure(connection, opts=options), metadata)

    return asyncio.run(_ask(url, compare))


def tables(url: str) -> set[str]:
    """Return the names of the database's tables."""
    query = text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    return asyncio.run(_ask(url, lambda connection: set(connection.execute(query).scalars())))


async def _ask(url: str, question: Any) -> Any:
    database = Database(url)
    try:
        async with database.begin() as connection:
            return await connection.run_sync(question)
    finally:
        await database.close()
