# What guesses gain and cost on the CPU: tokens a step and milliseconds a token with guesses that hold with a given
# chance from 0 to 1, against the same replies without any: forced, and as the engine judges when to guess, by the costs
# that it assumes and by those measured here, as --step-cost would give them. Random weights, one thread; times are CPU
# time of the step loop, the best of --rounds, which take turns.
#
#   python -m benchmarks.speculation [--sequences 1 8] [--tokens 64] [--rounds 3]

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from gpu_backend.config import EngineConfig
from gpu_backend.engine.cost import ASSUMED_COSTS, StepCost
from gpu_backend.engine.loop import EngineLoop
from gpu_backend.engine.messages import Generate, NewTokens
from gpu_backend.engine.plan import SequenceStep, StepPlan
from gpu_backend.engine.requests import Limits
from gpu_backend.engine.runner import Runner
from gpu_backend.engine.sampling_params import SamplingParams
from gpu_backend.engine.sequence import Sequence
from gpu_backend.models.config import load_model_config

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
GUESSES = 4
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
SIZES = (1, 2, 4, 8, 16, 24, 40)  # tokens of the steps that costs are measured by
Replies = dict[str, list[int]]
Measured = tuple[float, float]  # tokens of one reply a step, milliseconds a token of all together


def main() -> None:
    """Print a table for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        config = EngineConfig(
            folder, device="cpu", load_format="dummy", speculative_method="ngram", num_speculative_tokens=GUESSES
        )
        runner = Runner(config, load_model_config(Path(folder)))
    cost = measure_cost(runner)
    print(f"measured: {cost.fixed * 1e3:.2f} ms a step and {cost.token * 1e3:.2f} ms a token; assumed: 1 to 0.2\n")
    print("| replies | chance | forced | by assumed costs | by measured costs | tokens a step, each |")
    print("| ---: | ---: | ---: | ---: | ---: | --- |")
    for count in options.sequences:
        compare(config, runner, cost, count, options.tokens, options.rounds)


def compare(config: EngineConfig, runner: Runner, cost: StepCost, count: int, tokens: int, rounds: int) -> None:
    """Print the rows of one batch size: how many times as fast as without guesses, and where forced ones break even."""
    replies, _ = measure(config, runner, count, tokens, {}, 0.0)
    ways = {"forced": config, "assumed": config, "measured": replace(config, step_cost=cost)}
    best: dict[tuple[str, float], Measured] = {}
    for _ in range(rounds):
        cases = [("none", 0.0), *((how, share) for share in SHARES for how in ways)]
        for how, share in cases:
            known = {} if how == "none" else replies
            said, found = measure(ways.get(how, config), runner, count, tokens, known, share, how == "forced")
            assert said == replies, "a token changed"
            best[how, share] = min(best.get((how, share), found), found, key=lambda each: each[1])
    _, none = best["none", 0.0]
    for share in SHARES:
        faster = " | ".join(f"{none / best[how, share][1]:.2f} ×" for how in ways)
        per_step = ", ".join(f"{best[how, share][0]:.2f}" for how in ways)
        print(f"| {count} | {share:.2f} | {faster} | {per_step} |")
    forced = [best["forced", share][1] for share in SHARES]
    print(f"| {count} | | breaks even {break_even(forced, none)}; none takes {none:.2f} ms a token | | | |")


def measure_cost(runner: Runner) -> StepCost:
    """Return what steps take here: a line through the best of five of each size, of decodes with guesses."""
    sampling, context = SamplingParams(max_tokens=1), 32
    points = []
    for size in SIZES:
        rows, left = [], size
        while left:
            width = min(left, GUESSES + 1)
            first = len(rows) * 4
            table = tuple(range(first, first + 4))
            rows.append(SequenceStep(len(rows), (7,) * width, context, table, True, sampling, 0))
            left -= width
        seconds = []
        for _ in range(5):
            started = time.process_time()
            runner.run(StepPlan(0, tuple(rows)))
            seconds.append(time.process_time() - started)
        points.append((size, min(seconds)))
    mean_size, mean_seconds = (sum(column) / len(points) for column in zip(*points, strict=True))
    slope = sum((size - mean_size) * (seconds - mean_seconds) for size, seconds in points)
    slope /= sum((size - mean_size) ** 2 for size, _ in points)
    return StepCost(mean_seconds - slope * mean_size, 0.0, slope, 0.0, 0.0)


def measure(
    config: EngineConfig,
    runner: Runner,
    count: int,
    tokens: int,
    known: Replies,
    share: float,
    is_forced: bool = False,
) -> tuple[Replies, Measured]:
    """Generate once; a guess is the token that comes with the chance ``share``, else another."""
    limits = Limits(runner.max_model_len, runner.model_config.vocab_size, assumed_cost=ASSUMED_COSTS["cpu"])
    loop = EngineLoop(config, runner, runner.num_blocks, limits)
    speculator, dice = loop.scheduler.speculator, random.Random(7)
    assert speculator is not None

    def propose(sequence: Sequence, most: int) -> tuple[int, ...]:
        made = sequence.num_generated
        right = known.get(sequence.request_id, [])[made : made + most]
        return tuple(token if dice.random() < share else token ^ 1 for token in right)

    speculator.propose = propose
    speculator.is_forced = is_forced
    for number in range(count):
        sampling = SamplingParams(max_tokens=tokens, seed=number)
        loop.handle(Generate(f"{number}", tuple((number * 31 + i) % 997 for i in range(32)), sampling))
    replies: Replies = {f"{number}": [] for number in range(count)}
    seconds, steps = 0.0, 0
    while loop.has_work():
        started = time.process_time()
        events = loop.step()
        if all(replies.values()):  # the prompts are done
            seconds += time.process_time() - started
            steps += 1
        for event in events:
            assert isinstance(event, NewTokens)
            replies[event.request_id] += event.token_ids
    made = (tokens - 1) * count
    return replies, (made / count / steps, seconds / made * 1e3)


def break_even(forced: list[float], none: float) -> str:
    """Say from which chance on guesses are faster than none, between the rows by a straight line."""
    if forced[0] <= none:
        return "at any chance"
    for low, high, slow, fast in zip(SHARES, SHARES[1:], forced, forced[1:], strict=False):
        if fast <= none < slow:
            return f"at a chance of {low + (high - low) * (slow - none) / (slow - fast):.2f}"
    return "at no chance"


if __name__ == "__main__":
    main()
