# One process with many owners of leases, each with accounting, connections and loops of its own, that make calls as the
# benchmark says: hold, opened, a pause in which an upstream would answer, closed, settled.

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack, suppress
from ctypes import Array, c_longlong
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop
from msgspec import Struct
from redis.asyncio import Redis
from sqlalchemy import text

from billing.core.holds import Hold, HoldRequest, Leg, Limits, Scope
from billing.core.records import Status
from gateway.calls.accounting import CallAccounting
from gateway.core.clock import Clock
from gateway.storage.books import Books, open_books
from gateway.storage.database import Database
from tests.support.factories import make_record
from tests.support.house import settings_for

PLENTY = Limits(
    requests_per_minute=10**9,
    tokens_per_minute=10**12,
    concurrent_requests=10**6,
    tokens_per_day=10**12,
    nanousd_per_day=10**15,
    nanousd_per_month=9 * 10**15,
)
HOLD, USED = 10_000_000, 400_000  # nano-dollars of a call among all teams
CAP, CAPPED_USED, FITS = (
    10**9,
    1_000,
    100,
)  # of the team at its cap: so many calls at once, and they use next to nothing
LASTS, CAPPED_LASTS = 0.05, 0.06  # seconds
OTHERS = 0.05  # of the calls, where one team is at its cap, are of other teams
BACK_WITHIN = 0.25  # seconds in which other owners give room back that they do not use
LOOK_EVERY = 0.1  # seconds, for rows
WAIT_FOR_ROWS = 10.0  # seconds, at most

SEEN = text("SELECT request_id::text FROM usage_records WHERE request_id = ANY(CAST(:ids AS uuid[]))")


class Place(Struct, frozen=True, kw_only=True):
    """Where the stores are, and which owners of which teams this process has."""

    folder: str
    postgres: str
    direct: str | None  # past a pooler, which ``postgres`` is then
    valkey: str
    owners: list[int]
    teams: int
    keys: int
    capped: str
    seed: int


class Owner(Struct):
    """One gateway's accounting, in this process."""

    clock: Clock
    database: Database
    books: Books

    def request(self, team: str, key: str, limits: Limits, key_limits: Limits, cost: int) -> HoldRequest:
        """Return what a call asks to hold."""
        scopes = (Scope("team", team, limits), Scope("key", key, key_limits))
        return HoldRequest(request_id=self.clock.new_id(), team_id=team, scopes=scopes, legs=(Leg("a", 1_000, cost),))


class Told(Struct):
    """What happened to the calls of one command."""

    waits: list[float] = []  # ms until a call was let in
    refused: list[float] = []  # ms until it was refused
    wrong: int = 0  # refused although the cap had had room for all that waited, and for BACK_WITHIN
    unknown: int = 0  # of all refused, because Postgres did not say in time what is left
    late: list[float] = []  # s from the close of another team's call until its row was seen
    unseen: int = 0  # rows that were not there after ten seconds
    cpu: float = 0.0  # seconds of this process


def keep_owners(place: Place, pipe: Connection, shared: Array[c_longlong]) -> None:
    """Open the owners, say so, and do what comes through the pipe until it closes.

    ``shared``, over all processes: what calls of the team at its cap hold and have used, how many of them wait, and
    when the cap last had no room for all of these (monotonic ns).
    """
    uvloop.run(OpenCalls(place, pipe, shared).run())


class OpenCalls:
    """The owners of this process."""

    def __init__(self, place: Place, pipe: Connection, shared: Any) -> None:
        self.place = place
        self.pipe = pipe
        self.shared = shared
        self.dice = random.Random(place.seed)
        self.owners: list[Owner] = []
        self.told = Told()
        self.closed: dict[str, float] = {}  # when calls of other teams closed whose rows were not seen yet

    async def run(self) -> None:
        """Open, serve once with each, then obey."""
        imported, loop = time.monotonic(), asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            served = await asyncio.gather(*(self.open(stack, number) for number in self.place.owners))
            self.pipe.send({"imported": imported, "first": min(served), "last": max(served)})
            while True:
                try:
                    name, *values = await loop.run_in_executor(None, self.pipe.recv)
                except EOFError:
                    return
                self.told, before = Told(), time.process_time()
                await getattr(self, name)(*values)
                self.told.cpu = time.process_time() - before
                self.pipe.send(self.told)

    async def open(self, stack: AsyncExitStack, number: int) -> float:
        """Open one owner, and return when it had let in its first call (monotonic seconds)."""
        place, clock = self.place, Clock()
        database = Database(
            place.postgres, direct_url=place.direct, pool_size=3
        )  # as many as it uses at once: each more would be made anew
        stack.push_async_callback(database.close)
        redis: Redis = Redis.from_url(place.valkey, socket_timeout=0.25, socket_connect_timeout=0.25)
        stack.push_async_callback(redis.aclose)
        folder = Path(place.folder) / str(number)
        settings = settings_for(place.postgres, place.valkey, "http://127.0.0.1:9/v1", folder)
        books = await stack.enter_async_context(open_books(settings, clock, database, redis))
        for keeper in (books.owner, books.quotas.rates, books.flusher, books.sweeper, books.auditor):
            stack.callback(asyncio.create_task(keeper.run()).cancel)
        owner = Owner(clock, database, books)
        self.owners.append(owner)
        while not await self.call(owner, *self.any_key(), 0.0):  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0.01)
        return time.monotonic()

    async def wait(self, seconds: float) -> None:
        """Do nothing but live."""
        await asyncio.sleep(seconds)

    async def spread(self, rate: float, seconds: float) -> None:
        """Make so many calls a second, each of any key at any owner."""
        await self.at_moments(rate, seconds, lambda: self.call(self.dice.choice(self.owners), *self.any_key(), LASTS))

    async def crowd(self, rate: float, seconds: float) -> None:
        """Make so many calls a second of the team at its cap, and some of others, whose rows are looked for."""

        def one() -> Awaitable[object]:
            owner = self.dice.choice(self.owners)
            if self.dice.random() < OTHERS:
                return self.call(owner, *self.any_key(), LASTS, is_looked_for=True)
            return self.call_capped(owner)

        looking = asyncio.create_task(self.look_for_rows())
        await self.at_moments(rate, seconds, one)
        until = time.monotonic() + WAIT_FOR_ROWS
        while self.closed and time.monotonic() < until:  # noqa: ASYNC110  # the other task empties it
            await asyncio.sleep(LOOK_EVERY)
        looking.cancel()
        self.told.unseen, self.closed = len(self.closed), {}

    async def at_moments(self, rate: float, seconds: float, make: Any) -> None:
        """Begin calls at fixed moments, however long the others take, and wait until all have ended."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(round(rate * seconds)):
                if (early := began + number / rate - time.monotonic()) > 0:
                    await asyncio.sleep(early)
                group.create_task(make())

    def any_key(self) -> tuple[str, str]:
        """Return some team and a key of it."""
        team = self.dice.randint(1, self.place.teams)
        return f"team_{team}", f"key_{team}_{self.dice.randint(1, self.place.keys)}"

    async def call(self, owner: Owner, team: str, key: str, lasts: float, *, is_looked_for: bool = False) -> bool:
        """Make one call, which has room; return whether it was let in."""
        request = owner.request(team, key, PLENTY, PLENTY, HOLD)
        if (hold := await self.open_hold(owner, request)) is None:
            self.told.wrong += 1  # no team but one is near a cap
            return False
        await self.answer(owner, hold, key, lasts, USED)
        if is_looked_for:
            self.closed[request.request_id] = time.monotonic()
        return True

    async def call_capped(self, owner: Owner) -> None:
        """Make one call of the team at its cap."""
        cost = CAP // FITS
        request = owner.request(self.place.capped, "key_capped", Limits(nanousd_per_day=CAP), Limits(), cost)
        began = time.monotonic()
        self.enter(0, 1)
        hold = await self.open_hold(owner, request)
        room_since = self.enter(0 if hold is None else cost, -1)
        if hold is None:
            self.told.wrong += time.monotonic() - max(began, room_since) > BACK_WITHIN
            return
        await self.answer(owner, hold, "key_capped", CAPPED_LASTS, CAPPED_USED)
        self.enter(CAPPED_USED - cost, 0)

    async def open_hold(self, owner: Owner, request: HoldRequest) -> Hold | None:
        began = time.perf_counter()
        hold = await owner.books.quotas.open(request)
        took = (time.perf_counter() - began) * 1000
        if isinstance(hold, Hold):
            self.told.waits.append(took)
            return hold
        self.told.refused.append(took)
        self.told.unknown += hold.is_unknown
        return None

    async def answer(self, owner: Owner, hold: Hold, key: str, lasts: float, cost: int) -> None:
        """Keep the accounts of a call that is answered after ``lasts`` seconds."""
        facts = {"team_id": hold.request.team_id, "key_id": key, "owner": hold.owner}
        account = CallAccounting(hold, owner.books.journal, owner.books.quotas)
        request_id = hold.request.request_id
        account.open(make_record(request_id, status=Status.FAILED, cost_nanousd=0, output_tokens=0, **facts))
        await asyncio.sleep(lasts)
        account.close(make_record(request_id, cost_nanousd=cost, **facts))
        account.settle()

    def enter(self, amount: int, waiting: int) -> float:
        """Note what is used or held, and how many calls wait; return since when the cap has had room for all that wait
        (monotonic seconds)."""
        with self.shared.get_lock():
            # Before and after: a refusal makes room for those that wait on, and did not have it itself.
            for change in ((0, 0), (amount, waiting)):
                self.shared[0] += change[0]
                self.shared[1] += change[1]
                if CAP - self.shared[0] < max(1, self.shared[1]) * (CAP // FITS):
                    self.shared[2] = time.monotonic_ns()
            return float(self.shared[2]) / 1e9

    async def look_for_rows(self) -> None:
        """Note how late rows of other teams are."""
        database = self.owners[0].database
        while True:
            await asyncio.sleep(LOOK_EVERY)
            with suppress(OSError):
                await self.look(database, list(self.closed))

    async def look(self, database: Database, ids: Sequence[str]) -> None:
        async with database.begin() as connection:
            seen = (await connection.execute(SEEN, {"ids": list(ids)})).scalars().all()
        now = time.monotonic()
        self.told.late += [now - self.closed.pop(each) for each in seen if each in self.closed]
