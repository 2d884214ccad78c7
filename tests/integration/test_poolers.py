# What a pooler in transaction mode asks of us: whichever connection a transaction gets, it finds nothing of ours there
# and leaves nothing. Only the connection that listens is one of its own, to Postgres itself.

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import asyncpg
import pytest
from redis.asyncio import Redis
from sqlalchemy import text

from billing.core.holds import Hold, HoldRequest, Leg, Limits, RefusedHold, Scope
from billing.upkeep.auditor import Found
from gateway.accounts.auth import Authenticator
from gateway.calls.accounting import CallAccounting
from gateway.core.clock import Clock
from gateway.storage.books import open_books
from gateway.storage.database import Database
from tests.support.factories import make_record
from tests.support.house import settings_for
from tests.support.pgbouncer import CARRIES_STATEMENTS, find_pgbouncer, running_pgbouncer

CALLS = 12
CAP = Limits(nanousd_per_day=10_000_000, nanousd_per_month=10_000_000)  # of three calls: it is asked for call by call
LIMITS = '{"nanousd_per_day": 10000000, "nanousd_per_month": 10000000}'

# What a session may keep from one transaction to the next. What asyncpg prepares is carried along by the pooler.
KEPT = text("""
    SELECT (SELECT array_agg(name) FROM pg_settings WHERE source = 'session' AND name NOT LIKE 'transaction%') AS set,
           (SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory') AS locks,
           (SELECT count(*) FROM pg_listening_channels()) AS channels,
           (SELECT count(*) FROM pg_cursors WHERE is_holdable) AS cursors,
           (SELECT count(*) FROM pg_class WHERE relnamespace = pg_my_temp_schema()) AS temporary
""")


class AnyConnection:
    """A database that gives each transaction whichever of its connections the dice say."""

    def __init__(self, url: str) -> None:
        self.ways = [Database(url, pool_size=1) for _ in range(3)]
        self._dice = random.Random(7)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        """Give one of them, for a transaction."""
        async with self._dice.choice(self.ways).begin() as connection:
            yield connection

    @asynccontextmanager
    async def at_once(self) -> AsyncIterator[Any]:
        """Give them all: each statement is a transaction of its own."""
        yield self

    in_time = at_once

    async def execute(self, statement: Any, values: Any = None) -> Any:
        """Execute one."""
        async with self._dice.choice(self.ways).at_once() as connection:
            return await connection.execute(statement, values)


async def keep_books(database: Database, redis: Redis, folder: Path) -> Found:
    """Do all that a process does with its books, and return what the audit found."""
    clock = Clock()
    async with database.begin() as connection:
        await connection.execute(text(f"INSERT INTO teams (id, name, limits) VALUES ('team_a', '', '{LIMITS}')"))
        await connection.execute(
            text("INSERT INTO api_keys (id, team_id, digest, prefix) VALUES ('key_a', 'team_a', 'x', '')")
        )
    settings = settings_for("", "", "http://127.0.0.1:9/v1", folder)
    async with open_books(settings, clock, database, redis) as books:
        scopes = (Scope("team", "team_a", CAP), Scope("key", "key_a", Limits()))
        seen: list[Hold | RefusedHold] = []
        for _ in range(CALLS):
            legs = (Leg("a", 1000, 3_000_000),)
            request = HoldRequest(request_id=clock.new_id(), team_id="team_a", scopes=scopes, legs=legs)
            hold = await books.quotas.open(request)
            seen.append(hold)
            if isinstance(hold, Hold):
                account = CallAccounting(hold, books.journal, books.quotas)
                account.open(make_record(request.request_id, owner=hold.owner))
                account.close(make_record(request.request_id, owner=hold.owner, cost_nanousd=1_000_000))
                account.settle()
            await books.quotas.leases.returns.tell()
        await books.flusher.flush_once()
        await books.owner.beat()
        await books.quotas.leases.returns.set_again()
        await books.flusher.deliver_again()
        await books.sweeper.do_chores()
        await books.auditor.audit_once()
    served = [one for one in seen if isinstance(one, Hold)]
    assert 3 <= len(served) < CALLS
    async with database.begin() as connection:
        assert (await connection.execute(text("SELECT count(*) FROM usage_records"))).scalar_one() == len(served)
        assert (await connection.execute(text("SELECT count(*) FROM owners WHERE ended_at IS NULL"))).scalar_one() == 0
    return books.auditor.found


async def test_no_transaction_needs_or_leaves_a_session(database_url: str, redis: Redis, tmp_path: Path) -> None:
    """Each on whichever connection there is, all books agree, and no connection has kept anything."""
    database = AnyConnection(database_url)
    found = await keep_books(cast(Database, database), redis, tmp_path)
    kept = []
    for way in database.ways:
        async with way.begin() as connection:
            kept.append((await connection.execute(KEPT)).one())
        await way.close()

    assert found.books > 0
    assert (found.statements, found.counters) == (0, 0)
    assert kept == [(None, 0, 0, 0, 0)] * 3


async def test_the_books_are_kept_through_pgbouncer(database_url: str, redis: Redis, tmp_path: Path) -> None:
    """In transaction mode, with fewer connections than the process has."""
    if (program := find_pgbouncer()) is None:
        pytest.skip(f"no PgBouncer {'.'.join(map(str, CARRIES_STATEMENTS))} or later here")
    with running_pgbouncer(program, database_url, size=2) as url:
        async with Database(url, direct_url=database_url) as database:
            found = await keep_books(database, redis, tmp_path)
            several = await asyncio.gather(*(_pid(database) for _ in range(9)))

    assert found.books > 0
    assert (found.statements, found.counters) == (0, 0)
    assert len(set(several)) <= 2


async def test_a_pooler_is_not_listened_to(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told to a session of Postgres reaches nobody through a pooler: each key is looked up instead, until a way
    past it is named."""
    monkeypatch.setattr(asyncpg.Connection, "get_server_pid", lambda _: 0)  # a pooler gives a number of its own
    heard = []
    for direct_url in (None, database_url):
        async with Database(database_url, direct_url=direct_url) as database:
            auth = Authenticator(database, Clock(), "pepper", ())
            listening = asyncio.create_task(auth.run())
            try:
                async with asyncio.timeout(0.3 if direct_url is None else 5.0):
                    heard.append(await auth.is_listening.wait())
            except TimeoutError:
                heard.append(False)
            listening.cancel()

    assert heard == [False, True]


async def _pid(database: Database) -> int:
    async with database.begin() as connection:
        await asyncio.sleep(0.01)
        return int((await connection.execute(text("SELECT pg_backend_pid()"))).scalar_one())
