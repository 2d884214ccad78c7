# The way into Postgres: one engine per process, short transactions, a deadline on everything.

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Self, TypeVar

import asyncpg
import msgspec
from msgspec import Struct
from sqlalchemy import TextClause, make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from billing.core.store_errors import drop_values
from gateway.storage.schema import DRIVER_ERRORS
from protocol.serving.deadlines import running_timeout

CONNECT_TIMEOUT = 3.0  # seconds
COMMAND_TIMEOUT = 10.0  # seconds, for one statement as the client sees it
POOL_TIMEOUT = 3.0  # seconds to wait for a free connection
ANSWERS_WITHIN = 2.0  # seconds for the question whether Postgres answers, asked
SILENT_FOR = 1.0  # seconds after Postgres last gave a sign of life
PURGE_WITHIN = 15.0  # seconds after which rows that are left wait for the next round: so do what else is to be erased

# What is committed is freed from the journal: a killed server must still know it.
SETTINGS = {
    "synchronous_commit": "on",
    "jit": "off",
    "statement_timeout": f"{round(COMMAND_TIMEOUT * 1000)}",  # milliseconds, as the next
    "lock_timeout": f"{round(COMMAND_TIMEOUT * 500)}",
    "idle_in_transaction_session_timeout": f"{round(COMMAND_TIMEOUT * 1000)}",
}

T = TypeVar("T", bound=Struct)


class Database:
    """Postgres, through a small pool. One object per process, closed by its creator or at the end of ``async with``."""

    def __init__(
        self, url: str, *, direct_url: str | None = None, pool_size: int = 5, application_name: str = "tollgate"
    ) -> None:
        """``direct_url``: of Postgres itself, where ``url`` is a pooler that gives a connection for a transaction."""
        self.url = url
        self.direct_url = direct_url
        self._heard = 0.0  # monotonic seconds; when a transaction last went through
        self.engine = create_engine(
            url, pool_size=pool_size, application_name=application_name, is_pooler=direct_url is not None
        )
        self._at_once = self.engine.execution_options(isolation_level="AUTOCOMMIT")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def begin(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """Give a connection inside one short transaction: committed at the end, rolled back by an exception.

        Never wait for an upstream, a client or a lock of your own inside it. Raises one of
        POSTGRES_AWAY: after a few seconds where Postgres stands still, though a statement may take longer. No error
        that leaves it quotes a value.
        """
        return self._begin(self.engine, is_greeted=True)

    def at_once(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """Give a connection whose statements are transactions each, so that the server ends them without a word of
        ours: what one locks is free as it ends. Raises what ``begin`` does.
        """
        return self._begin(self._at_once, is_greeted=True)

    def in_time(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """The same, for a caller with a deadline of his own, who gives a Postgres up that stands still: it is not asked
        first whether it answers."""
        return self._begin(self._at_once, is_greeted=False)

    async def purge(self, statement: TextClause, at_once: int, **values: Any) -> int:
        """Drop rows by a statement with ``:limit``, so many in a transaction, until fewer are left or it has had its
        time; return how many. Of processes that do it at once each may end early: the next round finds what is left."""
        purged, count, until = 0, at_once, time.monotonic() + PURGE_WITHIN
        while count >= at_once and (not purged or time.monotonic() < until):
            async with self.begin() as connection:
                count = (await connection.execute(statement, {**values, "limit": at_once})).rowcount
            purged += count
        return purged

    @asynccontextmanager
    async def _begin(self, engine: AsyncEngine, *, is_greeted: bool) -> AsyncIterator[AsyncConnection]:
        try:
            async with engine.begin() as connection:
                if is_greeted and time.monotonic() - self._heard > SILENT_FOR:
                    await _greet(connection)
                yield connection
            self._heard = time.monotonic()
        except DRIVER_ERRORS as exc:  # of a connection that was lost while it was being made
            drop_values(exc)
            raise ConnectionError(f"Postgres cannot be spoken to: {exc}") from exc
        except Exception as exc:
            drop_values(exc)
            raise

    async def close(self) -> None:
        """Close every connection."""
        await self.engine.dispose()


async def _greet(connection: AsyncConnection) -> None:
    """Ask whether Postgres answers, beside the transaction: its first statement may have to be another."""
    raw = await connection.get_raw_connection()
    assert raw.driver_connection is not None
    try:
        async with running_timeout(ANSWERS_WITHIN):
            await raw.driver_connection.execute("SELECT 1")
    except BaseException:
        await connection.invalidate()
        raise


def create_engine(
    url: str, *, pool_size: int = 5, application_name: str = "tollgate", is_pooler: bool = False
) -> AsyncEngine:
    """Return an engine on asyncpg for a ``postgresql://`` URL.

    The server ends what the client has given up: statements past the command timeout, and transactions left open. A
    pooler lends its connections to others, too, and takes no settings for them: its role has them (docs/operations).
    """
    server_settings = {"application_name": application_name, "timezone": "UTC"}
    if not is_pooler:
        server_settings |= SETTINGS
    return create_async_engine(
        make_url(url).set(drivername="postgresql+asyncpg"),
        pool_size=pool_size,
        max_overflow=pool_size,
        pool_timeout=POOL_TIMEOUT,
        pool_recycle=900,
        pool_use_lifo=True,  # each connection plans the functions of the schema anew
        connect_args={
            "async_creator_fn": _connect,
            "command_timeout": COMMAND_TIMEOUT,
            "server_settings": server_settings,
        },
        json_serializer=lambda value: msgspec.json.encode(value).decode(),
        json_deserializer=msgspec.json.decode,
        hide_parameters=True,
    )


async def _connect(*args: Any, **told: Any) -> asyncpg.Connection[Any]:
    """Connect within seconds in which this process runs: the driver's own deadline ends before it reads what came."""
    async with running_timeout(CONNECT_TIMEOUT):
        return await asyncpg.connect(*args, **told)


def from_row(kind: type[T], row: Mapping[Any, Any], **others: Any) -> T:
    """Return a struct of a row: each field is the column of its name, but for those in ``others``."""
    return kind(**{name: row[name] for name in kind.__struct_fields__ if name not in others}, **others)
