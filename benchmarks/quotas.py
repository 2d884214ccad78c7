# Do limits hold, is no caller with headroom refused, and what does it cost? 500 callers at once in two processes, at
# caps worth 100 requests, through billing.quotas.quotas against a real Postgres and a real Valkey.
#   python -m benchmarks.quotas [--rounds 5] [--calls 20000] [--quick]
#
# Overshoot and wrong refusals are exact. A round goes in phases: in each, every caller asks at once while what is used
# otherwise stands still, so that a plain count says how many must be admitted. Room that the other process holds unused
# comes back within 250 ms: where fewer were admitted, the refused ask once more, and a second refusal is wrong.
# Meanwhile the counters of the store, read over and over, must never show more than the cap.

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import asyncpg
from redis.asyncio import Redis

import migrations
from benchmarks.quotas_callers import COST, TOKENS, Place, callers, key_of, tell
from benchmarks.quotas_report import Cost, Outcome, write_report
from benchmarks.stack import Server
from billing.core.holds import LimitName, Limits, Scope
from gateway.storage.database import Database
from tests.support.limited import set_limits
from tests.support.temporary_stores import temporary_postgres, temporary_valkey

CALLERS = 500
PROCESSES = 2
FITS = 100  # requests that the cap has room for
PROMPT = 0.25  # seconds, after which room that lies unused has come back
LOOK_EVERY = 0.002  # seconds
QUIET_WITHIN = 3.0  # seconds, after which everything is returned and told
NONE = Limits()
DRAWN = "SELECT max(drawn + corrected) FROM balances WHERE scope = $1 AND cap IS NOT NULL"
PLENTY = Limits(
    requests_per_minute=10**9,
    tokens_per_minute=10**12,
    concurrent_requests=10**6,
    tokens_per_day=10**13,
    nanousd_per_day=10**15,
    nanousd_per_month=10**15,
)


@dataclass(frozen=True)
class Case:
    """A limit with room for 100 requests, and how much of it a request takes while it runs and once it is settled."""

    limit: LimitName
    limits: Limits
    cap: int
    held: int
    flows_back: bool = False  # nothing stays used once a call has ended

    @property
    def settled(self) -> int:
        """What a settled request has used: 60 % of what was held."""
        return 0 if self.flows_back else self.held * 6 // 10


CASES = (
    Case(LimitName.USD_PER_DAY, Limits(nanousd_per_day=FITS * COST), FITS * COST, COST),
    Case(LimitName.USD_PER_MONTH, Limits(nanousd_per_month=FITS * COST), FITS * COST, COST),
    Case(LimitName.TOKENS_PER_DAY, Limits(tokens_per_day=FITS * TOKENS), FITS * TOKENS, TOKENS),
    Case(LimitName.TOKENS_PER_MINUTE, Limits(tokens_per_minute=FITS * TOKENS), FITS * TOKENS, TOKENS),
    Case(LimitName.CONCURRENT_REQUESTS, Limits(concurrent_requests=FITS), FITS, 1, flows_back=True),
)


@dataclass
class Plain:
    """The rules as a plain count: what must be admitted, whatever the order in which callers come."""

    case: Case
    used: int = 0
    running: int = 0

    def must_admit(self, asking: int) -> int:
        """Return how many of those that ask at once have room."""
        room = self.case.cap - self.used - self.running * self.case.held
        return min(asking, room // self.case.held)

    def admit(self, count: int) -> None:
        """So many run now."""
        self.running += count

    def settle(self, count: int) -> None:
        """So many have ended, and used 60 %."""
        self.running -= count
        self.used += count * self.case.settled

    def release(self, count: int) -> None:
        """So many have ended and used nothing."""
        self.running -= count


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--calls", type=int, default=20_000, help="calls of each measurement of costs")
    options.add_argument("--quick", action="store_true", help="a round of three limits, few calls; writes nothing")
    chosen = options.parse_args()
    rounds, calls = (1, 2 * CALLERS) if chosen.quick else (chosen.rounds, chosen.calls)
    cases = CASES[::2] if chosen.quick else CASES
    with bench() as (stores, pipes):
        outcomes, costs = asyncio.run(stores.measure(pipes, cases, rounds, calls))
    if not chosen.quick:
        write_report(outcomes, costs, callers=CALLERS, processes=PROCESSES, fits=FITS)
    if any(outcome.overshoot or outcome.wrong_refusals for outcome in outcomes):
        raise SystemExit(1)


@contextmanager
def bench() -> Iterator[tuple[Stores, list[Connection]]]:
    """Run both stores and the processes that call."""
    with temporary_postgres() as postgres, temporary_valkey() as valkey, tempfile.TemporaryDirectory() as folder:
        migrations.upgrade(postgres.url)
        places = [Place(postgres.url, valkey.url, f"{folder}/{number}") for number in range(PROCESSES)]
        with callers(places) as pipes:
            for pipe in pipes:
                pipe.recv()
            assert postgres.pid is not None and valkey.pid is not None
            yield Stores(postgres.url, valkey.url, {"Postgres": postgres.pid, "Valkey": valkey.pid}), pipes


@dataclass
class Stores:
    """Postgres and Valkey, and what they say of a case."""

    postgres: str
    valkey: str
    pids: dict[str, int]

    async def measure(
        self, pipes: list[Connection], cases: tuple[Case, ...], rounds: int, calls: int
    ) -> tuple[list[Outcome], list[Cost]]:
        """Return what became of each case, and what calls cost."""
        self.database, self.redis = Database(self.postgres, pool_size=1), Redis.from_url(self.valkey)
        self.looking = await asyncpg.connect(self.postgres)
        outcomes = []
        for case in cases:
            for kind in ("team", "key"):
                whole = Outcome(limit=case.limit.value, scope=kind)
                for number in range(rounds):
                    whole += await self.play(pipes, case, kind, f"{case.limit.value}-{kind}-{number}")
                print(whole.line(), flush=True)
                outcomes.append(whole)
        costs = []
        for each in (CALLERS, PROCESSES):
            costs.append(await self.drive(pipes, each, calls))
            print(costs[-1].line(), flush=True)
        await self.looking.close()
        await self.redis.aclose()
        await self.database.close()
        return outcomes, costs

    async def make_team(self, team: str, limits: dict[str, Limits]) -> None:
        """Give a new team and its key these limits, as the administration does."""
        await set_limits(self.database, team, Scope("team", team, limits.get("team", NONE)))
        await set_limits(self.database, team, Scope("key", key_of(team), limits.get("key", NONE)))

    async def play(self, pipes: list[Connection], case: Case, kind: str, team: str) -> Outcome:
        """Ask, settle, ask, give back, ask … with every caller at once, and compare with the plain count."""
        limits = {kind: case.limits}
        await self.make_team(team, limits)
        plain, outcome = Plain(case), Outcome(limit=case.limit.value, scope=kind)
        watch = Watch(self.reader(case, kind, team), case.cap)
        async with watch:
            for ending in ("settle", "release", "settle", "release", "settle"):
                outcome += await self.ask(pipes, plain, kind, team, limits)
                ended = sum(one["ended"] for one in await tell(pipes, (ending,)))
                (plain.settle if ending == "settle" else plain.release)(ended)
        await tell(pipes, ("forget",))
        plain.release(plain.running)
        until = time.monotonic() + QUIET_WITHIN
        while (drift := abs(await watch.read() - plain.used)) and time.monotonic() < until:  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(LOOK_EVERY)
        above = max(0, watch.most - case.cap)
        return outcome + Outcome(limit=case.limit.value, scope=kind, looks=watch.looks, overshoot=above, drift=drift)

    async def ask(
        self, pipes: list[Connection], plain: Plain, kind: str, team: str, limits: dict[str, Limits]
    ) -> Outcome:
        """Have every caller ask at once, and where room is left, the refused once more."""
        must, began = plain.must_admit(CALLERS), time.monotonic()
        told = await tell(pipes, ("open", team, limits, CALLERS // PROCESSES))
        first = admitted = sum(one["admitted"] for one in told)
        if first < must:
            await asyncio.sleep(max(0.0, began + PROMPT - time.monotonic()))
            again = [("open", team, limits, CALLERS // PROCESSES - one["admitted"]) for one in told]
            more = await tell(pipes, *again)
            told, admitted = told + more, admitted + sum(one["admitted"] for one in more)
        plain.admit(admitted)
        return Outcome(
            limit=plain.case.limit.value,
            scope=kind,
            asked=CALLERS,
            admitted=admitted,
            overshoot=max(0, admitted - must),
            early_refusals=max(0, must - first),
            wrong_refusals=max(0, must - admitted),
            misnamed=sum(one["misnamed"] for one in told),
            unknown=sum(one["unknown"] for one in told),
        )

    def reader(self, case: Case, kind: str, team: str) -> Callable[[], Awaitable[int]]:
        """Return what reads how much of the limit is used and held, by the store's own counters."""
        scope = f"team:{team}" if kind == "team" else f"key:{key_of(team)}"
        rates = f"tollgate:{{{team}}}:rates:%s:{'team' if kind == 'team' else scope}"

        async def balance() -> int:
            return int(await self.looking.fetchval(DRAWN, scope) or 0)

        async def minute() -> int:
            return int((await self.redis.hget(rates % "minute", "sums") or b"0 0 0").split()[2])

        async def slots() -> int:
            return sum(int(value.split()[0]) for value in await self.redis.hvals(rates % "slots"))

        return {LimitName.TOKENS_PER_MINUTE: minute, LimitName.CONCURRENT_REQUESTS: slots}.get(case.limit, balance)

    async def drive(self, pipes: list[Connection], each: int, calls: int) -> Cost:
        """Return what an open and its settlement cost."""
        limits, team = {"team": PLENTY, "key": PLENTY}, f"drive-{each}"
        await self.make_team(team, limits)
        before = self.cpu()
        told = await tell(pipes, ("drive", team, limits, each // PROCESSES, calls // PROCESSES))
        after = self.cpu()
        return Cost.of(each, told, after["Postgres"] - before["Postgres"], after["Valkey"] - before["Valkey"])

    def cpu(self) -> dict[str, float]:
        """Return the CPU seconds that each store has used."""
        return {name: Server(name, "", "", (pid,)).cpu() for name, pid in self.pids.items()}


@dataclass
class Watch:
    """Reads the counters over and over while others call: what is used and held may never pass the cap."""

    read: Callable[[], Awaitable[int]]
    cap: int
    looks: int = 0
    most: int = 0
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Watch:
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _look(self) -> None:
        while True:
            self.most = max(self.most, await self.read())
            self.looks += 1
            await asyncio.sleep(LOOK_EVERY)


if __name__ == "__main__":
    main()
