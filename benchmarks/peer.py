# The engine beside transformers on the same random tiny Llama, on one thread of the CPU, in float32, in turns in one
# process: against its continuous batching (what `generate_batch` runs) with the best settings found, and against its
# static `generate`.
#
#   python -m benchmarks.peer [--shape tiny] [--requests 128] [--rounds 3]     prints a table; needs the extra `dev`

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils import logging

from gpu_backend.engine.loop import EngineLoop
from gpu_backend.execution.runner import Runner
from gpu_backend.models.config.model import load_model_config
from gpu_backend.step.config import engine_config
from gpu_backend.step.limits import Limits
from gpu_backend.step.messages import Generate, NewTokens
from gpu_backend.step.sampling_params import SamplingParams

# vocabulary, hidden, inner, layers, heads, key heads
SHAPES = {"tiny": (1024, 64, 172, 2, 4, 2), "small": (4096, 256, 688, 4, 8, 4)}
LENGTH = 96  # tokens of prompts and of replies where all are equal, else their mean
CONTEXT = 1024
PAGE = 32


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and how many tokens it gets."""

    prompt: list[int]
    output: int


Replies = list[list[int]]
Way = Callable[[Sequence[Request]], Replies]


def main() -> None:
    """Print the medians of CPU seconds as output tokens a second, and how often Tollgate's fits into theirs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        theirs = make_model(Path(folder), SHAPES[options.shape])
        loop = build_loop(Path(folder), options.requests)
    print("| load | way | tokens/s | ours over it, median and range |\n| --- | --- | --- | --- |")
    for name, load in loads(options.requests, SHAPES[options.shape][0]).items():
        ways = {"ours": partial(ours, loop)} | tune_continuous(theirs, load) | tune_static(theirs, load)
        seconds, agreed = measure(ways, load, options.rounds)
        report(f"{name} ({agreed} of {len(load)} alike)", load, seconds)


def loads(count: int, vocab: int) -> dict[str, list[Request]]:
    """Draw requests of equal lengths, and of lengths that differ with the same mean."""
    dice = random.Random(0)

    def request(prompt: int, output: int) -> Request:
        return Request([dice.randrange(vocab) for _ in range(prompt)], output)

    least, most = LENGTH // 6, 2 * LENGTH - LENGTH // 6
    mixed = [request(dice.randint(least, most), dice.randint(least, most)) for _ in range(count)]
    return {"equal lengths": [request(LENGTH, LENGTH) for _ in range(count)], "mixed lengths": mixed}


def make_model(folder: Path, shape: tuple[int, ...]) -> Any:
    """Write a random Llama as a checkpoint, and return it as transformers runs it."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads")  # fmt: skip
    config = LlamaConfig(
        **dict(zip(names, shape, strict=True)),
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        eos_token_id=None,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()
    model.save_pretrained(folder)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
    return model


def build_loop(folder: Path, count: int) -> EngineLoop:
    """Build our engine over that checkpoint, with room for all requests at once."""
    settings = engine_config(
        str(folder), device="cpu", max_num_seqs=count, max_model_len=CONTEXT, cpu_kv_bytes=2**30, prefix_caching=False
    )
    runner = Runner(settings, model := load_model_config(folder))
    return EngineLoop(settings, runner, runner.num_blocks, Limits(runner.max_model_len, model.vocab_size))


ROUNDS = count()


def ours(loop: EngineLoop, load: Sequence[Request]) -> Replies:
    """Answer all requests with our engine, under new ids: a request finds the blocks of one with its id and prompt."""
    round_ = next(ROUNDS)
    for i, request in enumerate(load):
        sampling = SamplingParams(request.output, temperature=0.0, ignore_eos=True)
        loop.handle(Generate(f"{round_} {i}", tuple(request.prompt), sampling))
    replies: Replies = [[] for _ in load]
    while loop.has_work():
        for event in loop.step():
            assert isinstance(event, NewTokens)
            assert not event.cached_tokens, "our engine is to compute every prompt, as the others do"
            replies[int(event.request_id.split()[1])] += event.token_ids
    return replies


def static(model: Any, size: int, load: Sequence[Request]) -> Replies:
    """Answer in batches of ``size``, padded to the longest prompt, each run until its longest reply is done."""
    replies: Replies = []
    for first in range(0, len(load), size):
        batch = load[first : first + size]
        width = max(len(request.prompt) for request in batch)
        ids = torch.tensor([[0] * (width - len(r.prompt)) + r.prompt for r in batch])
        mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in batch])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=max(r.output for r in batch))
        replies += [out[i, width : width + r.output].tolist() for i, r in enumerate(batch)]
    return replies


def continuous(manager: Any, load: Sequence[Request]) -> Replies:
    """Answer with transformers' continuous batching, which is warm and set up."""
    ids = [manager.add_request(request.prompt, max_new_tokens=request.output) for request in load]
    replies: dict[str, list[int]] = {}
    while len(replies) < len(load):
        if (result := manager.get_result(timeout=1)) is not None and result.is_finished():
            assert result.error is None, result.error
            replies[result.request_id] = result.generated_tokens
    return [replies[id_] for id_ in ids]


def tune_static(model: Any, load: Sequence[Request]) -> dict[str, Way]:
    """Return the fastest way to cut the load into static batches."""
    sizes = (len(load) // 4, len(load) // 2, len(load))
    ways: dict[str, Way] = {f"generate, batches of {size}": partial(static, model, size) for size in sizes}
    return fastest(ways, load)


def tune_continuous(model: Any, load: Sequence[Request]) -> dict[str, Way]:
    """Return the fastest of several settings of continuous batching."""
    blocks = sum(-(-(len(r.prompt) + r.output) // PAGE) + 1 for r in load)
    ways: dict[str, Way] = {}
    for requests, tokens in product((16, 32, 64), (128, 256)):
        settings = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=blocks,
            max_batch_tokens=tokens,
            max_requests_per_batch=requests,
            allow_block_sharing=False,
            use_async_batching=False,
        )

        def way(load: Sequence[Request], settings: ContinuousBatchingConfig = settings) -> Replies:
            before = time.process_time()
            with model.continuous_batching_context_manager(continuous_batching_config=settings) as manager:
                SET_UP.append(time.process_time() - before)
                replies = continuous(manager, load)
                before = time.process_time()
            SET_UP.append(time.process_time() - before)
            return replies

        ways[f"generate_batch, {requests} requests, {tokens} tokens"] = way
    return fastest(ways, load)


SET_UP: list[float] = []  # CPU seconds of a run that were not spent on its requests


def fastest(ways: dict[str, Way], load: Sequence[Request]) -> dict[str, Way]:
    """Return the way that takes the least CPU time."""
    name = min(ways, key=lambda name: timed(ways[name], load)[0])
    return {name: ways[name]}


def timed(way: Way, load: Sequence[Request]) -> tuple[float, Replies]:
    """Return the CPU seconds, setting up left out, and the replies."""
    SET_UP.clear()
    before = time.process_time()
    replies = way(load)
    return time.process_time() - before - sum(SET_UP), replies


def measure(ways: dict[str, Way], load: Sequence[Request], rounds: int) -> tuple[dict[str, list[float]], int]:
    """Return the CPU seconds of each round, and how many replies all ways agreed on.

    In each round another way goes first. Random weights have ties that rounding decides, so a reply may differ in the
    end; more than a few is an error.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for _ in range(rounds):
        answers = []
        order.append(order.pop(0))
        for name in order:
            taken, replies = timed(ways[name], load)
            assert [len(reply) for reply in replies] == [request.output for request in load], f"{name} cut a reply"
            seconds[name].append(taken)
            answers.append(replies)
    agreed = sum(len({tuple(reply) for reply in replies}) == 1 for replies in zip(*answers, strict=True))
    assert agreed >= 0.9 * len(load), f"only {agreed} of {len(load)} replies are the same"
    return seconds, agreed


def report(name: str, load: Sequence[Request], seconds: dict[str, list[float]]) -> None:
    """Print a load's rows."""
    total = sum(request.output for request in load)
    for way, taken in seconds.items():
        ratios = [theirs / own for theirs, own in zip(taken, seconds["ours"], strict=True)]
        over = "" if way == "ours" else f"{statistics.median(ratios):.2f} ({spread(ratios)})"
        print(f"| {name} | {way} | {total / statistics.median(taken):,.0f} | {over} |", flush=True)


def spread(values: Iterable[float]) -> str:
    """Return the least and the greatest of some values."""
    ordered = sorted(values)
    return f"{ordered[0]:.2f} to {ordered[-1]:.2f}"


if __name__ == "__main__":
    main()
