# python -m gpu_backend.simulate.capacity: how many devices a load needs. What fits is arithmetic; what is fast enough
# is found by replaying a made-up load on one replica, with more and more of it.

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpu_backend.hardware.capability import has_float8, has_latent_attention
from gpu_backend.simulate.cards import page
from gpu_backend.simulate.hardware import (
    DEVICES,
    MODELS,
    PRECISIONS,
    Device,
    Model,
    beside_states,
    least_gpus,
    resident_sequences,
    resident_tokens,
    step_cost,
)
from gpu_backend.simulate.replica import replay
from gpu_backend.simulate.report import Promise, make_report
from gpu_backend.simulate.traces import TraceRequest
from gpu_backend.step.config import StepConfig, engine_config

TRIAL_REQUESTS = 200  # in a trial
BLOCK = 16


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """A model on the devices of one replica."""

    model: Model
    device: Device
    gpus: int
    weight_bytes: float
    memory_share: float = 1.0

    def tokens_beside(self, sequences: int) -> int:
        """Return how many tokens the KV cache holds beside the states of so many sequences."""
        return resident_tokens(self.model, self.device, self.gpus, self.weight_bytes, 2, self.memory_share, sequences)

    def sequences(self, length: int) -> int:
        """Return how many sequences of so many tokens fit."""
        return resident_sequences(self.model, self.device, self.gpus, self.weight_bytes, length, self.memory_share)


def replicas_for_tokens(users: int, tokens_per_user: float, tokens_per_replica: float) -> int:
    """Return how many replicas generate that many tokens a second for every user."""
    return math.ceil(users * tokens_per_user / tokens_per_replica)


def requests_per_replica(
    shape: ReplicaShape, prompt: int, reply: int, ttft: float, most: float = 256.0, requests: int = TRIAL_REQUESTS
) -> float:
    """Return the requests a second at which one replica's TTFT p90 is still below ``ttft``, to a tenth.

    ``prompt`` and ``reply`` are mean lengths in tokens.
    """
    low, high = 0.0, most
    rate = 1.0
    while high - low > max(0.1 * low, 0.01):
        if _ttft_p90(shape, prompt, reply, rate, requests) < ttft:
            low = rate
            rate = min(2 * rate, most) if high == most else (low + high) / 2
        else:
            high = rate
            rate = (low + high) / 2
        if low >= most:
            break
    return low


def _ttft_p90(shape: ReplicaShape, mean_prompt: int, mean_reply: int, rate: float, number: int) -> float:
    dice = random.Random(0)
    requests, at = [], 0.0
    for _ in range(number):
        at += dice.expovariate(rate)
        # Lengths of real prompts and replies scatter about as widely as they are long.
        prompt, reply = (max(1, int(dice.expovariate(1 / mean))) for mean in (mean_prompt, mean_reply))
        requests.append(TraceRequest(at, prompt, reply))
    model, running = shape.model, most_sequences(shape, mean_prompt + mean_reply)
    cost = step_cost(model, shape.device, shape.gpus, shape.weight_bytes)
    cost = beside_states(cost, model, mean_prompt + mean_reply / 2)
    config = engine_config(
        model="",
        max_num_batched_tokens=8192,
        max_num_seqs=running,
        block_size=BLOCK,
        step_cost=cost,
        max_waiting=10**6,
    )
    replicas = replay(requests, config, cost, shape.tokens_beside(running) // BLOCK)
    return make_report(replicas, Promise(), config.steps.max_num_seqs).ttft_p90


def most_sequences(shape: ReplicaShape, length: int) -> int:
    """Return how many sequences are to run at the most: states are there for as many, whether they run or not."""
    usual = StepConfig().max_num_seqs
    return max(1, min(usual, shape.sequences(length))) if shape.model.state_bytes else usual


def problem_with(model: Model, device: Device, precision: str) -> str:
    """Return why the engine refuses a model in that precision on such a device; "": it does not."""
    if precision == "fp8" and not has_float8(device.capability):
        return "float8 needs compute capability 8.9 or more: take bf16 or int4, or another device"
    if model.latent_rank and not has_latent_attention(device.capability):
        return "attention over latent vectors does not fit its shared memory: take another device"
    return ""


def fits(device: Device) -> Iterator[str]:
    """Say for every model and precision what it takes."""
    yield f"{'model':18} {'weights':8} {'GB':>6} {'KV bytes/token':>15} {'MB/sequence':>12} {'least GPUs':>11}"
    for name, model in MODELS.items():
        for precision, size in PRECISIONS.items():
            if problem_with(model, device, precision):
                continue
            yield (
                f"{name:18} {precision:8} {model.weight_bytes(size) / 1e9:6.0f} {model.kv_bytes_per_token():15,.0f} "
                f"{model.state_bytes / 1e6:12,.1f} {least_gpus(model, device, size):11}"
            )


def answer(options: argparse.Namespace) -> Iterator[str]:
    """Yield the answer line by line. Raises ``ValueError`` for a model that does not fit."""
    model, device = MODELS[options.model], DEVICES[options.device]
    size = PRECISIONS[options.precision]
    if problem := problem_with(model, device, options.precision):
        raise ValueError(f"{options.model} in {options.precision} does not run on {options.device}: {problem}")
    gpus = options.gpus_per_replica or least_gpus(model, device, size)
    shape = ReplicaShape(model, device, gpus, size, options.memory_share)
    length = options.prompt + options.reply
    where = f"{gpus} x {options.device}"
    if not (room := shape.tokens_beside(0)):
        least = least_gpus(model, device, size)
        raise ValueError(f"{options.model} does not fit on {where}; it takes at least {least}")
    if not shape.sequences(length):
        raise ValueError(
            f"{where} hold {room:,} tokens beside {options.model}, less than a sequence of {length:,} takes; say more "
            "--gpus-per-replica, or a shorter --prompt and --reply"
        )
    yield f"{'replica':28} {options.model} {options.precision} on {gpus} x {options.device}"
    yield f"{'kv_bytes_per_token':28} {model.kv_bytes_per_token():.0f}"
    yield f"{'resident_tokens':28} {shape.tokens_beside(most_sequences(shape, length))}"
    yield f"{'sequences_of_' + str(length):28} {shape.sequences(length)}"
    if model.state_bytes:
        yield f"{'state_bytes_per_sequence':28} {model.state_bytes:.0f}"
        yield f"{'max_num_seqs':28} {most_sequences(shape, length)}"
    if options.replica_tokens_per_second:
        replicas = replicas_for_tokens(options.users, options.tokens_per_user, options.replica_tokens_per_second)
    else:
        asked = options.users * options.requests_per_user_hour / 3600
        rate = requests_per_replica(shape, options.prompt, options.reply, options.ttft)
        if not rate:
            raise ValueError(f"no load at all keeps TTFT p90 below {options.ttft} s here; use more GPUs a replica")
        yield f"{'requests_per_second':28} {asked:.1f}"
        yield f"{'requests_per_second_a_replica':28} {rate:.2f}"
        replicas = math.ceil(asked / rate)
    yield f"{'replicas':28} {replicas}"
    yield f"{'gpus':28} {replicas * gpus}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, answer, return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        lines = page() if options.cards else fits(DEVICES[options.device]) if options.table else answer(options)
        print("\n".join(lines))  # noqa: T201
    except ValueError as error:
        print(f"capacity: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpu_backend.simulate.capacity",
        description="How many replicas and GPUs a number of users needs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--table", action="store_true", help="only list what every model takes on that device")
    add("--cards", action="store_true", help="only say which published model takes how many of which card, in Markdown")
    add("--model", choices=MODELS, default="llama-70b")
    add("--device", choices=DEVICES, default="h100")
    add("--precision", choices=PRECISIONS, default="bf16", help="of the weights; the KV cache is bf16")
    add("--gpus-per-replica", type=int, metavar="N", help="the least that hold the weights if not given")
    add("--memory-share", type=float, default=1.0, metavar="P", help="of the devices' memory that can be used")
    add("--users", type=int, default=1000, metavar="N")
    add("--prompt", type=int, default=1024, metavar="N", help="mean tokens")
    add("--reply", type=int, default=1024, metavar="N", help="mean tokens")
    add("--ttft", type=float, default=1.0, metavar="S", help="promised to 90 %% of the requests")
    add("--requests-per-user-hour", type=float, default=30.0, metavar="N")
    add("--tokens-per-user", type=float, default=30.0, metavar="N", help="a second, with --replica-tokens-per-second")
    add("--replica-tokens-per-second", type=float, metavar="N", help="measured; without it, a load is replayed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
