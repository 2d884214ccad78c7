# The way into Postgres: whatever goes wrong with a connection comes as one of the errors that callers expect.

from __future__ import annotations

import ast
from pathlib import Path
from typing import NoReturn

import asyncpg
import pytest
from asyncpg.exceptions import InternalClientError

from gateway.storage.database import Database

ROOT = Path(__file__).parents[4]


def test_every_engine_hides_parameters() -> None:
    """SQLAlchemy shows what a statement was given in its errors and logs, unless it is told not to."""
    folders = ("billing", "gateway", "migrations")
    sources = [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    calls = [
        {keyword.arg for keyword in node.keywords}
        for source in sources
        if "create_async_engine" in source  # to parse all of them takes seconds
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "create_async_engine"
    ]

    assert len(calls) == 2
    assert all("hide_parameters" in call for call in calls)


class LosingEngine:
    """An engine whose connections are lost in a moment in which SQLAlchemy does not translate the driver's errors."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def begin(self) -> NoReturn:
        """Fail."""
        raise self._error


@pytest.mark.parametrize(
    "error",
    [
        asyncpg.InterfaceError("connection is closed"),
        InternalClientError("cannot switch to state 15; another operation (2) is in progress"),
        asyncpg.CannotConnectNowError("the database system is starting up"),
    ],
)
async def test_a_lost_connection_is_an_os_error(error: Exception) -> None:
    """Loops that outlive a lost database wait for SQLAlchemyError, OSError and TimeoutError alone."""
    database = Database("postgresql://nobody@127.0.0.1:9/none")
    database.engine = LosingEngine(error)  # type: ignore[assignment]

    with pytest.raises(ConnectionError, match=str(error)[:20]):
        async with database.begin():
            pass
