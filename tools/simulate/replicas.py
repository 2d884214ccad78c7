# python -m tools.simulate.replicas: what it is worth to send a prompt to the replica that has its beginning cached and
# the least to compute, by the gateway's own rules and the engine's own events, beside its home by rendezvous hashing.

from __future__ import annotations

import argparse
import math
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpu_backend.simulate.hardware import DEVICES, MODELS, copy_seconds, resident_tokens, step_cost
from gpu_backend.simulate.replica import HostMemory, Replica
from gpu_backend.simulate.report import Promise, Report, make_report
from gpu_backend.simulate.traces import MOONCAKE_BLOCK, TraceRequest, read_trace, share_out
from gpu_backend.step.block_events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored
from gpu_backend.step.config import KvEventsConfig, engine_config
from protocol.serving.prompt_marks import LENGTHS
from router.cached_prompts import NOTHING_FOUND, ON_DEVICE, ON_HOST, CachedPrompts
from router.catalog.targets import Endpoint, Target
from router.replicas import Prefill, Prefills, Standing, by_beginning, by_work

TOKEN = 4  # bytes
MODEL: Any = None  # no rule asks for it
SLOTS = 256
ORDERS = ("rendezvous", "load", "events")  # load: by what is to be computed, with no word of what is cached
PLACES = {"GPU": ON_DEVICE, "CPU": ON_HOST}
DELAY = 0.1  # seconds from a step to its events in the gateway's index


@dataclass
class Watched:
    """A replica, and what a gateway knows of it."""

    target: Target
    replica: Replica
    cached: CachedPrompts = field(default_factory=CachedPrompts)
    prefills: Prefills = field(default_factory=Prefills)
    calls: dict[str, Prefill] = field(default_factory=dict)  # that run
    told: deque[tuple[float, list[BlockEvent]]] = field(default_factory=deque)

    def look(self, now: float) -> None:
        """Let time pass there, and notice what a gateway notices."""
        self.replica.run_until(now)
        if events := self.replica.loop.take_block_events():
            self.told.append((now, events))
        while self.told and self.told[0][0] <= now - DELAY:
            for event in self.told.popleft()[1]:
                match event:
                    case BlockStored():
                        self.cached.store(event.prompt_marks, PLACES[event.medium])
                    case BlockRemoved():
                        self.cached.remove(event.block_hashes, PLACES[event.medium])
                    case AllBlocksCleared():
                        self.cached.clear()
        for name, call in list(self.calls.items()):
            outcome = self.replica.outcomes[name]
            if outcome.first_token is not None and call.uncached:
                self.prefills.note_first_token(call, outcome.first_token)
            if outcome.tokens >= outcome.request.output_tokens or outcome.refused:
                self.prefills.end(self.calls.pop(name))

    def submit(self, number: int, request: TraceRequest, marks: Sequence[int], uncached: int) -> None:
        """Send a call there."""
        told = tuple((mark, length // TOKEN) for mark, length in zip(marks, LENGTHS, strict=False))
        self.replica.submit(number, request, 2048, marks=told)
        self.calls[str(number)] = self.prefills.begin(request.prompt_tokens * TOKEN, uncached, request.arrival)


def marks_of(request: TraceRequest, number: int) -> list[int]:
    """Make up the marks that a gateway would make of a prompt's text."""
    marks, chain, done = [], hash(request.tenant), 0
    for length in LENGTHS:
        if length > request.prompt_tokens * TOKEN:
            break
        blocks = -(-length // (TOKEN * MOONCAKE_BLOCK))
        for place in range(done, blocks):
            chain = hash((chain, request.prefix[place] if place < len(request.prefix) else -number - 1))
        done = blocks
        marks.append(hash((chain, length)))
    return marks


def beginning(request: TraceRequest, number: int) -> str:
    """Return what the gateway's rendezvous goes by: what was said first, after the system prompt that all have."""
    return f"{request.tenant}\n{request.prefix[1] if len(request.prefix) > 1 else -number}"


def fleet(options: argparse.Namespace, *, tell: bool) -> list[Watched]:
    """Build the replicas, which tell their events or not."""
    sizes, device = MODELS[options.model], DEVICES[options.device]
    cost = step_cost(sizes, device, options.gpus_per_replica)
    blocks = resident_tokens(sizes, device, options.gpus_per_replica, memory_share=0.9) // options.block_size
    config = engine_config(
        "",
        max_num_seqs=SLOTS,
        max_num_batched_tokens=8192,
        block_size=options.block_size,
        max_waiting=10**9,
        step_cost=cost,
    )
    config = replace(config, kv_events=KvEventsConfig(enable_kv_cache_events=tell))
    host = HostMemory(
        int(options.kv_offloading_size * 2**30 / (options.block_size * sizes.kv_bytes_per_token())),
        copy_seconds(sizes, device, options.gpus_per_replica, options.block_size),
    )
    endpoints = [Endpoint("here", f"http://gpu-{number}:8100/v1") for number in range(options.replicas)]
    return [Watched(Target(MODEL, one), Replica(config, cost, blocks, host)) for one in endpoints]


def serve(requests: Sequence[TraceRequest], order: str, options: argparse.Namespace) -> tuple[Report, float]:
    """Serve all requests; return what they saw, and the share of their tokens that was expected to be cached."""
    watched = fleet(options, tell=order == "events")
    targets, expected = [one.target for one in watched], 0
    by_address = {one.target.endpoint.base_url: one for one in watched}
    for number, request in enumerate(requests):
        for one in watched:
            one.look(request.arrival)
        size, marks = request.prompt_tokens * TOKEN, marks_of(request, number)
        homes = by_beginning(targets, beginning(request, number), [len(one.calls) for one in watched])
        placed, found = homes, NOTHING_FOUND
        if order != "rendezvous":
            known = [by_address[home.endpoint.base_url] for home in homes]
            standings = [
                Standing(one.cached.find(marks), one.prefills.uncached, one.prefills.running, one.prefills.rate)
                for one in known
            ]
            placed = by_work(homes, standings, size)
            found = standings[homes.index(placed[0])].found
        expected += found.length // TOKEN
        by_address[placed[0].endpoint.base_url].submit(number, request, marks, size - found.length)
    for one in watched:
        one.replica.run_until(math.inf)
    report = make_report([one.replica for one in watched], Promise(), SLOTS)
    return report, expected / sum(request.prompt_tokens for request in requests)


def table(options: argparse.Namespace) -> Iterator[str]:
    """Yield the table as Markdown."""
    yield "| requests come | by | found | expected | TTFT p50 | p90 | p99 | gap p99 | busy |"
    yield "| --- " * 9 + "|"
    recorded = share_out(read_trace(options.trace, options.start)[: options.requests], options.tenants, 0.0)
    for speed in options.speeds:
        requests = [replace(request, arrival=request.arrival / speed) for request in recorded]
        for order in options.orders:
            report, expected = serve(requests, order, options)
            yield (
                f"| {speed:g} × | {order} | {report.hit_rate:.3f} | {expected:.3f} | {report.ttft_p50:.3f} "
                f"| {report.ttft_p90:.3f} | {report.ttft_p99:.3f} | {report.gap_p99:.3f} | {report.busy:.2f} |"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, print the table, return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.simulate.replicas")
    add = parser.add_argument
    add("--trace", type=Path, required=True, metavar="FILE")
    add("--start", type=float, default=0.0, metavar="S", help="seconds of the trace to leave out")
    add("--requests", type=int, default=3000, metavar="N")
    add("--tenants", type=int, default=8, metavar="N", help="among whom requests are shared out")
    add("--speeds", type=float, nargs="+", default=[4.0], metavar="X", help="arrivals come that much faster")
    add("--orders", nargs="+", choices=ORDERS, default=ORDERS, metavar="ORDER", help=f"of {', '.join(ORDERS)}")
    add("--replicas", type=int, default=8, metavar="N")
    add("--gpus-per-replica", type=int, default=1, metavar="N")
    add("--model", choices=MODELS, default="llama-8b")
    add("--device", choices=DEVICES, default="h100")
    add("--kv-offloading-size", type=float, default=0.0, metavar="GIB", help="host memory behind a replica's KV cache")
    add("--block-size", type=int, default=64, metavar="N", help="tokens in a block")
    for line in table(parser.parse_args(arguments)):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
