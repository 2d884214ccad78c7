# The schema's history: forward, back, and the same tables that the code speaks of.

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
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
from billing.upkeep.audit import Report, audit
from gateway.storage.database import Database
from gateway.storage.schema import NEEDED
from migrations.running import StillRunning
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


BOOKED = """
    INSERT INTO teams (id, name, limits) VALUES
        ('team_a', 'A', '{"nanousd_per_month": 9000, "tokens_per_day": 500}'), ('team_b', 'B', '{}');
    INSERT INTO api_keys (id, team_id, name, digest, prefix, limits) VALUES
        ('key_a', 'team_a', '', 'x', 'tg-', '{"nanousd_per_day": 700}');
    INSERT INTO usage_daily (team_id, day, booked_on, key_id, model_used, tier, status, calls, input_tokens,
                             output_tokens, cost_nanousd)
    SELECT team, CAST(current_date - ago AS date), current_date, 'key_' || right(team, 1), model, 'interactive', status,
           1, 30, 12, CASE status WHEN 'failed' THEN 0 ELSE 100 + ago END
    FROM unnest(ARRAY['team_a', 'team_b']) AS team, unnest(ARRAY['m', 'n']) AS model,
         unnest(ARRAY['answered', 'blocked', 'failed']) AS status, unnest(ARRAY[0, 1, 20, 40, 100]) AS ago;
    INSERT INTO corrections (id, team_id, key_id, day, cost_nanousd, input_tokens, output_tokens, reason, actor,
                             booked_on, created_at)
    SELECT gen_random_uuid(), team, key, current_date - ago, 5 - 100 * ago, 1, 2, 'x', 'x', current_date, now()
    FROM (VALUES ('team_a', 'key_a'), ('team_a', NULL)) AS whose (team, key), unnest(ARRAY[0, 1, 20, 100]) AS ago
"""


def test_balances_begin_from_the_sums_of_the_ledger(new_database_url: str) -> None:
    """Of this month and the last, corrections and limits included: the audit finds the new books in order, and what
    was used before counts against the caps. Back and forward again it is the same."""
    migrations.downgrade(new_database_url, "0016")
    asyncio.run(servers.execute(new_database_url, BOOKED))
    found = []
    for _ in range(2):
        migrations.upgrade(new_database_url)
        found.append(asyncio.run(_ask(new_database_url, _balances)))
        audited = asyncio.run(_audit(new_database_url, (0, 1, 20)))
        assert all(report.books > 5 for report in audited)
        assert [one for report in audited for one in report.differences if one.book != "statements"] == []
        migrations.downgrade(new_database_url, "0016")

    today = datetime.now(UTC).date()
    assert found[0] == found[1]
    # Two models, answered and blocked, 42 tokens and a hundred nano-dollars each; two corrections, one of the key.
    assert found[0]["team:team_a", "tokens", f"{today}"] == (500, 168, 6)
    assert found[0]["key:key_a", "nanousd", f"{today}"] == (700, 400, 5)
    assert found[0]["team:team_b", "nanousd", f"{today}"] == (None, 400, 0)
    ages = [ago for ago in (0, 1, 20, 40) if f"{today - timedelta(days=ago):%Y-%m}" == f"{today:%Y-%m}"]
    corrected = sum(2 * (5 - 100 * ago) for ago in ages if ago != 40)
    assert found[0]["team:team_a", "nanousd", f"{today:%Y-%m}"] == (
        9000, sum(4 * (100 + ago) for ago in ages), corrected)  # fmt: skip
    assert not any(period.startswith(f"{today - timedelta(days=100):%Y-%m}") for _, _, period in found[0])


def test_the_step_to_leases_waits_for_old_processes_to_stop(new_database_url: str) -> None:
    """While one of them was seen in the last half minute nothing is done, and its table stays."""
    migrations.downgrade(new_database_url, "0016")
    listed = "INSERT INTO flushers (id, watermark, seen_at) VALUES ('host:7', now(), now() - interval '%s s')"
    asyncio.run(servers.execute(new_database_url, listed % 20))
    with pytest.raises(StillRunning, match=r"1 gateways and workers .*\(host:7\).*stop them all"):
        migrations.upgrade(new_database_url)
    assert "flushers" in tables(new_database_url)

    asyncio.run(servers.execute(new_database_url, "UPDATE flushers SET seen_at = now() - interval '31 s'"))
    migrations.upgrade(new_database_url)

    assert "flushers" not in tables(new_database_url)


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


def _balances(connection: Connection) -> dict[tuple[str, str, str], tuple[int | None, int, int]]:
    query = text("SELECT scope, unit, period, cap, drawn, corrected FROM balances")
    return {tuple(row[:3]): tuple(row[3:]) for row in connection.execute(query)}  # type: ignore[misc]


async def _audit(url: str, ago: Sequence[int]) -> list[Report]:
    database = Database(url)
    try:
        today = datetime.now(UTC).date()
        return [await audit(database, today - timedelta(days=each)) for each in ago]
    finally:
        await database.close()


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
