# Is the database's schema the one that this version needs? Asked before anything begins that would go on without it.

from __future__ import annotations

import asyncio

import asyncpg

FIRST, NEEDED = "0024", "0048"  # of migrations/versions: what was released first, and the last
ANSWERS_WITHIN = 2.0  # seconds; who cannot be asked is not waited for: known keys are served without Postgres
# What the driver raises of itself; where SQLAlchemy does not look, it arrives as it is.
DRIVER_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)


def schema_fault(database_url: str) -> str | None:
    """Return what is wrong with the schema and what helps; nothing where it is this version's or a newer one's.

    Nothing either while Postgres does not answer.
    """
    found = find_schema(database_url)
    if found is None or found >= NEEDED:
        return None
    has = f"has the schema {found}" if found else "is empty"
    return f"The database {has}, and this version needs {NEEDED}: run `tollgate migrate` first."


def find_schema(database_url: str) -> str | None:
    """Return the schema's version, empty where there is none, or ``None`` where Postgres does not say."""
    return asyncio.run(_find(database_url))


async def _find(database_url: str) -> str | None:
    try:
        connection = await asyncpg.connect(database_url, timeout=ANSWERS_WITHIN)
        try:
            found = await connection.fetchval("SELECT version_num FROM alembic_version", timeout=ANSWERS_WITHIN)
            return str(found or "")  # a schema that was taken back to nothing leaves the table
        finally:
            connection.terminate()
    except asyncpg.UndefinedTableError:
        return ""
    except (OSError, TimeoutError, *DRIVER_ERRORS):
        return None
