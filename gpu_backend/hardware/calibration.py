# The numbers of a step's cost, measured on the spot: steps of no request, few tokens and many, short contexts and long
# ones, decodes from their graphs, and the cost that predicts them best. An engine does so at the start.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import torch

from gpu_backend.step.cost import StepCost, StepWork, plan_work
from gpu_backend.step.plan import SequenceStep, StepPlan, StepResult
from gpu_backend.step.sampling_params import SamplingParams

DECODES = (1, 2, 8, 32)  # at once
CHUNKS = (16, 64, 256, 1024)  # tokens of a prompt
LONG_CONTEXT = 4096
REPEATS = 3  # the quickest counts, after one that does not
MOST_SECONDS = 2.0  # of steps, after which no larger one is tried
LONG_STEP = 0.25  # seconds, of which what else a machine does is a small part: measured once
KNEES = tuple(2 ** (quarter / 4) for quarter in range(45))  # tokens whose products take as long as reading the weights

Point = tuple[StepWork, float]  # what a step computed, and its seconds


def measure_step_cost(
    run: Callable[[StepPlan], StepResult], num_blocks: int, block_size: int, max_num_seqs: int, max_tokens: int
) -> StepCost:
    """Compute steps of no request and return what steps cost; ``max_tokens`` is the most that a step computes.

    What they leave in the KV cache belongs to no sequence: blocks are only read up to what their sequence has written.
    """
    points: list[Point] = []
    spent = 0.0
    for plan in _plans(num_blocks, block_size, max_num_seqs, max_tokens):
        first = run(plan).seconds
        measured = [run(plan).seconds for _ in range(REPEATS if first < LONG_STEP else 1)]
        points.append((plan_work(plan.sequences), min(measured)))
        spent += first + sum(measured)
        if spent > MOST_SECONDS:
            break
    return fit_step_cost(points)


def fit_step_cost(points: Sequence[Point]) -> StepCost:
    """Return the cost, no part of it below 0, that predicts these steps with the smallest relative errors."""
    weight = torch.tensor([1 / seconds for _, seconds in points], dtype=torch.float64)
    best = (float("inf"), StepCost(0.0, 0.0, 0.0, 0.0, 0.0))
    for knee in KNEES:
        rows = [
            (1.0, max(1.0, work.tokens / knee), float(work.context), float(work.pairs), float(work.prompts > 0))
            for work, _ in points
        ]
        columns = torch.tensor(rows, dtype=torch.float64) * weight[:, None]
        for count in range(1, 6):
            for chosen in combinations(range(5), count):
                part = columns[:, list(chosen)]
                found = torch.linalg.lstsq(part, torch.ones(len(points), 1, dtype=torch.float64)).solution[:, 0]
                error = float((part @ found - 1).square().sum())
                if bool((found >= 0).all()) and error < best[0] * 0.999:
                    fixed, reading, context, pair, launching = (
                        float(found[chosen.index(place)]) if place in chosen else 0.0 for place in range(5)
                    )
                    best = error, StepCost(fixed, reading, reading / knee, context, pair, launching)
    return best[1]


def _plans(num_blocks: int, block_size: int, max_num_seqs: int, max_tokens: int) -> Iterator[StepPlan]:
    """Yield steps, small ones first."""
    room = num_blocks * block_size
    longest = min(LONG_CONTEXT, room)
    sampling = SamplingParams(max_tokens=1)

    def plan(count: int, num_tokens: int, start: int) -> StepPlan:
        table = tuple(range(-(-(start + num_tokens) // block_size)))
        step = (0,) * num_tokens, start, table, True, sampling, 0
        return StepPlan(0, tuple(SequenceStep(row, *step, row=row) for row in range(count)), is_rehearsal=True)

    for count in DECODES:
        if count <= min(max_num_seqs, max_tokens):
            yield plan(count, 1, min(block_size, room - 1))
    yield plan(1, 1, longest - 1)
    for count in DECODES[2:]:
        if count <= min(max_num_seqs, max_tokens):
            yield plan(count, 1, longest // 2)
    for num_tokens in CHUNKS:
        if num_tokens <= min(max_tokens, longest):
            yield plan(1, num_tokens, 0)
            yield plan(1, num_tokens, longest - num_tokens)
