# One process of callers for benchmarks.quotas, with the accounting of a gateway: owner, leases, rates, and the bell
# that rings when a balance becomes tight. It does what comes through a pipe.

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import asyncpg
import uvloop
from msgspec import Struct
from redis.asyncio import Redis

from billing.core.holds import Hold, HoldRequest, Leg, LimitName, Limits, RefusedHold, Scope, Settlement
from billing.quotas.lease_store import TIGHT_CHANNEL
from gateway.core.background import stop_all
from gateway.storage.database import Database
from protocol.usage import Usage
from tests.support.owners import Process, open_process

TOKENS, COST = 1_000, 2_500_000  # of a request: tokens, and nano-dollars
PATIENCE = 10.0  # seconds that Redis has for an answer: 500 callers at once on a busy machine are not an outage
NONE = Limits()


class Place(Struct, frozen=True):
    """Where the stores are, and the folder of one process's journal."""

    postgres: str
    valkey: str
    folder: str


@contextlib.contextmanager
def callers(places: list[Place]) -> Iterator[list[Connection]]:
    """Run a process for each place; give the pipes to them, and end them."""
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in places]
    processes = [
        context.Process(target=serve, args=(place, theirs), daemon=True)
        for place, (_, theirs) in zip(places, pairs, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        yield [ours for ours, _ in pairs]
    finally:
        for ours, _ in pairs:
            ours.send(("end",))
        for process in processes:
            process.join(10)


async def tell(pipes: list[Connection], *orders: tuple[object, ...]) -> list[dict[str, Any]]:
    """Give each process its order, or all the same one, at once; return their answers."""
    for number, pipe in enumerate(pipes):
        pipe.send(orders[number % len(orders)])
    loop = asyncio.get_running_loop()
    return await asyncio.gather(*(loop.run_in_executor(None, pipe.recv) for pipe in pipes))


def serve(place: Place, pipe: Connection) -> None:
    """Do what the pipe says, in a process of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Caller(pipe).run(place))


class Caller:
    """The callers of one process."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.holds: list[Hold] = []
        self.books: Process

    async def run(self, place: Place) -> None:
        """Open the accounting, and obey until the end."""
        database, redis = Database(place.postgres), Redis.from_url(place.valkey)
        self.books = await open_process(Path(place.folder), database, redis, deadline=PATIENCE)
        listening = await asyncpg.connect(place.postgres)
        await listening.add_listener(TIGHT_CHANNEL, lambda *said: self.books.leases.recall([str(said[-1])]))
        keepers = [asyncio.create_task(keeper.run()) for keeper in (self.books.owner, self.books.rates)]
        self.pipe.send({})
        loop = asyncio.get_running_loop()
        while (order := await loop.run_in_executor(None, self.pipe.recv))[0] != "end":
            name, *values = order
            self.pipe.send(await getattr(self, name)(*values))
        await stop_all(keepers)
        await self.books.stop()
        await listening.close()
        await redis.aclose()
        await database.close()

    async def open(self, team: str, limits: dict[str, Limits], count: int) -> dict[str, int]:
        """Ask so many times at once, and keep what is admitted."""
        request = self.asking(team, **limits)
        answers = await asyncio.gather(*(self.books.quotas.open(request()) for _ in range(count)))
        admitted = [answer for answer in answers if isinstance(answer, Hold)]
        refused = [answer for answer in answers if isinstance(answer, RefusedHold)]
        self.holds += admitted
        asked_for = {name for name in LimitName for each in limits.values() if _has(each, name)}
        return {
            "admitted": len(admitted),
            "misnamed": sum(each.limit not in asked_for or each.alone_exceeds for each in refused),
            "unknown": sum(each.is_unknown for each in refused),
        }

    async def settle(self) -> dict[str, int]:
        """End half of what runs, all at once, at 60 % of its hold."""
        return self.end_half(self.end_at_60)

    async def release(self) -> dict[str, int]:
        """Give half of what runs back, all at once."""
        return self.end_half(self.books.quotas.release)

    async def forget(self) -> dict[str, int]:
        """Give everything back that runs."""
        for hold in self.holds:
            self.books.quotas.release(hold)
        self.holds = []
        return {}

    async def drive(self, team: str, limits: dict[str, Limits], callers: int, calls: int) -> dict[str, Any]:
        """Open and settle over and over, no limit reached; return what it took beyond turns of the loop."""
        waits: list[tuple[float, float]] = []
        quotas, request = self.books.quotas, self.asking(team, **limits)

        async def call_on(times: int) -> None:
            for _ in range(times):
                asked = request()
                began = time.perf_counter()
                hold = await quotas.open(asked)
                opened = time.perf_counter()
                assert isinstance(hold, Hold), hold
                await asyncio.sleep(0)  # an upstream would answer here; others open meanwhile
                ending = time.perf_counter()
                quotas.settle(hold, Settlement(Usage(TOKENS // 2), COST // 2))
                waits.append((opened - began, time.perf_counter() - ending))

        async def turn_on(times: int) -> None:
            for _ in range(times):
                request()
                await asyncio.sleep(0)

        await call_on(100)
        waits.clear()
        turning = time.process_time()
        await asyncio.gather(*(turn_on(calls // callers) for _ in range(callers)))
        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(call_on(calls // callers) for _ in range(callers)))
        seconds, used = time.perf_counter() - began, time.process_time() - cpu
        return {"calls": len(waits), "seconds": seconds, "cpu": used - (cpu - turning), "waits": waits}

    def end_half(self, end: Callable[[Hold], None]) -> dict[str, int]:
        ending, self.holds = self.holds[::2], self.holds[1::2]
        for hold in ending:
            end(hold)
        return {"ended": len(ending)}

    def end_at_60(self, hold: Hold) -> None:
        self.books.quotas.settle(hold, Settlement(Usage(TOKENS * 6 // 10), COST * 6 // 10))

    def asking(self, name: str, *, team: Limits = NONE, key: Limits = NONE) -> Callable[[], HoldRequest]:
        """Return what makes requests of a team and its key under these limits, over a route of two targets."""
        scopes = (Scope("team", name, team), Scope("key", key_of(name), key))
        legs = (Leg("first", TOKENS, COST), Leg("spare", TOKENS // 2, COST // 2))
        new_id = self.books.clock.new_id
        return lambda: HoldRequest(request_id=new_id(), team_id=name, scopes=scopes, legs=legs)


def key_of(team: str) -> str:
    """Return the id of a team's key."""
    return f"key-of-{team}"


def _has(limits: Limits, name: LimitName) -> bool:
    return getattr(limits, name.value.replace("usd_", "nanousd_")) is not None
