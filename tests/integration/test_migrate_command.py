# `tollgate migrate` as a process.

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import asyncpg
import pytest
from alembic.util import CommandError

import migrations
from gateway.commands.migrate import TableInUse, migrate_when_reachable
from gateway.dev.embedded import EmbeddedPostgres
from gateway.run.processes import free_port
from gateway.storage.schema import NEEDED, find_schema, schema_fault
from tests.support.config_text import write_config
from tests.support.servers import execute

TOLLGATE = Path(sys.executable).with_name("tollgate")
EMPTY = "DROP TABLE alembic_version"
OLDER = "UPDATE alembic_version SET version_num = '0001'"


def test_it_waits_for_a_database_that_is_still_starting(tmp_path: Path) -> None:
    """Started before Postgres, and with Postgres busy recovering from a kill, it migrates as soon as it can."""
    postgres = EmbeddedPostgres(tmp_path / "data", server_settings={"fsync": "off"})
    config = write_config(tmp_path / "tollgate.yaml", postgres.url, "redis://127.0.0.1:9/0")
    command = [str(TOLLGATE), "migrate", "--config", str(config), "--wait", "60"]
    try:
        early = subprocess.Popen(command, stderr=subprocess.PIPE)
        postgres.start()
        first = early.communicate(timeout=60)[1]
        postgres.stop()
        again = subprocess.Popen(command, stderr=subprocess.PIPE)
        postgres.start()
        second = again.communicate(timeout=60)[1]
    finally:
        postgres.remove()

    assert (early.returncode, first) == (0, b"")
    assert (again.returncode, second) == (0, b"")


def test_a_newer_database_is_left_as_it_is(new_database_url: str, tmp_path: Path) -> None:
    """Who goes back to the version before finds its successor's schema, starts on it, and changes nothing."""
    asyncio.run(execute(new_database_url, "UPDATE alembic_version SET version_num = '9999'"))
    config = write_config(tmp_path / "tollgate.yaml", new_database_url, "redis://127.0.0.1:9/0")

    done = subprocess.run([str(TOLLGATE), "migrate", "--config", str(config)], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
    assert "9999, newer than this version's" in done.stdout
    assert find_schema(new_database_url) == "9999"
    assert schema_fault(new_database_url) is None


@pytest.mark.parametrize(
    ("command", "change", "found"),
    [
        ("serve", OLDER, "has the schema 0001"),
        ("work", EMPTY, "is empty"),
        pytest.param("serve", EMPTY, "is empty", marks=pytest.mark.soak),
        pytest.param("work", OLDER, "has the schema 0001", marks=pytest.mark.soak),
    ],
)
def test_who_needs_a_newer_schema_says_so_and_ends(
    new_database_url: str, tmp_path: Path, command: str, change: str, found: str
) -> None:
    """A forgotten `tollgate migrate` is one line at the start, and not a 503 for every client."""
    asyncio.run(execute(new_database_url, change))
    config = write_config(tmp_path / "tollgate.yaml", new_database_url, "redis://127.0.0.1:9/0")
    port = ["--port", str(free_port())] if command == "serve" else []

    done = subprocess.run([str(TOLLGATE), command, "--config", str(config), *port], capture_output=True, text=True)

    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"The database {found}, and this version needs {NEEDED}: run `tollgate migrate` first."
    ]


def test_a_command_says_that_the_schema_is_missing(new_database_url: str, tmp_path: Path) -> None:
    """So does whoever makes the first team too early."""
    asyncio.run(execute(new_database_url, "DROP TABLE teams CASCADE"))
    config = write_config(tmp_path / "tollgate.yaml", new_database_url, "redis://127.0.0.1:9/0")

    done = subprocess.run(
        [str(TOLLGATE), "teams", "create", "first", "--config", str(config)], capture_output=True, text=True
    )

    assert done.returncode == 1 and done.stderr.strip().endswith("; run `tollgate migrate` first")


def test_no_call_waits_behind_a_migration_that_waits(new_database_url: str) -> None:
    """A forgotten transaction keeps a table from it; it steps aside again and again, so that others read on."""
    migrations.downgrade(new_database_url, "0028")

    async def scene() -> None:
        forgotten, other, watch = [await asyncpg.connect(new_database_url) for _ in range(3)]
        reading = forgotten.transaction()
        await reading.start()
        await forgotten.fetch("SELECT * FROM api_keys")
        migrating = asyncio.create_task(asyncio.to_thread(migrate_when_reachable, new_database_url, 0.0))
        async with asyncio.timeout(60):
            for _ in range(2):  # it waits, gives up, and waits again
                while not await watch.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                    await asyncio.sleep(0.01)
                await other.fetch("SELECT * FROM api_keys")  # behind the one that waits, until that gives up
            assert not migrating.done()
            await reading.rollback()
            await migrating
        for connection in (forgotten, other, watch):
            await connection.close()

    asyncio.run(scene())

    assert find_schema(new_database_url) == NEEDED


def test_a_table_that_is_never_free_is_said(new_database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a minute nothing was changed, and it says where to look."""
    monkeypatch.setattr("gateway.commands.migrate.FREE_WITHIN", 0.0)
    migrations.downgrade(new_database_url, "0028")

    async def scene() -> None:
        forgotten = await asyncpg.connect(new_database_url)
        async with forgotten.transaction():
            await forgotten.fetch("SELECT * FROM api_keys")
            with pytest.raises(TableInUse, match="idle in transaction"):
                await asyncio.to_thread(migrate_when_reachable, new_database_url, 0.0)
        await forgotten.close()

    asyncio.run(scene())

    assert find_schema(new_database_url) == "0028"


def test_an_unreachable_database_is_said_in_a_line(tmp_path: Path) -> None:
    """Without --wait a closed port ends it with status 1 and no traceback."""
    url = f"postgresql://tollgate:x@127.0.0.1:{free_port()}/tollgate"
    config = write_config(tmp_path / "tollgate.yaml", url, "redis://127.0.0.1:9/0")
    started = time.monotonic()
    done = subprocess.run([str(TOLLGATE), "migrate", "--config", str(config)], capture_output=True, text=True)

    assert done.returncode == 1
    assert "Postgres cannot be reached" in done.stderr and "Traceback" not in done.stderr
    assert time.monotonic() - started < 30


def test_a_database_of_before_the_first_release_is_told_what_to_do(new_database_url: str, tmp_path: Path) -> None:
    """The migrations begin from 1.0.0: a line says so, and nothing is done."""
    asyncio.run(execute(new_database_url, OLDER))
    config = write_config(tmp_path / "tollgate.yaml", new_database_url, "redis://127.0.0.1:9/0")

    done = subprocess.run([str(TOLLGATE), "migrate", "--config", str(config)], capture_output=True, text=True)

    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "The database has the schema 0001, of before version 1.0.0: migrate it with that one first."
    ]
    assert find_schema(new_database_url) == "0001"


def test_a_schema_that_was_taken_back_to_nothing_is_no_schema(new_database_url: str) -> None:
    """The table of its version is left, without a row: whoever would start on it is told that there is none."""
    asyncio.run(execute(new_database_url, "DELETE FROM alembic_version"))

    assert find_schema(new_database_url) == ""
    assert "is empty" in str(schema_fault(new_database_url))


def test_a_schema_that_cannot_be_asked_for_is_not_called_old(
    new_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Postgres takes no further connection its version is unknown: alembic's own words are told."""
    asyncio.run(execute(new_database_url, OLDER))
    monkeypatch.setattr("gateway.commands.migrate.find_schema", lambda url: None)

    with pytest.raises(CommandError, match="0001"):
        migrate_when_reachable(new_database_url, 0.0)
