# The role of gateways and workers: it does all of their work, and can neither rewrite the books nor change a table.

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta

import asyncpg
import pytest
from sqlalchemy import text

import migrations
from billing.ledger.partitions import delete_stragglers, drop_partition, ensure_partitions, old_partitions, partition_of
from billing.ledger.tables import metadata
from gateway.storage.audit_log import purge_outcomes
from gateway.storage.database import Database
from migrations.service_role import ADDED_TO_ALONE
from tests.support import servers


@pytest.fixture
def service_url(postgres_url: str) -> Iterator[str]:
    """A database whose owner has migrated it, as the service role reaches it."""
    with servers.database_of_its_own(postgres_url) as url:
        service_url = servers.as_service(url)
        migrations.upgrade(url)
        yield service_url


CLOSED = [
    *(f"UPDATE {name} SET team_id = team_id" for name in ADDED_TO_ALONE if name != "price_editions"),
    "UPDATE price_editions SET price = price",
    *(f"DELETE FROM {name}" for name in ADDED_TO_ALONE),
    *(f"TRUNCATE {name}" for name in (*ADDED_TO_ALONE, "teams")),
    "DELETE FROM usage_records_rest",
    "INSERT INTO usage_records_rest SELECT * FROM usage_records",
    "UPDATE alembic_version SET version_num = '0001'",
    "DROP TABLE teams",
    "ALTER TABLE teams ADD COLUMN x int",
    "ALTER TABLE usage_records DISABLE TRIGGER ALL",
    "CREATE TABLE mine (x int)",
    "CREATE ROLE mine",
    "COPY teams TO PROGRAM 'cat'",
    "SELECT pg_read_file('postgresql.conf')",
    "SET session_replication_role = replica",
]


@pytest.mark.parametrize("statement", CLOSED)
async def test_the_books_cannot_be_rewritten(service_url: str, statement: str) -> None:
    """Entries are added and never edited; tables, roles, files and programs are not the service's."""
    connection = await asyncpg.connect(service_url)
    try:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute(statement)
    finally:
        await connection.close()


async def test_rows_of_every_table_can_be_read_and_added(service_url: str) -> None:
    """Of every table that the code speaks of, so that a new one is not forgotten; of others, rows may change too."""
    connection = await asyncpg.connect(service_url)
    asked = "SELECT has_table_privilege($1, $2)"
    try:
        for name in metadata.tables:
            wanted = ("SELECT", "INSERT") if name in ADDED_TO_ALONE else ("SELECT", "INSERT", "UPDATE", "DELETE")
            assert [await connection.fetchval(asked, name, each) for each in wanted] == [True] * len(wanted), name
        sequences = await connection.fetch("SELECT oid FROM pg_class WHERE relkind = 'S'")
        for sequence in sequences:
            assert await connection.fetchval("SELECT has_sequence_privilege($1::oid, 'USAGE')", sequence["oid"])
    finally:
        await connection.close()


async def test_retention_is_the_one_way_that_rows_go(service_url: str) -> None:
    """Partitions are made ahead and dropped when they are past it, never those of today and yesterday."""
    today = datetime.now(UTC).date()
    database = Database(service_url, pool_size=1)
    try:
        async with database.begin() as connection:
            await ensure_partitions(connection, date(2026, 1, 1))
            await ensure_partitions(connection, today)
            old = await old_partitions(connection, date(2026, 1, 3))
            for name in old:
                await drop_partition(connection, name)
            left = await old_partitions(connection, date(2026, 1, 9))
            deleted = await delete_stragglers(connection, date(2026, 1, 3)), await purge_outcomes(connection, 86400.0)
        for day in (today - timedelta(days=1), today):
            with pytest.raises(Exception, match="not past any retention"):
                async with database.begin() as connection:
                    await drop_partition(connection, partition_of(day))
    finally:
        await database.close()

    assert old == ["usage_records_20260101", "usage_records_20260102"]
    assert len(left) == 6
    assert deleted == (0, 0)


async def test_the_functions_of_the_owner_are_not_for_others(service_url: str) -> None:
    """Only the service role may run them, and with no tables but the owner's."""
    database = Database(service_url, pool_size=1)
    query = """
        SELECT proname, has_function_privilege('public', oid, 'EXECUTE') AS open, proconfig FROM pg_proc
        WHERE pronamespace = 'public'::regnamespace AND prosecdef
    """
    try:
        async with database.begin() as connection:
            found = (await connection.execute(text(query))).all()
    finally:
        await database.close()

    assert len(found) == 4
    assert {(each.open, *each.proconfig) for each in found} == {(False, "search_path=public, pg_temp")}
