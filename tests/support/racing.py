# Transactions on leases that meet in Postgres: a team, owners and leases to race over, the verbs, and seats from which
# one is said without being committed, stopped at a row, and seen to wait.

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import permutations
from typing import Any

import asyncpg
from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.core.ids import uuid7
from billing.core.records import UsageRecord
from billing.ledger.corrections import CORRECT
from billing.ledger.ledger import write_records
from billing.quotas.lease_store import NANOUSD, TOKENS, Need, PostgresLeases, Told
from gateway.storage.database import Database, create_engine
from tests.simulation.sql_model import SqlModel
from tests.support.clock import NOON, SetClock
from tests.support.factories import make_record

DAY, MONTH = "2026-04-05", "2026-04"
CAPS = {TOKENS: 1000, NANOUSD: 900, "month": 1000}
SCOPES = ("key:key_a", "team:team_a")
SHARE = 0.25
TABLES = ("owners", "balances", "leases", "usage_records", "usage_daily", "corrections", "failovers")
SETTLE = 5.0  # seconds in which whatever goes on must come to rest


class Verb(Struct, frozen=True):
    """Something said of leases: to Postgres inside a transaction, or to the model."""

    name: str
    say: Callable[[Seat, AsyncConnection], Awaitable[Any]]
    tell: Callable[[SqlModel, float], Any]

    def __repr__(self) -> str:
        return self.name


def record_of(owner: str, number: int) -> UsageRecord:
    """Return the row of a call that ``owner`` held; the same for the same number."""
    return make_record(
        uuid7(int(NOON * 1000), number), owner=owner, input_tokens=90, cached_input_tokens=0, output_tokens=30,
        cost_nanousd=110,
    )  # fmt: skip


def needs(amount: int, want: int = 0) -> list[Need]:
    """Return an ask for ``amount`` of every unit of team and key."""
    return [Need(scope, unit, amount, max(amount, want), amount) for scope in SCOPES for unit in (TOKENS, NANOUSD)]


def told(returned: int, granted: int = 0) -> list[Told]:
    """Return how an owner's leases stand."""
    return [Told(scope, unit, DAY, granted, returned) for scope in SCOPES for unit in (TOKENS, NANOUSD)]


def take(owner: str, amount: int = 250, asks: int = 2) -> Verb:
    """Draw room, asked for by several callers at once."""
    wanted = [needs(amount, 2 * amount)] * asks
    return Verb(
        f"take({owner})",
        lambda seat, on: seat.store(on).take(owner, DAY, wanted, SHARE),
        lambda model, now: model.take_room(owner, DAY, wanted, SHARE, now, now),
    )


def give_back(owner: str, returned: int = 60) -> Verb:
    """Return room."""
    return Verb(
        f"give_back({owner})",
        lambda seat, on: seat.store(on).give_back(owner, told(returned)),
        lambda model, now: model.give_back(owner, told(returned), now),
    )


def flush(flusher: str, owners: Iterable[str], first: int) -> Verb:
    """Insert rows of some owners: two of each."""
    records = [record_of(owner, first + 10 * ord(owner[0]) + i) for owner in owners for i in (0, 1)]

    async def say(seat: Seat, on: AsyncConnection) -> None:
        await write_records(on, records, today=seat.clock.today(), flusher=flusher)

    return Verb(
        f"flush({flusher or '-'}:{''.join(owners)})",
        say,
        lambda model, now: model.insert(flusher, records, DAY),
    )


def limit(scope: str, caps: dict[str, int]) -> Verb:
    """Change the limits of a team or key."""
    limits = {"tokens_per_day": caps[TOKENS], "nanousd_per_day": caps[NANOUSD], "nanousd_per_month": caps["month"]}

    async def say(_: Seat, on: AsyncConnection) -> None:
        await on.execute(
            UPDATE_LIMITS[scope.partition(":")[0]], {"limits": json.dumps(limits), "id": scope.partition(":")[2]}
        )
        await on.execute(text("SELECT follow_limits(:scope)"), {"scope": scope})

    return Verb(f"limit({scope})", say, lambda model, now: model.set_limits(scope, limits, now))


def correct(tokens: int = 300, nanousd: int = -40) -> Verb:
    """Book a correction of team and key."""
    scopes = ["team:team_a", "key:key_a"]
    values = {"scopes": scopes, "day": DAY, "tokens": tokens, "nanousd": nanousd}

    async def say(_: Seat, on: AsyncConnection) -> None:
        await on.execute(CORRECT, values)

    return Verb("correct", say, lambda model, now: model.correct(scopes, DAY, tokens, nanousd))


def end(owner: str) -> Verb:
    """End an owner."""
    return Verb(f"end({owner})", lambda seat, on: seat.store(on).end(owner), lambda model, now: model.end(owner, now))


def set_again(owner: str) -> Verb:
    """Tell the leases of an owner anew."""
    return Verb(
        f"set_again({owner})",
        lambda seat, on: seat.store(on).set_again(owner, told(40, 330)),
        lambda model, now: model.set_again(owner, told(40, 330), now),
    )


UPDATE_LIMITS = {
    "team": text("UPDATE teams SET limits = CAST(:limits AS jsonb) WHERE id = :id"),
    "key": text("UPDATE api_keys SET limits = CAST(:limits AS jsonb) WHERE id = :id"),
}


class OneTransaction:
    """A database of which every transaction is the one that is open."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.connection = connection

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """Give the connection."""
        yield self.connection

    at_once = in_time = begin


class Seat:
    """A connection on which a verb is said and left open until the test decides."""

    def __init__(self, connection: AsyncConnection, pid: int, clock: SetClock) -> None:
        self.connection, self.pid, self.clock = connection, pid, clock
        self.saying: asyncio.Task[Any] | None = None

    def store(self, connection: AsyncConnection) -> PostgresLeases:
        """Return the leases inside this transaction."""
        return PostgresLeases(OneTransaction(connection), self.clock, uses_server_time=False)

    def say(self, verb: Verb) -> asyncio.Task[Any]:
        """Begin to say it; nothing is committed."""
        self.saying = asyncio.create_task(verb.say(self, self.connection))  # type: ignore[arg-type]
        return self.saying

    async def end(self, *, commits: bool = True) -> Any:
        """Wait until it is said, and commit or roll back."""
        assert self.saying is not None
        answer = await asyncio.wait_for(self.saying, SETTLE)
        self.saying = None
        await (self.connection.commit() if commits else self.connection.rollback())
        return answer


class Track:
    """A prepared database, put back before each race, three seats, and somebody to look on."""

    def __init__(self, database: Database, clock: SetClock) -> None:
        self.database, self.clock = database, clock
        self.seats: list[Seat] = []
        self.models: dict[str, Callable[[], SqlModel]] = {}
        self._engine: AsyncEngine = create_engine(database.url, pool_size=5)
        self._open: list[AsyncConnection] = []
        self.watcher: asyncpg.Connection
        self.blocker: asyncpg.Connection

    async def prepare(self) -> None:
        """Make what is raced over, in two states: ``fresh`` without a balance, ``used`` with leases and rows."""
        self.watcher = await asyncpg.connect(self.database.url)
        self.blocker = await asyncpg.connect(self.database.url)
        await self.watcher.execute("SET synchronous_commit = off")
        await self.watcher.execute("INSERT INTO teams (id, name) VALUES ('team_a', '')")
        await self.watcher.execute(
            "INSERT INTO api_keys (id, team_id, digest, prefix) VALUES ('key_a', 'team_a', 'x', '')"
        )
        for _ in range(3):
            connection = await self._engine.connect()
            await connection.execute(text("SET deadlock_timeout = '50ms'"))
            await connection.execute(text("SET synchronous_commit = off"))
            pid = (await connection.execute(text("SELECT pg_backend_pid()"))).scalar_one()
            await connection.commit()
            self._open.append(connection)
            self.seats.append(Seat(connection, pid, self.clock))
        store = PostgresLeases(self.database, self.clock, uses_server_time=False)
        for verb in STARTED:
            await self._do(verb)
        for owner in ("a", "b", "c"):
            await store.begin(owner, "")
        await self._keep("fresh", STARTED)
        for verb in USED:
            await self._do(verb)
        await self._keep("used", STARTED + USED)

    async def close(self) -> None:
        """Give all connections back."""
        for connection in self._open:
            await connection.close()
        await self._engine.dispose()
        await self.watcher.close()
        await self.blocker.close()

    async def restore(self, state: str) -> None:
        """Put everything back as it was."""
        limits = json.dumps(LIMITS)
        await self.watcher.execute(
            "".join(f"DELETE FROM {name}; INSERT INTO {name} SELECT * FROM kept_{state}_{name};" for name in TABLES)
            + f"UPDATE teams SET limits = '{limits}'; UPDATE api_keys SET limits = '{limits}'"
        )

    async def rest(self, seat: Seat) -> bool:
        """Wait until a seat has said its verb or waits for a lock; whether it waits."""
        assert seat.saying is not None
        until = asyncio.get_running_loop().time() + SETTLE
        while not seat.saying.done():
            if await self.watcher.fetchval("SELECT cardinality(pg_blocking_pids($1)) > 0", seat.pid):
                return True
            await asyncio.sleep(0)
            assert asyncio.get_running_loop().time() < until, "neither done nor waiting"
        return False

    @asynccontextmanager
    async def stop_at(self, row: str) -> AsyncIterator[None]:
        """Keep a row, or the place where it would be, to ourselves."""
        await self.blocker.execute("BEGIN")
        try:
            await self.blocker.execute(STOPS[row])
            yield
        finally:
            await self.blocker.execute("ROLLBACK")

    async def tables(self) -> tuple[dict[Any, Any], ...]:
        """Return balances, leases and rows, without what says nothing."""
        balances = {
            tuple(row)[:3]: tuple(row)[3:]
            for row in await self.watcher.fetch("SELECT scope, unit, period, cap, drawn, corrected FROM balances")
        }
        leases = {
            tuple(row)[:4]: tuple(row)[4:]
            for row in await self.watcher.fetch(
                "SELECT owner, scope, unit, to_char(day, 'YYYY-MM-DD'), granted, returned, spent, overdrawn FROM leases"
            )
        }
        rows = {str(row[0]): 1 for row in await self.watcher.fetch("SELECT request_id FROM usage_records")}
        return _telling(balances, 1), _telling(leases, 0), rows

    async def wrong(self) -> list[asyncpg.Record]:
        """Return the balances that are not the sum of their leases, or have another cap than their limit."""
        return await self.watcher.fetch(BOOKS)

    async def passed(self) -> list[asyncpg.Record]:
        """Return the balances that are past their cap by more than rows were forced on them."""
        return await self.watcher.fetch(PASSED)

    async def check(self, state: str, verbs: Sequence[Verb]) -> None:
        """Compare with the orders in which the model can say the verbs that were committed."""
        found = await self.tables()
        orders = [self._after(state, order) for order in permutations(verbs)]
        assert found in orders, f"no order of {verbs} gives {found}, but {orders}"
        assert not (wrong := await self.wrong()), wrong
        if all(verb.name.partition("(")[0] in ("take", "give_back", "end") for verb in verbs):
            assert not (passed := await self.passed()), passed
        calls = await self.watcher.fetchval("SELECT coalesce(sum(calls), 0) FROM usage_daily")
        assert calls == len(found[2])

    def _after(self, state: str, verbs: Iterable[Verb]) -> tuple[dict[Any, Any], ...]:
        model = self.models[state]()
        for verb in verbs:
            verb.tell(model, self.clock.now())
        balances = {key: (one.cap, one.drawn, one.corrected) for key, one in model.balances.items()}
        leases = {key: (one.granted, one.returned, one.spent, one.overdrawn) for key, one in model.leases.items()}
        return _telling(balances, 1), _telling(leases, 0), dict.fromkeys(model.rows, 1)

    async def _do(self, verb: Verb) -> None:
        self.seats[0].say(verb)
        await self.seats[0].end()

    async def _keep(self, state: str, verbs: tuple[Verb, ...]) -> None:
        for name in TABLES:
            await self.watcher.execute(f"CREATE TEMP TABLE kept_{state}_{name} AS SELECT * FROM {name}")

        def make() -> SqlModel:
            model = SqlModel()
            for owner in ("a", "b", "c"):
                model.begin(owner, "", self.clock.now())
            for verb in verbs:
                verb.tell(model, self.clock.now())
            return model

        self.models[state] = make


def _telling(rows: dict[Any, tuple[Any, ...]], first: int) -> dict[Any, tuple[Any, ...]]:
    return {key: row for key, row in rows.items() if any(row[first:])}


def _stops() -> Iterator[tuple[str, str]]:
    yield from ((f"owner {one}", f"SELECT FROM owners WHERE id = '{one}' FOR UPDATE") for one in "ab")
    yield "team", "SELECT FROM teams FOR UPDATE"
    yield "key", "SELECT FROM api_keys FOR UPDATE"
    for owner in "ab":
        for scope in SCOPES:
            for unit in (TOKENS, NANOUSD):
                key = f"'{owner}', '{scope}', '{unit}', '{DAY}'"
                yield (
                    f"lease {owner} {scope} {unit}",
                    f"INSERT INTO leases (owner, scope, unit, day) VALUES ({key})"
                    " ON CONFLICT ON CONSTRAINT leases_pkey DO UPDATE SET spent = leases.spent",
                )
    for scope in SCOPES:
        for unit, period in ((TOKENS, DAY), (NANOUSD, DAY), (NANOUSD, MONTH)):
            yield (
                f"balance {scope} {unit} {period}",
                f"INSERT INTO balances (scope, unit, period) VALUES ('{scope}', '{unit}', '{period}')"
                " ON CONFLICT ON CONSTRAINT balances_pkey DO UPDATE SET drawn = balances.drawn",
            )


STOPS = dict(_stops())
LIMITS = {"tokens_per_day": CAPS[TOKENS], "nanousd_per_day": CAPS[NANOUSD], "nanousd_per_month": CAPS["month"]}
STARTED = tuple(limit(scope, CAPS) for scope in SCOPES)
USED = (
    take("a", 400, 1), take("b", 100, 1), give_back("a", 20), flush("a", "a", 1000), correct(10, 10),
)  # fmt: skip
VERBS = (
    take("a"), take("b", 200), give_back("a"), give_back("b", 40), flush("a", "a", 3000), flush("", "ba", 5000),
    flush("c", "ab", 3000), limit("team:team_a", {TOKENS: 700, NANOUSD: 1800, "month": 600}),
    limit("key:key_a", {TOKENS: 1500, NANOUSD: 400, "month": 5000}), correct(), end("a"), set_again("a"),
)  # fmt: skip

BOOKS = """
    SELECT balance.* FROM balances AS balance
    LEFT JOIN teams ON balance.scope = 'team:' || teams.id
    LEFT JOIN api_keys ON balance.scope = 'key:' || api_keys.id
    WHERE balance.drawn <> (
            SELECT coalesce(sum(granted - returned), 0) FROM leases AS lease
            WHERE lease.scope = balance.scope AND lease.unit = balance.unit
              AND starts_with(to_char(lease.day, 'YYYY-MM-DD'), balance.period)
        )
       OR balance.cap IS DISTINCT FROM CAST(coalesce(teams.limits, api_keys.limits) ->>
            (balance.unit || CASE length(balance.period) WHEN 7 THEN '_per_month' ELSE '_per_day' END) AS bigint)
"""
PASSED = """
    SELECT balance.* FROM balances AS balance
    WHERE balance.drawn + balance.corrected > balance.cap + (
        SELECT coalesce(sum(overdrawn), 0) FROM leases AS lease
        WHERE lease.scope = balance.scope AND lease.unit = balance.unit
          AND starts_with(to_char(lease.day, 'YYYY-MM-DD'), balance.period)
    )
"""
