# python -m tools.simulate.locality: what it is worth to let a tenant whose prompts are cached be ahead of the
# least served one for a while, and what it costs the others. 0 tokens of lead are the counters alone.

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gpu_backend.simulate.hardware import DEVICES, MODELS, step_cost
from gpu_backend.simulate.replica import replay
from gpu_backend.simulate.report import Promise, make_report
from gpu_backend.simulate.traces import MOONCAKE_BLOCK, TraceRequest, read_trace, share_out
from gpu_backend.step.config import engine_config

SLOTS = 64  # replies at once
BUDGET = 2048  # tokens a step


def teams(number: int, requests: int, prompt_blocks: int, per_second: float, seed: int = 0) -> list[TraceRequest]:
    """Make requests of ``number`` teams, each with a system prompt of its own before a question of about 200 tokens."""
    dice = random.Random(seed)
    made, at = [], 0.0
    for _ in range(requests):
        at += dice.expovariate(per_second)
        team = dice.randrange(number)
        prefix = tuple(team * prompt_blocks + block for block in range(prompt_blocks))
        question, reply = (1 + int(dice.expovariate(1 / mean)) for mean in (200, 100))
        length = prompt_blocks * MOONCAKE_BLOCK + question
        made.append(TraceRequest(at, length, reply, tenant=f"team {team}", prefix=prefix))
    return made


def row(requests: Sequence[TraceRequest], lead: int, num_blocks: int, block_size: int = 16) -> str:
    """Return a line of the table."""
    cost = step_cost(MODELS["llama-8b"], DEVICES["h200"])
    config = engine_config(
        model="",
        max_num_seqs=SLOTS,
        max_num_batched_tokens=BUDGET,
        block_size=block_size,
        max_waiting=10**9,
        cached_lead=lead,
        step_cost=cost,
    )
    replicas = replay(requests, config, cost, num_blocks)
    report = make_report(replicas, Promise(), SLOTS)
    computed = replicas[0].runner.log.computed_tokens
    return (
        f"| {lead:,} | {report.hit_rate:.3f} | {computed / 1e6:.2f} | {report.seconds:.1f} "
        f"| {report.ttft_p50:.2f} | {report.ttft_p90:.2f} | {report.ttft_p99:.2f} "
        f"| {report.service_gap:,.0f} | {report.service_bound:,.0f} |"
    )


def table(options: argparse.Namespace) -> Iterator[str]:
    """Yield the table as Markdown."""
    if options.trace:
        requests = share_out(read_trace(options.trace)[: options.requests], options.tenants, 0.0)
        requests = [replace(request, arrival=request.arrival / options.speed) for request in requests]
    else:
        requests = teams(options.tenants, options.requests, options.prompt_blocks, options.per_second)
    yield "| lead Q | hit rate | computed, million | seconds | TTFT p50 | p90 | p99 | gap seen | bound U + Q |"
    yield "| --- " * 9 + "|"
    for lead in options.leads:
        yield row(requests, lead, options.blocks)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, print the table, return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.simulate.locality")
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="Mooncake's; without it, teams with system prompts are made up")
    add("--requests", type=int, default=2000, metavar="N")
    add("--tenants", type=int, default=32, metavar="N")
    add("--prompt-blocks", type=int, default=8, metavar="N", help="length of a team's system prompt, in 512 tokens")
    add("--per-second", type=float, default=60.0, metavar="X", help="requests of all teams")
    add("--speed", type=float, default=1.0, metavar="X", help="a trace's arrivals come that much faster")
    add("--blocks", type=int, default=6144, metavar="N", help="of 16 tokens, in the KV cache")
    add("--leads", type=int, nargs="+", default=[0, 512, BUDGET, 4 * BUDGET, 16 * BUDGET], metavar="Q")
    for line in table(parser.parse_args(arguments)):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
