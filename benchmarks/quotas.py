# Do limits hold, is nobody refused who has headroom, and what does it cost? 500 callers at once in two processes, at
# caps worth 100 requests, through billing.quotas against a real Valkey.
#   python -m benchmarks.quotas [--rounds 5] [--calls 20000] [--quick]
#
# Overshoot and wrong refusals are exact. A round goes in phases: in each, every caller asks at once while what is used
# otherwise stands still, so that a plain count says how many must be admitted. Meanwhile the counters, read in one
# atomic step over and over, must never show more than the cap.

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import uvloop
from redis.asyncio import Redis

from benchmarks.quotas_report import Cost, Outcome, write_report
from billing.holds import Hold, HoldRequest, Leg, LimitName, Limits, RefusedHold, Scope, Settlement
from billing.quotas import Quotas
from billing.scope_state import ScopeState
from gateway.clock import Clock
from gateway.embedded import temporary_valkey
from protocol.usage import Usage

CALLERS = 500
PROCESSES = 2
FITS = 100  # requests that the cap has room for
TOKENS, COST = 1_000, 2_500_000  # of a request: tokens, and nano-dollars
PATIENCE = 10.0  # seconds for a call to Redis: 500 at once on a busy machine are not an outage
NONE = Limits()
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
    options.add_argument(
        "--quick", action="store_true", help="one round, few calls: does it run at all? Writes nothing"
    )
    chosen = options.parse_args()
    rounds, calls = (1, 2 * CALLERS) if chosen.quick else (chosen.rounds, chosen.calls)
    with temporary_valkey() as valkey, callers(valkey.url) as pipes:
        outcomes, costs = asyncio.run(measure(valkey.url, pipes, rounds, calls))
    if not chosen.quick:
        write_report(outcomes, costs, callers=CALLERS, processes=PROCESSES, fits=FITS)
    if any(outcome.overshoot or outcome.wrong_refusals for outcome in outcomes):
        raise SystemExit(1)


async def measure(url: str, pipes: list[Connection], rounds: int, calls: int) -> tuple[list[Outcome], list[Cost]]:
    """Return what became of each case, and what calls cost."""
    redis: Redis = Redis.from_url(url)
    quotas = Quotas(redis, Clock(), deadline=PATIENCE)
    outcomes = []
    for case in CASES:
        for kind in ("team", "key"):
            whole = Outcome(limit=case.limit.value, scope=kind)
            for number in range(rounds):
                whole += await play(quotas, pipes, case, kind, f"{case.limit.value}-{kind}-{number}")
            print(whole.line())
            outcomes.append(whole)
    costs = []
    for each in (CALLERS, PROCESSES):
        before = await redis.info("cpu")
        told = await tell(pipes, ("drive", f"drive-{each}", each // PROCESSES, calls // PROCESSES))
        after = await redis.info("cpu")
        server = sum(after[name] - before[name] for name in ("used_cpu_user", "used_cpu_sys"))
        costs.append(Cost.of(each, told, server))
        print(costs[-1].line())
    await redis.aclose()
    return outcomes, costs


async def play(quotas: Quotas, pipes: list[Connection], case: Case, kind: str, team: str) -> Outcome:
    """Ask, settle, ask, give back, ask … with every caller at once, and compare with the plain count."""
    plain, outcome, watch = Plain(case), Outcome(limit=case.limit.value, scope=kind), Watch(quotas, team, kind, case)
    async with watch:
        for ending in ("settle", "release", "settle", "release", "settle"):
            must = plain.must_admit(CALLERS)
            told = await tell(pipes, ("open", team, kind, case.limits, CALLERS // PROCESSES))
            admitted = sum(one["admitted"] for one in told)
            plain.admit(admitted)
            outcome += Outcome(
                limit=case.limit.value,
                scope=kind,
                asked=CALLERS,
                admitted=admitted,
                overshoot=max(0, admitted - must),
                wrong_refusals=max(0, must - admitted),
                misnamed=sum(one["misnamed"] for one in told),
            )
            ended = sum(one["ended"] for one in await tell(pipes, (ending,)))
            (plain.settle if ending == "settle" else plain.release)(ended)
    state = await quotas.usage(team, key_id=key_of(team) if kind == "key" else None)
    await tell(pipes, ("forget",))
    left = sum(state.used_and_held(case.limit)) - plain.used - plain.running * case.held
    return outcome + Outcome(
        limit=case.limit.value, scope=kind, looks=watch.looks, overshoot=max(0, watch.above), drift=abs(left)
    )


@dataclass
class Watch:
    """Reads the counters over and over while others call: settled + held may never pass the cap."""

    quotas: Quotas
    team: str
    kind: str
    case: Case
    looks: int = 0
    above: int = 0
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
            state: ScopeState = await self.quotas.usage(
                self.team, key_id=key_of(self.team) if self.kind == "key" else None
            )
            self.looks += 1
            self.above = max(self.above, sum(state.used_and_held(self.case.limit)) - self.case.cap)
            await asyncio.sleep(0.001)


@contextlib.contextmanager
def callers(url: str) -> Iterator[list[Connection]]:
    """Run the processes that call, and end them."""
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(PROCESSES)]
    processes = [context.Process(target=serve, args=(url, theirs), daemon=True) for _, theirs in pairs]
    for process in processes:
        process.start()
    try:
        yield [ours for ours, _ in pairs]
    finally:
        for ours, _ in pairs:
            ours.send(("end",))
        for process in processes:
            process.join(10)


async def tell(pipes: list[Connection], order: tuple[object, ...]) -> list[dict]:
    """Give all processes the same order at once, and return their answers."""
    for pipe in pipes:
        pipe.send(order)
    loop = asyncio.get_running_loop()
    return await asyncio.gather(*(loop.run_in_executor(None, pipe.recv) for pipe in pipes))


def serve(url: str, pipe: Connection) -> None:
    """Do what the pipe says, in a process of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Caller(url, pipe).run())


@dataclass
class Caller:
    """One process of callers, as a gateway is."""

    url: str
    pipe: Connection
    holds: list[Hold] = field(default_factory=list)

    async def run(self) -> None:
        """Obey until the end."""
        redis: Redis = Redis.from_url(self.url)
        self.quotas = Quotas(redis, Clock(), deadline=PATIENCE)
        self.clock = Clock()
        while True:
            match await asyncio.get_running_loop().run_in_executor(None, self.pipe.recv):
                case ("open", team, kind, limits, count):
                    self.pipe.send(await self.open(team, {kind: limits}, count))
                case ("settle",):
                    self.pipe.send(await self.end_half(self.settle))
                case ("release",):
                    self.pipe.send(await self.end_half(self.quotas.release))
                case ("forget",):
                    await asyncio.gather(*map(self.quotas.release, self.holds))
                    self.holds = []
                    self.pipe.send({})
                case ("drive", team, callers, calls):
                    self.pipe.send(await self.drive(team, callers, calls))
                case _:
                    await redis.aclose()
                    return

    async def open(self, team: str, limits: dict[str, Limits], count: int) -> dict[str, int]:
        """Ask so many times at once, and keep what is admitted."""
        answers = await asyncio.gather(*(self.quotas.open(self.request(team, **limits)) for _ in range(count)))
        admitted = [answer for answer in answers if isinstance(answer, Hold)]
        refused = [answer for answer in answers if isinstance(answer, RefusedHold)]
        self.holds += admitted
        asked_for = {name for name in LimitName for each in limits.values() if _has(each, name)}
        misnamed = sum(each.limit not in asked_for or each.alone_exceeds for each in refused)
        return {"admitted": len(admitted), "misnamed": misnamed}

    async def end_half(self, end: Callable[[Hold], Awaitable[None]]) -> dict[str, int]:
        """End half of what runs, all at once."""
        ending, self.holds = self.holds[::2], self.holds[1::2]
        await asyncio.gather(*map(end, ending))
        return {"ended": len(ending)}

    async def settle(self, hold: Hold) -> None:
        """Use 60 % of a hold."""
        await self.quotas.settle(hold, Settlement(Usage(TOKENS * 6 // 10), COST * 6 // 10))

    async def drive(self, team: str, callers: int, calls: int) -> dict[str, object]:
        """Open and settle over and over, every limit set on team and key and none reached; return what it took."""
        waits: list[tuple[float, float]] = []

        async def call_on(times: int) -> None:
            for _ in range(times):
                began = time.perf_counter()
                hold = await self.quotas.open(self.request(team, team=PLENTY, key=PLENTY))
                opened = time.perf_counter()
                assert isinstance(hold, Hold), hold
                await self.quotas.settle(hold, Settlement(Usage(TOKENS // 2), COST // 2))
                waits.append((opened - began, time.perf_counter() - opened))

        await call_on(100)
        waits.clear()
        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(call_on(calls // callers) for _ in range(callers)))
        return {
            "calls": len(waits),
            "seconds": time.perf_counter() - began,
            "cpu": time.process_time() - cpu,
            "waits": waits,
        }

    def request(self, name: str, *, team: Limits = NONE, key: Limits = NONE) -> HoldRequest:
        """Return a request of a team and its key under these limits, over a route of two targets."""
        scopes = (Scope("team", name, team), Scope("key", key_of(name), key))
        return HoldRequest(
            request_id=self.clock.new_id(),
            team_id=name,
            scopes=scopes,
            legs=(Leg("first", TOKENS, COST), Leg("spare", TOKENS // 2, COST // 2)),
            valid_until=self.clock.now() + PATIENCE,
        )


def key_of(team: str) -> str:
    """Return the id of a team's key."""
    return f"key-of-{team}"


def _has(limits: Limits, name: LimitName) -> bool:
    return getattr(limits, name.value.replace("usd_", "nanousd_")) is not None


if __name__ == "__main__":
    main()
