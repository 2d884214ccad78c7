# What a step will take, from what is in it: reading the weights or multiplying with them, and reading or multiplying
# with the context. Six numbers for a model on a device; the simulator's clock runs on them. Pure.

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from gpu_backend.step.picture import Picture, tower_tokens
from gpu_backend.step.plan import SequenceStep


@dataclass(frozen=True, slots=True)
class StepWork:
    """How much one step computes. Works of parts of a step add up."""

    tokens: int = 0  # computed
    context: int = 0  # whose keys and values are read, over all sequences
    pairs: int = 0  # of a computed token with a token it attends to
    prompts: int = 0  # of which a part is computed; a step without any is replayed from a graph, where there are graphs
    towers: int = 0  # tokens that would take as long as what towers make of pictures

    def __add__(self, other: StepWork) -> StepWork:
        tokens, context, pairs = self.tokens + other.tokens, self.context + other.context, self.pairs + other.pairs
        return StepWork(tokens, context, pairs, self.prompts + other.prompts, self.towers + other.towers)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Predicts the seconds of a step. All six numbers are seconds."""

    fixed: float  # a step, whatever is in it
    weights: float  # reading all weights once
    token: float  # one token's matrix products; they hide behind the reading of the weights, or it behind them
    context: float  # reading one token's keys and values
    pair: float  # one pair's attention
    launching: float = 0.0  # more for a step with prompts in it: each kernel is launched by itself

    def seconds(self, work: StepWork) -> float:
        """Predict how long a step with this work takes."""
        products = self.token * (work.tokens + work.towers)
        reading = self.weights if self.weights > products else products
        launching = self.launching if work.prompts else 0.0
        return self.fixed + launching + reading + self.context * work.context + self.pair * work.pairs

    def seconds_launched(self, work: StepWork) -> float:
        """Predict how long a step with this work takes beside prompts, which no graph computes."""
        return self.seconds(work + BESIDE_PROMPTS)


BESIDE_PROMPTS = StepWork(prompts=1)  # nothing more to compute


# What a step is taken to take where nothing is known, in units of its least. A GPU waits for the weights up to some 128
# tokens; a CPU is slower with each token from the first on.
ASSUMED_COSTS = {
    "cuda": StepCost(fixed=0.0, weights=1.0, token=1 / 128, context=0.0, pair=0.0),
    "cpu": StepCost(fixed=1.0, weights=0.0, token=1 / 5, context=0.0, pair=0.0),
}


MOST_SECONDS = 3600  # of a cost: gateways read none above


def read_step_cost(path: Path) -> StepCost:
    """Read the numbers from a JSON object; ``launching`` may be left out. Raises ``OSError`` and ``ValueError``."""
    found = json.loads(path.read_text(encoding="utf-8"))
    names = {field.name for field in fields(StepCost)}
    if not isinstance(found, dict) or found.keys() | {"launching"} != names:
        raise ValueError(f"{path} must hold one JSON object with {', '.join(sorted(names))}, all in seconds")
    if not all(isinstance(value, int | float) and 0 <= value <= MOST_SECONDS for value in found.values()):
        raise ValueError(f"{path} holds a cost that is no number from 0 to {MOST_SECONDS}")
    return StepCost(**found)


def chunk_work(start: int, num_tokens: int, pictures: Sequence[Picture] = ()) -> StepWork:
    """Return the work of computing that many tokens of one sequence, with ``pictures``, from position ``start`` on."""
    end = start + num_tokens
    pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
    return StepWork(num_tokens, end, pairs, int(num_tokens > 0), tower_tokens(pictures, start, end) if pictures else 0)


def plan_work(steps: Iterable[SequenceStep]) -> StepWork:
    """Return the work of a step plan's sequences."""
    tokens = context = pairs = prompts = towers = 0
    for step in steps:
        count, start = len(step.token_ids), step.start
        tokens += count
        context += start + count
        pairs += count * start + count * (count + 1) // 2
        prompts += count > 1 and step.num_known > 1
        if step.pictures:
            towers += tower_tokens([part.picture for part in step.pictures], start, start + count)
    return StepWork(tokens, context, pairs, prompts, towers)
