# What billing asks of the world outside: a clock and a database. The gateway brings both.

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from datetime import date
from typing import Any, Protocol

from sqlalchemy import TextClause
from sqlalchemy.ext.asyncio import AsyncConnection


class Clock(Protocol):
    """Time, as an argument."""

    ahead: float  # seconds; what the database's clock shows more than this machine's

    def now(self) -> float:
        """Return unix seconds."""

    def monotonic(self) -> float:
        """Return seconds that never go back."""

    def today(self) -> date:
        """Return the UTC day."""

    def follow(self, ahead: float) -> None:
        """Show so many seconds more than this machine's own clock: the database's time."""


class Database(Protocol):
    """The way into Postgres."""

    def begin(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """Give a connection inside one short transaction."""

    def at_once(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """Give a connection whose statements are transactions each: what one locks is free as it ends, without another
        statement."""

    def in_time(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """The same, for a caller with a deadline of his own."""


async def fetch_within(
    connection: AsyncConnection, query: TextClause, values: Mapping[str, Any], seconds: float
) -> list[Mapping[str, Any]]:
    """Return the rows of a statement that may take longer than the database's client gives every other."""
    compiled = query.compile(dialect=connection.dialect)
    raw = (await connection.get_raw_connection()).driver_connection
    assert raw is not None
    in_order = [values[name] for name in compiled.positiontup or ()]
    rows: list[Mapping[str, Any]] = await raw.fetch(compiled.string, *in_order, timeout=seconds)
    return rows
