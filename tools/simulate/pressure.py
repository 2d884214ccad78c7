# python -m tools.simulate.pressure: what becomes of goodput when more replies are asked for at once than the KV
# cache holds, by how they are let in; and what becomes of preempted ones, by what host memory there is.

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gpu_backend.scheduling.forecast import LengthForecast
from gpu_backend.scheduling.running import SwapChoice
from gpu_backend.simulate.hardware import DEVICES, MODELS, copy_seconds, step_cost
from gpu_backend.simulate.replica import NO_HOST_MEMORY, HostMemory, Replica
from gpu_backend.simulate.report import Promise, Report, make_report
from gpu_backend.simulate.traces import TraceRequest
from gpu_backend.step.config import engine_config
from gpu_backend.step.cost import StepWork, chunk_work

BLOCK = 16
SLOTS = 512  # replies at once, if there is room for them
DECLARED = 2048  # max_tokens of every request
LONGEST_PAUSE = 0.2  # seconds between two tokens of a reply that counts as good
TENANTS = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts between two lengths, replies log-normal around ``exp(mu)``, and the KV blocks to serve them from."""

    shortest: int
    longest: int
    mu: float
    sigma: float
    num_blocks: int

    def requests(self, number: int, seed: int = 5) -> list[TraceRequest]:
        """Draw that many, of several tenants."""
        dice = random.Random(seed)
        made = []
        for count in range(number):
            reply = min(DECLARED, max(8, int(dice.lognormvariate(self.mu, self.sigma))))
            prompt = dice.randint(self.shortest, self.longest)
            made.append(TraceRequest(0.0, prompt, reply, tenant=f"tenant {count % TENANTS}"))
        return made

    def clients_that_fit(self) -> int:
        """Return how many replies fill the KV cache on average, each between its prompt and its whole length."""
        requests = self.requests(2000)
        steps = sum(r.output_tokens for r in requests)
        held = sum(r.output_tokens * (r.prompt_tokens + r.output_tokens / 2) for r in requests) / steps
        return int(self.num_blocks * BLOCK / held)


WORKLOADS = {"short": Workload(20, 200, 5.4, 0.8, 800), "long": Workload(1000, 6000, 6.6, 0.6, 8192)}


class NothingToCome(LengthForecast):
    """Lets in whatever fits now."""

    @property
    def longest(self) -> int:
        return 0

    def remaining(self, generated: int, lot: float) -> int:
        return 0


class AllDeclared(LengthForecast):
    """Takes every reply to get as long as its ``max_tokens``."""

    @property
    def longest(self) -> int:
        return DECLARED

    def remaining(self, generated: int, lot: float) -> int:
        return DECLARED


FORECASTS = {"forecast": LengthForecast, "whatever fits": NothingToCome, "max_tokens": AllDeclared}


def make_replica(
    model: str, device: str, num_blocks: int, admission: str = "forecast", host: HostMemory = NO_HOST_MEMORY
) -> Replica:
    """Build a replica with as many slots as it can use."""
    cost = step_cost(MODELS[model], DEVICES[device])
    config = engine_config("", max_num_seqs=SLOTS, block_size=BLOCK, max_waiting=10**9, step_cost=cost)
    replica = Replica(config, cost, num_blocks, host)
    replica.loop.scheduler.admission.forecast = FORECASTS[admission]()
    return replica


def closed_loop(replica: Replica, requests: Sequence[TraceRequest], clients: int) -> float:
    """Let each client ask again as soon as it has its answer; return the goodput until the last one asked.

    That is tokens a second of replies without a pause: one with a pause was thrown out and computed again. Where each
    client asks once, all ask at the start: then it is the goodput until the last answer.
    """
    scheduler = replica.loop.scheduler
    for number, request in enumerate(requests):
        while len(scheduler.running) + scheduler.num_waiting >= clients:
            replica.step()
        replica.submit(number, replace(request, arrival=replica.runner.now), DECLARED)
    seconds, tokens = replica.runner.now, {name: outcome.tokens for name, outcome in replica.outcomes.items()}
    replica.run_until(math.inf)
    if not seconds:
        seconds, tokens = replica.runner.now, {name: outcome.tokens for name, outcome in replica.outcomes.items()}
    return sum(tokens[name] for name, o in replica.outcomes.items() if o.longest_gap < LONGEST_PAUSE) / seconds


@dataclass(frozen=True, slots=True)
class Trial:
    """What one replica came to."""

    goodput: float  # tokens a second
    report: Report
    paused: float  # share of the replies that had a pause


def try_out(replica: Replica, requests: Sequence[TraceRequest], clients: int) -> Trial:
    """Serve that many clients until all is done."""
    goodput = closed_loop(replica, requests, clients)
    paused = sum(outcome.longest_gap >= LONGEST_PAUSE for outcome in replica.outcomes.values())
    return Trial(goodput, make_report([replica], Promise(), SLOTS), paused / len(requests))


def oversubscription(workload: Workload, model: str, device: str, number: int) -> Iterator[str]:
    """Yield a table of goodput by how many clients there are and how they are let in."""
    yield "| let in by | clients | goodput, tokens/s | of that at 1 × | preempted | computed | paused |"
    yield "| --- " * 7 + "|"
    requests, fits = workload.requests(number), workload.clients_that_fit()
    for admission in FORECASTS:
        at_one = 0.0
        for factor in (1, 2, 4):
            replica = make_replica(model, device, workload.num_blocks, admission)
            trial = try_out(replica, requests, factor * fits)
            at_one = at_one or trial.goodput
            yield (
                f"| {admission} | {factor} × {fits} | {trial.goodput:,.0f} | {trial.goodput / at_one:.0%} "
                f"| {trial.report.preemptions} | {trial.report.recomputed:.3f} | {trial.paused:.1%} |"
            )


def preempted_replies(workload: Workload, model_name: str, device: str, number: int, host_gib: float) -> Iterator[str]:
    """Yield a table of what becomes of preempted replies, with nothing forecast, so that there are many."""
    columns = (
        "a preempted sequence | preempted | swapped | computed | time copying | tokens/s | goodput, tokens/s | paused"
    )
    yield f"| {columns} |\n{'| --- ' * 8}|"
    model = MODELS[model_name]
    num_blocks = int(host_gib * 2**30 / (BLOCK * model.kv_bytes_per_token()))
    seconds = copy_seconds(model, DEVICES[device], 1, BLOCK)
    ways = {
        "is computed again": NO_HOST_MEMORY,
        "is swapped where that takes less": HostMemory(num_blocks, seconds),
        "is computed again; evicted blocks are kept": HostMemory(num_blocks, seconds, swaps=False),
    }
    for way, host in ways.items():
        replica = make_replica(model_name, device, workload.num_blocks, "whatever fits", host)
        trial = try_out(replica, workload.requests(number), 2 * workload.clients_that_fit())
        report = trial.report
        yield (
            f"| {way} | {report.preemptions} | {report.swaps} | {report.recomputed:.3f} | {report.copying:.1%} "
            f"| {report.output_tokens_per_second:,.0f} | {trial.goodput:,.0f} | {trial.paused:.1%} |"
        )


def choices(models: Sequence[str], devices: Sequence[str], running: int = 32, context: int = 1000) -> Iterator[str]:
    """Yield a table of what both ways, copies and computing, take for one sequence beside others, in milliseconds.

    What is chosen is bold where it is copies.
    """
    lengths = (64, 256, 1024, 4096, 16_384, 65_536)
    yield f"| model, device | {' | '.join(f'{length:,}' for length in lengths)} |"
    yield "| --- " * (len(lengths) + 1) + "|"
    decodes = StepWork(running, running * context, running * context)
    for model in models:
        for device in devices:
            cost = step_cost(MODELS[model], DEVICES[device])
            copy = copy_seconds(MODELS[model], DEVICES[device], 1, BLOCK)
            choice = SwapChoice(cost, is_measured=True, copy_seconds=copy)
            cells = []
            for length in lengths:
                num_blocks = length // BLOCK
                computing = cost.seconds(decodes + chunk_work(0, length)) - cost.seconds(decodes)
                times = f"{2 * num_blocks * copy * 1000:,.1f} / {computing * 1000:,.1f}"
                cells.append(f"**{times}**" if choice.pays(decodes, length, num_blocks) else times)
            yield f"| {model}, {device} | {' | '.join(cells)} |"


def _table(options: argparse.Namespace) -> Iterator[str]:
    workload = WORKLOADS[options.load]
    if options.table == "admission":
        return oversubscription(workload, options.model, options.device, options.requests)
    if options.table == "swapping":
        return preempted_replies(workload, options.model, options.device, options.requests, options.host_gib)
    return choices(("qwen3-0.6b", "llama-7b", "llama-8b", "llama-70b"), ("a100-80gb", "h200"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, print the tables, return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.simulate.pressure")
    add = parser.add_argument
    add("table", choices=("admission", "swapping", "choice"))
    add("--load", choices=WORKLOADS, default="short")
    add("--model", choices=MODELS, default="llama-8b")
    add("--device", choices=DEVICES, default="h200")
    add("--requests", type=int, default=600, metavar="N")
    add("--host-gib", type=float, default=64.0, metavar="GIB", help="of the second table")
    options = parser.parse_args(arguments)
    for line in _table(options):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
