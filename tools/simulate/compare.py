# python -m tools.simulate.compare: what continuous batching, paging, shared prompts and the steps' budget are
# worth, each against what one would do without. In the first three tables all requests are there from the start and
# steps may stretch, so that nothing else differs.

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gpu_backend.simulate.hardware import DEVICES, REPLAYED, step_cost
from gpu_backend.simulate.replica import Replica
from gpu_backend.simulate.traces import TraceRequest, read_trace
from gpu_backend.step.config import engine_config
from gpu_backend.step.cost import StepCost, StepWork, chunk_work

BLOCK = 16
LONGEST = 8192  # tokens that a sequence may have, unless a trace has longer ones
DECLARED = 2048  # max_tokens of every request


def shared_benchmark() -> list[TraceRequest]:
    """Make the 256 prompts and replies of 100 to 1,024 tokens that small engines are measured with (seed 0)."""
    dice = random.Random(0)
    prompts = []
    for _ in range(256):
        length = dice.randint(100, 1024)
        for _ in range(length):
            dice.randint(0, 10_000)  # the tokens themselves, drawn in the same order
        prompts.append(length)
    return [TraceRequest(0.0, prompt, dice.randint(100, 1024)) for prompt in prompts]


def static_batches(requests: Sequence[TraceRequest], slots: int, cost: StepCost) -> tuple[float, float]:
    """Return occupancy and tokens a second of batches that begin together and end with their longest reply."""
    seconds = slot_steps = 0.0
    for first in range(0, len(requests), slots):
        batch = requests[first : first + slots]
        longest = max(request.output_tokens for request in batch)
        seconds += cost.seconds(sum((chunk_work(0, r.prompt_tokens) for r in batch), StepWork()))
        context = sum(request.prompt_tokens for request in batch)
        for step in range(1, longest):
            seconds += cost.seconds(StepWork(len(batch), context + step * len(batch), context + step * len(batch)))
        slot_steps += slots * longest
    tokens = sum(request.output_tokens for request in requests)
    return tokens / slot_steps, tokens / seconds


def _ready(
    requests: Sequence[TraceRequest], slots: int, cost: StepCost, num_blocks: int, prefix_caching: bool = True
) -> Replica:
    """Return a replica that has all requests waiting."""
    config = engine_config(
        model="",
        max_num_seqs=slots,
        max_num_batched_tokens=max(2048, slots),
        block_size=BLOCK,
        max_waiting=10**9,
        prefix_caching=prefix_caching,
    )
    replica = Replica(config, cost, num_blocks)
    for number, request in enumerate(requests):
        replica.submit(number, replace(request, arrival=0.0), DECLARED)
    return replica


def continuous(
    requests: Sequence[TraceRequest], slots: int, cost: StepCost, num_blocks: int, prefix_caching: bool = True
) -> Replica:
    """Serve all requests on one replica."""
    replica = _ready(requests, slots, cost, num_blocks, prefix_caching)
    replica.run_until(math.inf)
    return replica


def at_once(requests: Sequence[TraceRequest], cost: StepCost, num_blocks: int) -> float:
    """Return how many replies have room in the KV cache, on average over the time in which more wait for it."""
    replica = _ready(requests, 4096, cost, num_blocks)
    scheduler, seconds = replica.loop.scheduler, 0.0
    while scheduler.num_waiting:
        began = replica.runner.now
        replica.step()
        seconds += len(scheduler.running) * (replica.runner.now - began)
    return seconds / replica.runner.now


def batching_row(name: str, requests: Sequence[TraceRequest], slots: int, cost: StepCost, num_blocks: int) -> str:
    """Return a line of the first table."""
    occupancy, rate = static_batches(requests, slots, cost)
    replica = continuous(requests, slots, cost, num_blocks)
    log = replica.runner.log
    filled = log.running_seconds / log.seconds / slots
    ours = sum(request.output_tokens for request in requests) / replica.runner.now
    return f"| {name} | {occupancy:.0%} | {rate:,.0f} | {filled:.0%} | {ours:,.0f} | {ours / rate:.1f} |"


def paging_row(name: str, requests: Sequence[TraceRequest], cost: StepCost, num_blocks: int) -> str:
    """Return a line of the second table: how many run at once in the same memory, by what is reserved for each."""
    tokens = num_blocks * BLOCK
    longest = max(LONGEST, 2 ** math.ceil(math.log2(max(r.prompt_tokens + r.output_tokens for r in requests))))
    whole = tokens / longest
    wanted = tokens / (sum(r.prompt_tokens + DECLARED for r in requests) / len(requests))
    running = at_once(requests, cost, num_blocks)
    return (
        f"| {name} | {longest:,} | {whole:.0f} | {wanted:.0f} | {running:.0f} "
        f"| {running / whole:.1f} | {running / wanted:.1f} |"
    )


def sharing_row(system_prompt: int, cost: StepCost, number: int = 256) -> str:
    """Return a line of the third table: 64 replies at once behind one system prompt, with and without sharing."""
    requests = [TraceRequest(0.0, system_prompt + 100, 50, common=system_prompt) for _ in range(number)]
    requests.insert(0, TraceRequest(0.0, system_prompt + 100, 1, common=system_prompt))
    shared, apart = (continuous(requests, 64, cost, 20_000, caching) for caching in (True, False))
    used, needed = shared.runner.log.most_blocks, apart.runner.log.most_blocks
    done, all_ = shared.runner.log.computed_tokens, apart.runner.log.computed_tokens
    return f"| {system_prompt:,} | {needed:,} | {used:,} | {1 - used / needed:.0%} | {1 - done / all_:.0%} |"


def long_prompt_row(length: int, cost: StepCost, knows_cost: bool, replies: int = 32) -> str:
    """Return a line of the fourth table: a long prompt beside replies of 12,000 tokens, and a short one every second.

    Raises ``AssertionError`` if a step that the budget was chosen for takes more than 1.5 times its decodes alone. That
    is possible where half of a decode step reads the long prompt's keys and values and computes a block of it.
    """
    known = cost if knows_cost else None
    config = engine_config("", max_num_seqs=64, max_num_batched_tokens=8192, block_size=BLOCK, step_cost=known)
    replica = Replica(config, cost, 50_000)
    for number in range(replies):
        replica.submit(number, TraceRequest(0.0, 12_000, 6000), 6000)
    while any(outcome.first_token is None for outcome in replica.outcomes.values()):
        replica.run_until(replica.runner.now + 0.1)
    began = replica.runner.now
    del replica.gaps[:], replica.runner.log.stretches[:]
    replica.submit(replies, TraceRequest(began, length, 2), 2)
    long = replica.outcomes[str(replies)]
    while long.first_token is None:
        replica.submit(len(replica.outcomes), TraceRequest(replica.runner.now, 500, 5), 5)
        replica.run_until(replica.runner.now + 1.0)
    others = list(replica.outcomes.values())[replies + 1 :]
    worst = max(replica.runner.log.stretches)
    assert not knows_cost or worst <= config.steps.step_stretch, f"a step took {worst} times its decodes"
    first_tokens = [o.first_token - o.request.arrival for o in others if o.first_token is not None]
    budget = "within 1.5 × its decodes" if knows_cost else "8,192 tokens"
    return (
        f"| {budget} | {worst:.2f} | {max(replica.gaps) * 1000:.0f} "
        f"| {long.first_token - began:.1f} | {max(first_tokens):.2f} |"
    )


def tables(options: argparse.Namespace) -> Iterator[str]:
    """Yield the four tables as Markdown."""
    cost = step_cost(REPLAYED[options.model], DEVICES[options.device])
    loads = {"shared benchmark": shared_benchmark()}
    for path in options.trace:
        loads[Path(path).stem] = read_trace(Path(path), seconds=options.seconds)[: options.requests]
    slots = options.slots
    yield f"| load | static: slots used | tokens/s | continuous: slots used | tokens/s | ratio |\n{'| --- ' * 6}|"
    for name, requests in loads.items():
        yield batching_row(name, requests, slots, cost, 100_000)
    yield f"\n| load | longest | all of that | prompt + {DECLARED:,} | paged | ratio | ratio |\n{'| --- ' * 7}|"
    for name, requests in loads.items():
        yield paging_row(name, requests, cost, options.paging_blocks)
    yield f"\n| system prompt | blocks apart | blocks shared | memory saved | computed tokens saved |\n{'| --- ' * 5}|"
    for length in (500, 1000, 2000):
        yield sharing_row(length, cost)
    yield f"\n| a step | worst over decodes | longest pause, ms | 128k's first token, s | others', s |\n{'| --- ' * 5}|"
    for knows_cost in (False, True):
        yield long_prompt_row(131_072, cost, knows_cost)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, print the tables, return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.simulate.compare")
    parser.add_argument("--trace", action="append", default=[], metavar="FILE", help="replay this one too")
    parser.add_argument("--requests", type=int, default=2000, metavar="N", help="of each trace")
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="S", help="of each trace; ServeGen needs it")
    parser.add_argument("--slots", type=int, default=64, metavar="N", help="replies at once")
    parser.add_argument("--paging-blocks", type=int, default=8192, metavar="N", help="memory of the second table")
    parser.add_argument("--model", choices=REPLAYED, default="llama-8b")
    parser.add_argument("--device", choices=DEVICES, default="h200")
    for line in tables(parser.parse_args(arguments)):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
