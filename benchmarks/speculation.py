# What guesses gain and cost on the CPU: tokens a step and milliseconds a token with guesses that hold with a forced
# chance from 0 to 1, against the same replies without any, and from which chance on they pay. Then as the engine
# itself judges when to guess. Random weights, one thread; times are CPU time of the step loop.
#
#   python -m benchmarks.speculation [--sequences 1 8] [--tokens 64]

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import torch

from gpu_backend.config import EngineConfig
from gpu_backend.engine.cost import ASSUMED_COSTS
from gpu_backend.engine.loop import EngineLoop
from gpu_backend.engine.messages import Generate, NewTokens
from gpu_backend.engine.requests import Limits
from gpu_backend.engine.runner import Runner
from gpu_backend.engine.sequence import SamplingParams, Sequence
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
Replies = dict[str, list[int]]


def main() -> None:
    """Print a table for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        config = EngineConfig(
            folder, device="cpu", load_format="dummy", speculative_method="ngram", num_speculative_tokens=GUESSES
        )
        runner = Runner(config, load_model_config(Path(folder)))
    print(f"{GUESSES} guesses a step; forced, or as the engine chooses | tokens a step | ms a token | against none")
    for count in options.sequences:
        compare(config, runner, count, options.tokens)


def compare(config: EngineConfig, runner: Runner, count: int, tokens: int) -> None:
    """Print the rows of one batch size, and the chance at which forced guesses break even."""
    replies, _, _ = measure(config, runner, count, tokens, {}, 0.0, is_forced=False)
    _, _, none = measure(config, runner, count, tokens, {}, 0.0, is_forced=False)
    print(f"{count:3} replies, none         | {1:13.2f} | {none:10.2f} |")
    forced: list[float] = []
    for is_forced in (True, False):
        for share in SHARES:
            said, per_step, ms = measure(config, runner, count, tokens, replies, share, is_forced)
            assert said == replies, "a token changed"
            forced += [ms] if is_forced else []
            how = "forced" if is_forced else "chosen"
            print(f"{count:3} replies, {how} {share:5.2f} | {per_step:13.2f} | {ms:10.2f} | {none / ms:5.2f}x")
    print(f"{count:3} replies: forced guesses break even {break_even(forced, none)}")


def measure(
    config: EngineConfig, runner: Runner, count: int, tokens: int, known: Replies, share: float, is_forced: bool
) -> tuple[Replies, float, float]:
    """Generate once: the replies, tokens of one reply a step, and milliseconds a token of all replies together."""
    limits = Limits(runner.max_model_len, runner.model_config.vocab_size, assumed_cost=ASSUMED_COSTS["cpu"])
    loop = EngineLoop(config, runner, runner.num_blocks, limits)
    speculator, dice = loop.scheduler.speculator, random.Random(7)
    assert speculator is not None

    def propose(sequence: Sequence, most: int) -> tuple[int, ...]:
        made = sequence.num_generated
        right = known.get(sequence.request_id, [])[made : made + most]
        return tuple(token if dice.random() < share else token ^ 1 for token in right)

    speculator.propose = propose
    if is_forced:
        speculator.is_forced = True
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
    return replies, made / count / steps, seconds / made * 1e3


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
