# Reports that are added up call by call have a time of their own, and an error of their own when it does not suffice.

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from protocol.errors import BadRequest

WITHIN = 8  # seconds; less than the client of the database waits, so that it is the server that says so
CANCELLED = "57014"  # Postgres: query_canceled


@asynccontextmanager
async def added_up_by_call(connection: AsyncConnection, within: float = WITHIN) -> AsyncIterator[None]:
    """Run queries over single calls. Raises BadRequest when there are too many of them to be added up in time.

    The transaction can go on after it.
    """
    try:
        async with connection.begin_nested():
            await connection.execute(text(f"SET LOCAL statement_timeout = {round(within * 1000)}"))
            yield
    except DBAPIError as exc:
        if getattr(exc.orig, "sqlstate", None) != CANCELLED:
            raise
        raise BadRequest(
            f"These days hold too many calls to be added up one by one in {within:g} seconds. Ask for fewer days.",
            param="from",
            code="period_too_long",
        ) from exc
