# The way into Postgres: whatever goes wrong with a connection comes as one of the errors that callers expect.

from __future__ import annotations

from typing import NoReturn

import asyncpg
import pytest
from asyncpg.exceptions import InternalClientError

from gateway.database import Database


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
