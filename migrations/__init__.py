# The schema's history, and the way to bring a database to it. Runs from an installed package; needs no alembic.ini.

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, make_url
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from billing.core.store_errors import drop_values
from migrations.service_role import grant_to_service

__all__ = ["downgrade", "upgrade"]

ONE_AT_A_TIME = Lock()


def upgrade(database_url: str, revision: str = "head") -> None:
    """Bring the database forward to ``revision``. Several processes may call it at once: they take turns."""

    def act(config: Config) -> None:
        command.upgrade(config, revision)
        if revision == "head":
            grant_to_service(config.attributes["connection"])

    _run(database_url, act)


def downgrade(database_url: str, revision: str) -> None:
    """Bring the database back to ``revision``; ``base`` is the empty schema. Rows of dropped tables are lost."""
    _run(database_url, lambda config: command.downgrade(config, revision))


def config_for(connection: Connection | None = None) -> Config:
    """Return alembic's configuration of this folder; env.py picks the connection up."""
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config


def _run(database_url: str, act: Callable[[Config], None]) -> None:
    # In a thread of its own, so that it also works where an event loop is already running. One at a time, because
    # alembic's context is global; other processes wait for the lock that env.py takes.
    with ONE_AT_A_TIME, ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, _connect_and_run(database_url, act)).result()


async def _connect_and_run(database_url: str, act: Callable[[Config], None]) -> None:
    url = make_url(database_url).set(drivername="postgresql+asyncpg")
    engine = create_async_engine(url, poolclass=NullPool, hide_parameters=True)
    try:
        async with engine.connect() as connection:
            await connection.run_sync(lambda sync: act(config_for(sync)))
            await connection.commit()
    except Exception as exc:
        drop_values(exc)
        raise
    finally:
        await engine.dispose()
