# A step plan as device tensors: which tokens at which positions, where their keys and values go, and which rows become
# samples or embeddings. The rows are reordered so that sequences of similar shape lie side by side.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from operator import add

import torch
from torch import Tensor

from gpu_backend.engine.plan import UNKNOWN, SequenceStep, StepPlan
from gpu_backend.kernels.grouping import AttentionGroup, Grouping, by_shape, integers
from gpu_backend.kernels.layout import PagedLayout, PagedLayouts


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of one step, its sequences side by side."""

    steps: tuple[SequenceStep, ...]  # in the order of their rows
    token_ids: Tensor  # (tokens,)
    positions: Tensor  # (tokens,)
    slots: Tensor  # (tokens,): block · block_size + offset
    groups: tuple[AttentionGroup | PagedLayout, ...]  # groups on the CPU, layouts on a GPU
    fresh_blocks: Tensor | None  # partly written in this step, and never before by their owner
    samplers: tuple[SequenceStep, ...]  # sequences that get a next token
    sample_rows: Tensor | None  # the rows of each one's last known token and guesses; None: all rows, in order
    sampled_to: Tensor  # where in the table of last tokens each one's is kept
    unknown: tuple[Tensor, Tensor] | None  # rows whose token is in that table, and where
    poolers: tuple[tuple[SequenceStep, slice], ...]  # embeddings, with their rows
    scorers: tuple[tuple[SequenceStep, slice], ...]  # sequences with prompt tokens to score, with these rows


def build_batch(plan: StepPlan, grouping: Grouping | PagedLayouts, device: torch.device) -> Batch:
    """Lay a plan out for the device."""
    query_lens = [len(step.token_ids) for step in plan.sequences]
    order = by_shape(query_lens, [step.start + count for step, count in zip(plan.sequences, query_lens, strict=True)])
    steps = [plan.sequences[i] for i in order]
    query_lens = [query_lens[i] for i in order]
    size = grouping.block_size
    token_ids = list(chain.from_iterable([step.token_ids for step in steps]))
    starts = [step.start for step in steps]
    positions = integers(list(chain.from_iterable(map(range, starts, map(add, starts, query_lens)))), device)
    reads_whole_blocks = isinstance(grouping, Grouping)  # kernels read no further than is written
    fresh = [step.block_table[-1] for step in steps if reads_whole_blocks and _ends_in_fresh_block(step, size)]
    samplers = [step for step in steps if step.samples]
    placed = list(zip(steps, accumulate(query_lens, initial=0), strict=False))  # with the first row of each
    return Batch(
        steps=tuple(steps),
        token_ids=integers(token_ids, device),  # those that are unknown are put in their places before any is read
        positions=positions,
        slots=integers(list(chain.from_iterable([_slots(step, size) for step in steps])), device),
        groups=grouping.groups(query_lens, positions, [step.block_table for step in steps]),
        fresh_blocks=integers(fresh, device) if fresh else None,
        samplers=tuple(samplers),
        sampled_to=integers([step.row for step in samplers], device),
        unknown=_unknown(placed, device) if UNKNOWN in token_ids else None,
        sample_rows=None if len(samplers) == len(token_ids) else _sample_rows(placed, len(token_ids), device),
        poolers=tuple([(step, slice(row, row + len(step.token_ids))) for step, row in placed if step.pools]),
        scorers=tuple([(step, slice(row, row + len(step.targets))) for step, row in placed if step.targets]),
    )


def _unknown(placed: list[tuple[SequenceStep, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    rows, origins = zip(*[(row, step.row) for step, row in placed if step.token_ids[0] == UNKNOWN], strict=True)
    return integers(rows, device), integers(origins, device)


def _sample_rows(placed: list[tuple[SequenceStep, int]], num_rows: int, device: torch.device) -> Tensor | None:
    ends = [(step, row + len(step.token_ids)) for step, row in placed if step.samples]
    rows = list(chain.from_iterable([range(end - 1 - step.num_proposed, end) for step, end in ends]))
    return None if len(rows) == num_rows else integers(rows, device)


def token_by_token(batch: Batch) -> Iterator[Batch]:
    """Yield each row as a batch of its own, where the batch's groups are of one query each."""
    for group in batch.groups:
        rows = group.rows
        yield replace(
            batch,
            token_ids=batch.token_ids[rows],
            positions=batch.positions[rows],
            slots=batch.slots[rows],
            groups=(replace(group, rows=slice(0, 1)),),
        )


def _slots(step: SequenceStep, block_size: int) -> Sequence[int]:
    """Return where each token's key and value go, block by block."""
    start, end = step.start, step.start + len(step.token_ids)
    if end - start == 1:
        return (step.block_table[start // block_size] * block_size + start % block_size,)
    slots: list[int] = []
    for index in range(start // block_size, -(-end // block_size)):
        base = (step.block_table[index] - index) * block_size
        slots += range(base + max(start, index * block_size), base + min(end, (index + 1) * block_size))
    return slots


def _ends_in_fresh_block(step: SequenceStep, block_size: int) -> bool:
    """Whether the last block is first written in this step, but not filled: its tail holds another's leftovers."""
    end = step.start + len(step.token_ids)
    return end % block_size != 0 and end // block_size * block_size >= step.start
