# python -m tools.simulate.disaggregate: what it is worth to have prompts computed by replicas that do nothing else,
# beside as many replicas that do both, by the length of prompts and replies, the load and the link between replicas.

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gpu_backend.kv_transfer.seam import Described, Ended, KvTransfer, TransferEvent
from gpu_backend.simulate.hardware import DEVICES, MODELS, resident_tokens, step_cost
from gpu_backend.simulate.replica import Replica, RequestOutcome, VirtualRunner, replay
from gpu_backend.simulate.traces import TraceRequest
from gpu_backend.step.config import EngineConfig, engine_config
from gpu_backend.step.cost import StepCost
from gpu_backend.step.transfer import RemoteBlocks

BLOCK = 16
ELSEWHERE = RemoteBlocks("prefiller", "lease", "prefiller", 1)
ASKING = 0.002  # seconds for a word there and back, with its handshake


@dataclass(frozen=True, slots=True)
class Scene:
    """What every replica is, and what passes between them."""

    config: EngineConfig
    cost: StepCost
    num_blocks: int
    block_bytes: float
    link: float  # bytes a second into one replica


class VirtualTransfer(KvTransfer):
    """Blocks come over one link, one prompt's after the other's, in the runner's time; all of them are there."""

    def __init__(self, runner: VirtualRunner, block_bytes: float, link: float) -> None:
        self._runner = runner
        self._seconds = block_bytes / link  # a block
        self._free = 0.0  # when the link is
        self._coming: deque[tuple[float, TransferEvent]] = deque()

    def describe(self, ticket: int, remote: RemoteBlocks, salt: bytes, hashes: Sequence[bytes]) -> None:
        """Say after a moment that all are there."""
        self._add(self._runner.now + ASKING, Described(ticket, len(hashes)))

    def pull(self, ticket: int, blocks: Sequence[int]) -> None:
        """Let them come when those before them have."""
        self._free = max(self._free, self._runner.now) + len(blocks) * self._seconds
        self._add(self._free, Ended(ticket, len(blocks)))

    def poll(self, patience: float = 0.0) -> list[TransferEvent]:
        """Return what has happened by now; to wait is to let the clock run."""
        if patience and self._coming and not self.has_news():
            self._runner.now = min(self._runner.now + patience, self._coming[0][0])
        events = []
        while self.has_news():
            events.append(self._coming.popleft()[1])
        return events

    def has_news(self) -> bool:
        """Whether anything has happened by now."""
        return bool(self._coming) and self._coming[0][0] <= self._runner.now

    def release(self, name: str | int) -> None:
        """Bring nothing more of it: at most what was not begun."""
        assert isinstance(name, int)
        if not any(isinstance(event, Ended) and event.ticket == name for _, event in self._coming):
            self._add(self._runner.now, Ended(name, 0, "given up"))

    def register(
        self, lease: str, salt: bytes, blocks: Sequence[tuple[int, bytes]], cached_tokens: int = 0
    ) -> RemoteBlocks:
        """Hold nothing: where prompts are computed their blocks are free when the first token is there."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is open."""

    def _add(self, at: float, event: TransferEvent) -> None:
        self._coming.append((at, event))
        self._coming = deque(sorted(self._coming, key=lambda each: each[0]))


def workload(prompt: int, reply: int, rate: float, number: int) -> list[TraceRequest]:
    """Draw requests that arrive by chance, ``rate`` a second, of lengths around these (seed 0)."""
    dice, now, requests = random.Random(0), 0.0, []
    for _ in range(number):
        now += dice.expovariate(rate)
        lengths = [max(2, round(length * dice.lognormvariate(-0.08, 0.4))) for length in (prompt, reply)]
        requests.append(TraceRequest(now, lengths[0], lengths[1]))
    return requests


def together(scene: Scene, requests: Sequence[TraceRequest], replicas: int) -> list[RequestOutcome]:
    """Serve all on replicas that do both."""
    done = replay(requests, scene.config, scene.cost, scene.num_blocks, replicas)
    return [outcome for replica in done for outcome in replica.outcomes.values()]


def apart(
    scene: Scene, requests: Sequence[TraceRequest], prefilling: int, decoding: int, threshold: int
) -> list[RequestOutcome]:
    """Serve prompts from ``threshold`` tokens on by the one kind of replicas first, and all replies by the other."""
    long = {number: request for number, request in enumerate(requests) if request.prompt_tokens >= threshold}
    pool = [Replica(scene.config, scene.cost, scene.num_blocks) for _ in range(prefilling)]
    for number, request in long.items():
        submit(pool, request.arrival, number, replace(request, output_tokens=1), max_tokens=1)
    computed = {number: outcome.first_token for replica in pool for number, outcome in finished(replica)}

    def linked(runner: VirtualRunner) -> VirtualTransfer:
        return VirtualTransfer(runner, scene.block_bytes, scene.link)

    pool = [Replica(scene.config, scene.cost, scene.num_blocks, transfer=linked) for _ in range(decoding)]
    arrivals = sorted((computed.get(number) or request.arrival, number) for number, request in enumerate(requests))
    for arrival, number in arrivals:
        submit(pool, arrival, number, requests[number], remote=ELSEWHERE if number in computed else None)
    return [outcome for replica in pool for _, outcome in finished(replica)]


def submit(
    pool: Sequence[Replica],
    arrival: float,
    number: int,
    request: TraceRequest,
    max_tokens: int = 2048,
    remote: RemoteBlocks | None = None,
) -> None:
    """Hand a request to the replica with the least left to do, when it comes there."""
    for replica in pool:
        replica.run_until(arrival)
    min(pool, key=lambda replica: replica.outstanding).submit(number, request, max_tokens, remote=remote)


def finished(replica: Replica) -> Iterator[tuple[int, RequestOutcome]]:
    """Serve a replica's requests to their ends."""
    replica.run_until(math.inf)
    for name, outcome in replica.outcomes.items():
        yield int(name), outcome


def row(name: str, outcomes: Sequence[RequestOutcome], ttft: float, gap: float) -> str:
    """Return a line of a table; ``ttft`` and ``gap``: seconds promised of the first token, and between the others."""
    first, mean, longest = [], [], []
    for outcome in outcomes:
        assert outcome.first_token is not None, outcome.refused
        first.append(outcome.first_token - outcome.request.arrival)
        mean.append((outcome.last_token - outcome.first_token) / max(1, outcome.tokens - 1))
        longest.append(outcome.longest_gap)
    kept = sum(a <= ttft and b <= gap for a, b in zip(first, mean, strict=True)) / len(first)
    times = f"{at(first, 0.5):.2f} | {at(first, 0.9):.2f} | {1000 * at(mean, 0.9):.1f} | {1000 * at(longest, 0.9):.0f}"
    return f"| {name} | {times} | {kept:.0%} |"


def at(values: Sequence[float], share: float) -> float:
    """Return the value that so many are at most."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def tables(options: argparse.Namespace) -> Iterator[str]:
    """Yield a table for each load, as Markdown."""
    model, device = MODELS[options.model], DEVICES[options.device]
    cost = step_cost(model, device, options.gpus_per_replica)
    num_blocks = resident_tokens(model, device, options.gpus_per_replica, memory_share=0.9) // BLOCK
    config = engine_config("", max_num_seqs=256, max_num_batched_tokens=8192, block_size=BLOCK, step_cost=cost)
    config = replace(config, transfer=replace(config.transfer, kv_pull_seconds=20.0))
    block_bytes = BLOCK * model.kv_bytes_per_token()
    replicas = options.replicas
    for prompt, reply, rate in options.load:
        requests = workload(prompt, reply, rate, options.requests)
        yield f"\n{prompt:,} tokens in, {reply:,} out, {rate:g} requests/s:\n"
        yield (
            "| replicas | first token p50, s | p90 | mean gap p90, ms | longest gap p90 | kept |\n" + "| --- " * 6 + "|"
        )
        scene = Scene(config, cost, num_blocks, block_bytes, math.inf)
        yield row(f"{replicas} do both", together(scene, requests, replicas), options.ttft, options.gap)
        for prefilling in range(1, replicas):
            for gigabytes in options.link if prefilling == replicas // 2 else options.link[-1:]:
                scene = replace(scene, link=gigabytes * 1e9)
                done = apart(scene, requests, prefilling, replicas - prefilling, options.threshold)
                name = f"{prefilling} for prompts, {replicas - prefilling} for replies, {gigabytes:g} GB/s"
                yield row(name, done, options.ttft, options.gap)


def load(text: str) -> tuple[int, int, float]:
    """Read PROMPT,REPLY,RATE."""
    prompt, reply, rate = text.split(",")
    return int(prompt), int(reply), float(rate)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, print the tables, return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.simulate.disaggregate")
    usual = [(8000, 200, 2.0), (8000, 200, 3.0), (2000, 200, 10.0), (8000, 20, 4.0)]
    words = "tokens in and out, and requests a second"
    parser.add_argument("--load", type=load, nargs="+", default=usual, metavar="IN,OUT,RATE", help=words)
    parser.add_argument("--requests", type=int, default=80, metavar="N", help="of each load")
    parser.add_argument("--replicas", type=int, default=4, metavar="N")
    parser.add_argument("--link", type=float, nargs="+", default=[1.25, 12.5, 50.0], metavar="GB/S")
    parser.add_argument("--threshold", type=int, default=1024, metavar="N", help="shorter prompts go nowhere else")
    parser.add_argument("--ttft", type=float, default=2.0, metavar="S", help="promised of the first token")
    parser.add_argument("--gap", type=float, default=0.02, metavar="S", help="promised of the mean of the others")
    parser.add_argument("--model", choices=MODELS, default="llama-70b")
    parser.add_argument("--device", choices=DEVICES, default="h100")
    parser.add_argument("--gpus-per-replica", type=int, default=4, metavar="N")
    for line in tables(parser.parse_args(arguments)):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
