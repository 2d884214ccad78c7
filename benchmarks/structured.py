# What structured output costs a step of the engine: the demo model on one thread of the CPU, replies that follow a
# schema against replies that are as free, in turns in one run. Masks are made on another core while the model
# computes; what they cost a step is beginning with them, waiting for them, and putting them on.
#
#   python -m benchmarks.structured [--sequences 16] [--rounds 4]

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch

import gpu_backend.demo_model
from gpu_backend.engine.loop import EngineLoop
from gpu_backend.execution import runner as engine_runner
from gpu_backend.execution.runner import Runner
from gpu_backend.models.config.model import load_model_config
from gpu_backend.sampling import adjustments
from gpu_backend.scheduling.grammar_queue import GrammarQueue
from gpu_backend.step.config import engine_config
from gpu_backend.step.grammar import GrammarCompiler
from gpu_backend.step.limits import Limits
from gpu_backend.step.messages import Generate
from gpu_backend.step.sampling_params import Grammar, GrammarKind, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 20},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 200},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TOKENS = 64
NUMBERS = count()


def main() -> None:
    """Print medians over the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    loop = build_loop()
    in_masks = watch_masks()
    free: list[float] = []
    bound: list[float] = []
    masks: list[float] = []
    for number in range(options.rounds + 1):
        plain = run(loop, options.sequences, None)
        in_masks.clear()
        structured = run(loop, options.sequences, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)))
        if number:  # the first of each warms up
            free += plain
            bound += structured
            masks += in_masks[-len(structured) :]
    step, structured_step, mask = (statistics.median(times) * 1e3 for times in (free, bound, masks))
    print(f"{options.sequences} sequences, ms a step: free {step:.2f}, structured {structured_step:.2f},")
    print(f"of these in masks {mask:.3f} ({mask / structured_step:.1%}; medians of {len(bound)} steps)")


def build_loop() -> EngineLoop:
    """Return an engine loop over the demo model."""
    folder = Path(gpu_backend.demo_model.__file__).parent / "checkpoint"
    torch.set_num_threads(1)
    config, model = engine_config(model=str(folder), device="cpu"), load_model_config(folder)
    runner = Runner(config, model)
    compiler = GrammarCompiler(folder, model.vocab_size, model.eos_token_ids)
    limits = Limits(runner.max_model_len, model.vocab_size, model.eos_token_ids)
    return EngineLoop(config, runner, runner.num_blocks, limits, grammars=GrammarQueue(compiler))


def watch_masks() -> list[float]:
    """Return the list to which the seconds that each step spends with masks will be added."""
    taken: list[float] = []
    begin, constrain = engine_runner.begin_masks, adjustments._constrain

    def timed_begin(*args: Any) -> Any:
        started = time.perf_counter()
        begun = begin(*args)
        taken.append(time.perf_counter() - started)
        return begun

    def timed_constrain(*args: Any) -> None:
        started = time.perf_counter()
        constrain(*args)
        taken[-1] += time.perf_counter() - started

    engine_runner.begin_masks, adjustments._constrain = timed_begin, timed_constrain  # type: ignore[assignment]
    return taken


def run(loop: EngineLoop, sequences: int, grammar: Grammar | None) -> list[float]:
    """Generate once; return the seconds of each step with all replies in it."""
    sampling = SamplingParams(max_tokens=TOKENS, temperature=1.0, ignore_eos=True, grammar=grammar)
    for i in range(sequences):
        loop.handle(Generate(f"{next(NUMBERS)}", tuple(range(10, 42 + i)), sampling))
    while len(loop.scheduler.running) < sequences:
        loop.step()
    seconds = []
    while len(loop.scheduler.running) == sequences:
        started = time.perf_counter()
        loop.step()
        seconds.append(time.perf_counter() - started)
    while loop.has_work():
        loop.step()
    return seconds


if __name__ == "__main__":
    main()
