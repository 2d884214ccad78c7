# What structured output costs a step of the engine: the demo model on the CPU, replies that follow a schema against
# replies that are as free, in turns in one run.
#
#   python -m benchmarks.structured [--sequences 16] [--rounds 4]

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import count
from pathlib import Path

import torch

import gpu_backend.demo_model
from gpu_backend.config import EngineConfig
from gpu_backend.engine import adjustments
from gpu_backend.engine.grammar import GrammarCompiler
from gpu_backend.engine.grammar_queue import GrammarQueue
from gpu_backend.engine.loop import EngineLoop
from gpu_backend.engine.messages import Generate
from gpu_backend.engine.requests import Limits
from gpu_backend.engine.runner import Runner
from gpu_backend.engine.sequence import Grammar, GrammarKind, SamplingParams
from gpu_backend.models.config import load_model_config

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
    free, bound, masks = [], [], []
    for _ in range(options.rounds + 1):
        free.append(run(loop, options.sequences, None))
        before = sum(in_masks)
        bound.append(run(loop, options.sequences, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))))
        masks.append((sum(in_masks) - before) / TOKENS)
    # The first of each warms up.
    step, structured, mask = (statistics.median(times[1:]) * 1e3 for times in (free, bound, masks))
    print(f"{options.sequences} sequences, ms of CPU a step: free {step:.2f}, structured {structured:.2f},")
    print(f"masks {mask:.3f} ({mask / structured:.1%}; {mask / options.sequences * 1e3:.0f} µs a row)")


def build_loop() -> EngineLoop:
    """Return an engine loop over the demo model."""
    folder = Path(gpu_backend.demo_model.__file__).parent / "checkpoint"
    torch.set_num_threads(1)
    config, model = EngineConfig(model=str(folder), device="cpu"), load_model_config(folder)
    runner = Runner(config, model)
    compiler = GrammarCompiler(folder, model.vocab_size, model.eos_token_ids)
    limits = Limits(runner.max_model_len, model.vocab_size, model.eos_token_ids)
    return EngineLoop(config, runner, runner.num_blocks, limits, grammars=GrammarQueue(compiler))


def watch_masks() -> list[float]:
    """Return the list to which the seconds of CPU of each step's masks will be added."""
    taken: list[float] = []
    apply = adjustments.apply_constraints

    def timed(*args: object) -> None:
        started = time.process_time()
        apply(*args)  # type: ignore[arg-type]
        taken.append(time.process_time() - started)

    adjustments.apply_constraints = timed  # type: ignore[assignment]
    return taken


def run(loop: EngineLoop, sequences: int, grammar: Grammar | None) -> float:
    """Generate once; return the seconds of CPU a step."""
    sampling = SamplingParams(max_tokens=TOKENS, temperature=1.0, ignore_eos=True, grammar=grammar)
    for i in range(sequences):
        loop.handle(Generate(f"{next(NUMBERS)}", tuple(range(10, 42 + i)), sampling))
    while loop.scheduler.num_running < sequences:
        loop.step()
    started, steps = time.process_time(), 0
    while loop.scheduler.num_running == sequences:
        loop.step()
        steps += 1
    seconds = (time.process_time() - started) / steps
    while loop.has_work():
        loop.step()
    return seconds


if __name__ == "__main__":
    main()
