# python -m tools.simulate.autoscale: two days of ten teams, served by a pool whose size a policy chooses: the gateway's
# own decision, a plain threshold, and Ray Serve's default. What a client saw, and how many GPU-hours it took.

from __future__ import annotations

import argparse
import math
import random
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gateway.core.settings import Scaling
from gateway.fleet.autoscaler import EVERY, Observation, ReplicaLoad, ScaleState, decide
from gateway.fleet.queue_model import QueueModel, most_calls
from gateway.fleet.season import HOUR, expected_rate
from gpu_backend.simulate.hardware import DEVICES, REPLAYED, resident_tokens, step_cost
from gpu_backend.simulate.replica import replay
from gpu_backend.simulate.report import percentile
from gpu_backend.simulate.traces import TraceRequest, read_trace
from gpu_backend.step.config import engine_config
from protocol.serving.engine_load import StepCost

DAY = 86_400.0
WEEKS = 3  # before the stretch, whose hours are known
SLOTS = 256
GIVES_UP = 30.0  # seconds without a first token, after which a call counts as not answered
TEAMS = (  # share of the calls, hour of the peak, how steep it is (0: no day and night), share of it on weekends
    (0.24, 10, 3.0, 0.15),
    (0.18, 14, 3.0, 0.15),
    (0.14, 11, 2.0, 0.3),
    (0.10, 16, 2.0, 0.3),
    (0.08, 20, 2.0, 1.2),
    (0.08, 9, 4.0, 0.1),
    (0.06, 2, 5.0, 1.0),  # works at night
    (0.05, 13, 0.0, 1.0),
    (0.04, 18, 1.0, 0.8),
    (0.03, 22, 3.0, 1.5),
)


@dataclass(frozen=True)
class Load:
    """Calls by the second: ten teams with their days and weeks, and one spike."""

    mean: float  # calls a second, over a week
    spike_at: float  # seconds
    spike: float = 20.0  # times what those usually ask who have it,
    spike_share: float = 0.05  # which is this share of the mean: the team that works evenly
    spike_lasts: float = 900.0

    def rate(self, at: float) -> float:
        """Return the calls a second that are to be expected at ``at`` (seconds from a Monday's midnight)."""
        return sum(self.mean * share * _season(at, *team) for share, *team in TEAMS) + self._spike(at)

    def _spike(self, at: float) -> float:
        is_there = self.spike_at <= at < self.spike_at + self.spike_lasts
        return self.mean * self.spike_share * (self.spike - 1) if is_there else 0.0

    def calls(self, begin: float, end: float, seed: int) -> Iterator[float]:
        """Draw the arrivals of a stretch."""
        dice, at = random.Random(seed), begin
        while at < end:
            upto, rate = min(end, at + 30.0), self.rate(at)
            while (at := at + dice.expovariate(rate)) < upto:
                yield at
            at = upto


def _season(at: float, peak: float, steep: float, weekend: float) -> float:
    day, hour = divmod(at / HOUR, 24)
    shape = math.exp(steep * (math.cos((hour - peak) / 12 * math.pi) - 1))
    mean = sum(math.exp(steep * (math.cos(each / 12 * math.pi) - 1)) for each in range(24)) / 24
    return shape / mean * (weekend if day % 7 >= 5 else 1.0)


@dataclass
class Pool:
    """Replicas as an orchestrator keeps them, by a target."""

    cost: StepCost
    tokens: int  # of KV cache
    cold_start: float
    ready: list[QueueModel] = field(default_factory=list)
    leaving: list[QueueModel] = field(default_factory=list)  # let their replies end
    starting: deque[float] = field(default_factory=deque)  # when each will be ready
    seconds: float = 0.0  # of replicas, starting and leaving ones included
    waits: list[float] = field(default_factory=list)
    changes: int = 0
    target: int = 0
    finished: int = 0  # first tokens told

    def follow(self, target: int, now: float) -> None:
        """Start or end replicas."""
        self.changes += target != self.target
        self.target = target
        while len(self.ready) + len(self.starting) < target:
            self.starting.append(now + self.cold_start)
        while self.starting and len(self.ready) + len(self.starting) > target:
            self.starting.pop()
        while len(self.ready) > target:
            gone = min(self.ready, key=lambda each: each.work)
            self.ready.remove(gone)
            self.leaving.append(gone)

    def pass_time(self, before: float, now: float) -> None:
        """Let replicas run and become ready."""
        self.seconds += (now - before) * (len(self.ready) + len(self.starting) + len(self.leaving))
        for each in (*self.ready, *self.leaving):
            each.run_until(now)
            self.waits += each.first_tokens
            each.first_tokens.clear()
        self.leaving = [each for each in self.leaving if each.running or each.waiting]
        while self.starting and self.starting[0] <= now:
            self.starting.popleft()
            self.ready.append(QueueModel(self.cost, SLOTS, now))


Policy = Callable[[float, Pool, float], int]  # time, the pool, calls that finished in a second


def ours(load: Load, rules: Scaling, prompt: float, reply: float) -> Policy:
    """Return the gateway's decision, with ``WEEKS`` of counted hours behind it."""
    state: ScaleState | None = None
    hours = {hour: _drawn(load.rate((hour % 168 + 0.5) * HOUR) * HOUR, hour) for hour in range(WEEKS * 168)}

    def choose(now: float, pool: Pool, finished: float) -> int:
        nonlocal state
        hours[int(now // HOUR)] = hours.get(int(now // HOUR), 0.0) + finished * EVERY
        replicas = [
            ReplicaLoad(
                running=each.running,
                waiting=each.waiting,
                max_running=SLOTS,
                kv=each.context / pool.tokens,
                finished=finished / len(pool.ready),
                cost=pool.cost,
            )
            for each in pool.ready
        ]
        expected = expected_rate(hours, now, now + rules.cold_start + EVERY)
        seen = Observation(now=now, replicas=replicas, prompt=prompt, reply=reply, expected=expected)
        state = decide(seen, state, rules)
        return state.target

    return choose


def _drawn(mean: float, seed: int) -> float:
    return max(0.0, random.Random(seed).gauss(mean, math.sqrt(mean)))


def ray(target_ongoing: float, rules: Scaling) -> Policy:
    """Return Ray Serve's default policy (2.60, ``replica_queue_length_autoscaling_policy``): ongoing requests over 30 s
    by those wanted of a replica, once that has been so for 30 s (up) or 600 s (down)."""
    looks: deque[int] = deque(maxlen=3)  # of 10 s each
    since: list[tuple[int, float]] = [(0, 0.0)]  # direction, since when

    def choose(now: float, pool: Pool, finished: float) -> int:
        looks.append(sum(each.running + each.waiting for each in pool.ready))
        wanted = math.ceil(sum(looks) / len(looks) / target_ongoing)
        wanted = min(max(wanted, rules.min), rules.max)
        way = (wanted > pool.target) - (wanted < pool.target)
        if way != since[0][0]:
            since[0] = way, now
        if way and now - since[0][1] >= (30.0 if way > 0 else 600.0):
            since[0] = 0, now
            return wanted
        return pool.target

    return choose


def threshold(high: float, low: float, rules: Scaling) -> Policy:
    """Return a plain rule: replies and prompts a replica above ``high`` for a minute add one, below ``low`` for five
    take one away; none while one is starting."""
    since: list[tuple[int, float]] = [(0, 0.0)]

    def choose(now: float, pool: Pool, finished: float) -> int:
        each = sum(each.running + each.waiting for each in pool.ready) / max(1, len(pool.ready))
        way = (each > high) - (each < low)
        if way != since[0][0]:
            since[0] = way, now
        if way and not pool.starting and now - since[0][1] >= (60.0 if way > 0 else 300.0):
            since[0] = 0, now
            return min(max(pool.target + way, rules.min), rules.max)
        return pool.target

    return choose


def serve(policy: Policy, calls: Sequence[tuple[float, int, int]], pool: Pool, begin: float, first: int) -> None:
    """Serve all calls, the policy asked every ten seconds."""
    pool.target = first
    pool.ready = [QueueModel(pool.cost, SLOTS, begin) for _ in range(first)]
    before = look = begin
    running = finished = came = 0
    for at, prompt, reply in calls:
        while look + EVERY <= at:
            look += EVERY
            pool.pass_time(before, look)
            before = look
            inside = sum(each.running + each.waiting for each in (*pool.ready, *pool.leaving))
            finished, running, came = came - (inside - running), inside, 0
            pool.follow(policy(look, pool, finished / EVERY), look)
        pool.pass_time(before, at)
        before = at
        min(pool.ready, key=lambda each: each.work).add(at, prompt, reply)
        came += 1
    pool.pass_time(before, before + 600.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, print the table, return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.simulate.autoscale")
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="whose lengths count; without it, made ones of 1,100 and 200 tokens")
    add("--mean", type=float, default=8.0, metavar="N", help="calls a second, over the week")
    add(
        "--days",
        type=float,
        nargs=2,
        default=(1.0, 3.0),
        metavar="D",
        help="from and to, of a week",
    )
    add("--spike", type=float, default=20.0, metavar="X", help="times the usual, at 14:10 of the last day")
    add("--max", type=int, default=16, metavar="N")
    add("--cold-start", type=float, default=120.0, metavar="S")
    add("--headroom", type=float, default=0.1, metavar="P")
    add("--down-after", type=float, default=300.0, metavar="S")
    add("--model", choices=REPLAYED, default="llama-70b")
    add("--device", choices=DEVICES, default="h200")
    add("--gpus-per-replica", type=int, default=2, metavar="N")
    add(
        "--ray",
        type=float,
        nargs="*",
        default=[2.0, 8.0, 16.0, 24.0, 32.0],
        metavar="N",
        help="target_ongoing_requests",
    )
    add("--threshold", type=float, nargs="*", default=[8.0, 16.0, 24.0, 32.0], metavar="N", help="replies a replica")
    add("--spike-share", type=float, default=0.05, metavar="P", help="of the mean, that has the spike")
    add("--against-engine", action="store_true", help="compare the model of a replica with the engine's own loop")
    options = parser.parse_args(arguments)
    for line in against_engine(options) if options.against_engine else table(options):
        print(line, flush=True)
    return 0


def table(options: argparse.Namespace) -> Iterator[str]:
    """Yield the table as Markdown."""
    sizes, device, gpus = REPLAYED[options.model], DEVICES[options.device], options.gpus_per_replica
    cost = StepCost(**asdict(step_cost(sizes, device, gpus)))
    tokens = resident_tokens(sizes, device, gpus, memory_share=0.9)
    begin, end = (day * DAY for day in options.days)
    load = Load(
        options.mean, spike_at=end - DAY + 14 * HOUR + 600, spike=options.spike, spike_share=options.spike_share
    )
    lengths = _lengths(options.trace)
    dice = random.Random(7)
    behind = WEEKS * 7 * DAY
    calls = [(at + behind, *dice.choice(lengths)) for at in load.calls(begin, end, 1)]
    prompt, reply = (sum(each[place] for each in lengths) / len(lengths) for place in (0, 1))
    rules = Scaling(
        max=options.max, cold_start=options.cold_start, headroom=options.headroom, down_after=options.down_after
    )
    yield f"{len(calls):,} calls of {prompt:.0f} and {reply:.0f} tokens"
    yield "| policy | GPU-hours | TTFT p50 | p90 | p99 | answered | changes | most replicas |"
    yield "| --- " * 8 + "|"
    needed = least(load, cost, rules, prompt, reply, begin, end)
    yield f"| least | {sum(needed) * EVERY * gpus / 3600:.1f} | | | | | | {max(needed)} |"
    policies = [("tollgate", ours(load, rules, prompt, reply))]
    policies += [(f"threshold {high:g}, {high / 2:g}", threshold(high, high / 2, rules)) for high in options.threshold]
    policies += [(f"Ray Serve, target {each:g}", ray(each, rules)) for each in options.ray]
    for name, policy in policies:
        pool = Pool(cost, tokens, rules.cold_start)
        most = 0

        def watched(now: float, pool: Pool, finished: float, policy: Policy = policy) -> int:
            nonlocal most
            target = policy(now, pool, finished)
            most = max(most, target)
            return target

        serve(watched, calls, pool, begin + behind, 2)
        waits = sorted(pool.waits)
        answered = sum(wait <= GIVES_UP for wait in waits) / len(calls)
        p50, p90, p99 = (percentile(waits, share) for share in (0.5, 0.9, 0.99))
        yield (
            f"| {name} | {pool.seconds * gpus / 3600:.1f} | {p50:.2f} | {p90:.2f} | {p99:.2f} | {answered:.3%} "
            f"| {pool.changes} | {most} |"
        )


def least(
    load: Load, cost: StepCost, rules: Scaling, prompt: float, reply: float, begin: float, end: float
) -> list[int]:
    """Return for every ten seconds how few replicas keep the promise, for one who knows the rate and starts at once."""
    bears = [most_calls(cost, SLOTS, prompt, reply, rules.ttft, many) for many in range(1, rules.max + 1)]
    moments = (begin + EVERY * (place + 0.5) for place in range(int((end - begin) / EVERY)))
    return [max(rules.min, min(bisect_left(bears, load.rate(at)) + 1, rules.max)) for at in moments]


def against_engine(options: argparse.Namespace) -> Iterator[str]:
    """Yield, for a rising load on one replica, what the model predicts and what the engine's own loop measures."""
    sizes, device, gpus = REPLAYED[options.model], DEVICES[options.device], options.gpus_per_replica
    known, block = step_cost(sizes, device, gpus), 16
    config = engine_config("", max_num_seqs=SLOTS, max_num_batched_tokens=8192, max_waiting=10**6, step_cost=known)
    tokens, lengths = resident_tokens(sizes, device, gpus, memory_share=0.9), _lengths(options.trace)
    yield "| calls/s | predicted TTFT p50 | p90 | p99 | measured p50 | p90 | p99 |"
    yield "| --- " * 7 + "|"
    for rate in (2.0, 4.0, 5.0, 6.0):
        dice, at, requests = random.Random(5), 0.0, []
        model = QueueModel(StepCost(**asdict(known)), SLOTS)
        for _ in range(int(rate * 300)):
            at += dice.expovariate(rate)
            requests.append(TraceRequest(at, *dice.choice(lengths)))
            model.run_until(at)
            model.add(at, requests[-1].prompt_tokens, requests[-1].output_tokens)
        model.run_until(at + 600.0)
        replica = replay(requests, config, known, tokens // block)[0]
        measured = [each.first_token - each.request.arrival for each in replica.outcomes.values() if each.first_token]
        cells = [f"{percentile(sorted(of), p):.2f}" for of in (model.first_tokens, measured) for p in (0.5, 0.9, 0.99)]
        yield f"| {rate:g} | {' | '.join(cells)} |"


def _lengths(trace: Path | None) -> list[tuple[int, int]]:
    if trace is not None:
        return [(each.prompt_tokens, each.output_tokens) for each in read_trace(trace)]
    dice = random.Random(3)
    return [(1 + int(dice.expovariate(1 / 1100)), 1 + int(dice.expovariate(1 / 200))) for _ in range(5000)]


if __name__ == "__main__":
    sys.exit(main())
