# What drafts gain and cost on the CPU: how many times as fast as without drafts replies come whose drafts hold with
# a given chance from 0 to 1: forced, and as the engine judges, which is new at the first replies and knows more at the
# later ones. Random weights, one thread; times are CPU time of the step loop, the best of --rounds, which take turns.
#
#   python -m benchmarks.speculation [--sequences 1 8] [--tokens 64] [--sets 4] [--rounds 2]

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from gpu_backend.engine.loop import EngineLoop
from gpu_backend.execution.runner import Runner
from gpu_backend.models.config.model import load_model_config
from gpu_backend.step.config import EngineConfig, engine_config
from gpu_backend.step.cost import ASSUMED_COSTS
from gpu_backend.step.limits import Limits
from gpu_backend.step.messages import Generate, NewTokens
from gpu_backend.step.sampling_params import SamplingParams
from gpu_backend.step.sequence import Sequence

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


@dataclass(frozen=True, slots=True)
class Measured:
    """A set of replies: tokens of one reply a step, and milliseconds a token of all together."""

    per_step: float
    milliseconds: float


def main() -> None:
    """Print a table for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--sets", type=int, default=4, help="of replies that one engine gives")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        config = engine_config(
            folder, device="cpu", load_format="dummy", speculative_method="ngram", num_speculative_tokens=GUESSES
        )
        runner = Runner(config, load_model_config(Path(folder)))
    print("| replies | chance | forced | judged: first ones | later ones | tokens a step, each |")
    print("| ---: | ---: | ---: | ---: | ---: | --- |")
    for count in options.sequences:
        compare(config, runner, count, options.tokens, options.sets, options.rounds)


def compare(config: EngineConfig, runner: Runner, count: int, tokens: int, sets: int, rounds: int) -> None:
    """Print the rows of one batch size: how many times as fast as without drafts, and where forced ones break even."""
    replies = measure(config, runner, count, tokens, 1)[0]
    best: dict[tuple[str, float], Measured] = {}

    def note(name: str, share: float, found: list[Measured]) -> None:
        per_step, milliseconds = (statistics.fmean(column) for column in zip(*map(astuple, found), strict=True))
        before = best.get((name, share))
        if before is None or milliseconds < before.milliseconds:
            best[name, share] = Measured(per_step, milliseconds)

    for _ in range(rounds):
        note("none", 0.0, measure(config, runner, count, tokens, 1, replies)[1])
        for share in SHARES:
            note("forced", share, measure(config, runner, count, tokens, 1, replies, share, is_forced=True)[1])
            _, judged = measure(config, runner, count, tokens, sets, replies, share, is_forced=False)
            note("first", share, judged[:1])
            note("later", share, judged[1:])
    none, ways = best["none", 0.0].milliseconds, ("forced", "first", "later")
    for share in SHARES:
        faster = " | ".join(f"{none / best[how, share].milliseconds:.2f} ×" for how in ways)
        per_step = ", ".join(f"{best[how, share].per_step:.2f}" for how in ways)
        print(f"| {count} | {share:.2f} | {faster} | {per_step} |", flush=True)
    forced = [best["forced", share].milliseconds for share in SHARES]
    print(f"| {count} | | breaks even {break_even(forced, none)}; none takes {none:.2f} ms a token | | | |", flush=True)


def measure(
    config: EngineConfig,
    runner: Runner,
    count: int,
    tokens: int,
    sets: int,
    known: Replies | None = None,
    share: float = 0.0,
    is_forced: bool | None = None,
) -> tuple[Replies, list[Measured]]:
    """Let one engine give the same replies several times; a draft is the token that comes with the chance ``share``.

    Else it is another one. Unless ``is_forced`` is true or false, there are no drafts.
    """
    limits = Limits(runner.max_model_len, runner.model_config.vocab_size, assumed_cost=ASSUMED_COSTS["cpu"])
    loop = EngineLoop(config, runner, runner.num_blocks, limits)
    speculator, dice = loop.scheduler.speculator, random.Random(7)
    assert speculator is not None

    def propose(sequence: Sequence, most: int) -> tuple[int, ...]:
        if is_forced is None or known is None:
            return ()
        made = sequence.num_generated
        right = known[sequence.request.request_id.split(".")[0]][made : made + most]
        return tuple(token if dice.random() < share else token ^ 1 for token in right)

    speculator.draft_source = propose
    speculator.economics.is_forced = bool(is_forced)
    found: list[Measured] = []
    replies: Replies = {}
    for repeat in range(sets):
        for number in range(count):
            sampling = SamplingParams(max_tokens=tokens, seed=number)
            prompt = tuple((number * 31 + i) % 997 for i in range(32))
            loop.handle(Generate(f"{number}.{repeat}", prompt, sampling))
        replies = {f"{number}": [] for number in range(count)}
        seconds, steps = 0.0, 0
        while loop.has_work():
            started = time.process_time()
            events = loop.step()
            if all(replies.values()):  # the prompts are done
                seconds += time.process_time() - started
                steps += 1
            for event in events:
                assert isinstance(event, NewTokens)
                replies[event.request_id.split(".")[0]] += event.token_ids
        assert known is None or replies == known, "a token changed"
        made = (tokens - 1) * count
        found.append(Measured(made / count / steps, seconds / made * 1e3))
    return replies, found


def break_even(forced: list[float], none: float) -> str:
    """Say from which chance on drafts are faster than none, between the rows by a straight line."""
    if forced[0] <= none:
        return "at any chance"
    for low, high, slow, fast in zip(SHARES, SHARES[1:], forced, forced[1:], strict=False):
        if fast <= none < slow:
            return f"at a chance of {low + (high - low) * (slow - none) / (slow - fast):.2f}"
    return "at no chance"


if __name__ == "__main__":
    main()
