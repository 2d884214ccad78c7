# A step plan as device tensors: which tokens at which positions, where their keys and values go, and which rows become
# samples or embeddings. The rows are reordered so that sequences of similar shape are contiguous.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import torch
from torch import Tensor

from gpu_backend.kernels.layout.grouping import AttentionGroup, Grouping, by_shape
from gpu_backend.kernels.layout.paged import PagedLayout, PagedLayouts
from gpu_backend.kernels.layout.recurrence import Recurrence
from gpu_backend.kernels.layout.upload import integers, upload
from gpu_backend.step.plan import UNKNOWN, SequenceStep, StepPlan


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The tensors of one step, its sequences contiguous."""

    steps: tuple[SequenceStep, ...]  # in the order of their rows
    token_ids: Tensor  # (tokens,)
    positions: Tensor  # (tokens,)
    slots: Tensor  # (tokens,): block · block_size + offset
    sampled_to: Tensor  # where in the table of last tokens each sampler's is kept
    groups: tuple[AttentionGroup | PagedLayout, ...] = ()  # layouts on a GPU
    samplers: tuple[SequenceStep, ...] = ()  # sequences that get a next token
    sample_rows: Tensor | None = None  # the rows of each one's last known token and drafts; None: all rows, in order
    fresh_blocks: Tensor | None = None  # partly written in this step, and never before by their owner
    unknown: tuple[Tensor, Tensor] | None = None  # rows whose token is in the table of last tokens, and where
    poolers: tuple[tuple[SequenceStep, slice], ...] = ()  # embeddings, with their rows
    scorers: tuple[tuple[SequenceStep, slice], ...] = ()  # sequences with prompt tokens to score, with these rows
    inputs: Tensor | None = None  # (tokens, hidden) into the first layer; None: what ``token_ids`` stand for
    added: Tensor | None = None  # (layers, tokens, hidden) to what goes out of the first ones
    # (tokens,), or (3, tokens) for time, row and column: what ropes turn by, where that is not ``positions``.
    turned_by: Tensor | None = None
    adapters: Tensor | None = None  # (tokens,) int32: slots of the rows' adapters; None: no row has one
    recurrence: Recurrence | None = (
        None  # where layers of linear attention keep states; None: not said, or there is none
    )


def build_tensors(
    plan: StepPlan,
    grouping: Grouping | PagedLayouts,
    device: torch.device,
    slot_of: Mapping[int, int] | None = None,
) -> StepTensors:
    """Lay a plan out for the device; ``slot_of`` adapters by their numbers, where the model has any."""
    query_lens = [len(step.token_ids) for step in plan.sequences]
    starts = [step.start for step in plan.sequences]
    order = by_shape(query_lens, starts)
    steps = [plan.sequences[i] for i in order]
    query_lens = [query_lens[i] for i in order]
    starts = [starts[i] for i in order]
    tables = [step.block_table for step in steps]
    token_ids = list(chain.from_iterable([step.token_ids for step in steps]))
    positions, slots, fresh = _positions_and_slots(starts, query_lens, tables, grouping.block_size)
    fresh = fresh if isinstance(grouping, Grouping) else []  # kernels read no further than is written
    samplers = [step for step in steps if step.samples]
    columns = token_ids, positions, slots, [step.row for step in samplers], fresh
    on_device = integers(list(chain(*columns)), device).split(list(map(len, columns)))
    placed = list(zip(steps, accumulate(query_lens, initial=0), strict=False))  # with the first row of each
    return StepTensors(
        steps=tuple(steps),
        token_ids=on_device[0],  # those that are unknown are put in their places before any is read
        positions=on_device[1],
        slots=on_device[2],
        groups=grouping.groups(query_lens, on_device[1], tables, _ends(placed, positions, device)),
        fresh_blocks=on_device[4] if fresh else None,
        samplers=tuple(samplers),
        sampled_to=on_device[3],
        unknown=_unknown(placed, device) if UNKNOWN in token_ids else None,
        sample_rows=None if len(samplers) == len(token_ids) else _sample_rows(placed, len(token_ids), device),
        poolers=tuple([(step, slice(row, row + len(step.token_ids))) for step, row in placed if step.pools]),
        scorers=tuple([(step, slice(row, row + len(step.targets))) for step, row in placed if step.targets]),
        turned_by=_turned_by(steps, device) if any(step.moved or step.pictures for step in steps) else None,
        adapters=None if slot_of is None else adapters_of(steps, query_lens, slot_of, device),
    )


def _ends(placed: list[tuple[SequenceStep, int]], positions: list[int], device: torch.device) -> Tensor | None:
    """Return before which position the keys end that each query sees, where pictures let some look ahead."""
    parts = [(part, row) for step, row in placed for part in step.pictures if part.picture.both_ways]
    if not parts:
        return None
    ends = [position + 1 for position in positions]
    for part, row in parts:
        for place in part.rows:
            ends[row + place] = part.picture.end
    return upload(ends, device, torch.int32)


def _turned_by(steps: Sequence[SequenceStep], device: torch.device) -> Tensor | None:
    """Return time, row and column of each token: all alike, but within pictures that have columns."""
    if not any(step.moved or (step.pictures[:1] and step.pictures[0].picture.columns) for step in steps):
        return None
    axes: tuple[list[int], ...] = ([], [], [])
    for step in steps:
        place, moved, last = step.start, step.moved, step.start + len(step.token_ids)
        for part in step.pictures:
            first, picture = step.start + part.rows[0], part.picture
            base = picture.start - picture.moved
            inside = [divmod(part.first + i, picture.columns) for i in range(len(part.rows))]
            for axis, own in zip(axes, ([0] * len(inside), *zip(*inside, strict=True)), strict=True):
                axis += [*range(place - moved, first - moved), *(base + number for number in own)]
            place, moved = first + len(inside), picture.moves
        for axis in axes:
            axis += range(place - moved, last - moved)
    return upload(axes, device, torch.long)


def adapters_of(
    steps: Sequence[SequenceStep], counts: Sequence[int], slot_of: Mapping[int, int], device: torch.device
) -> Tensor | None:
    """Return the slot of each row's adapter, ``counts`` rows of each sequence; None where none has one."""
    if not any(step.adapter for step in steps):
        return None
    slots = chain.from_iterable([(slot_of[step.adapter],) * count for step, count in zip(steps, counts, strict=True)])
    return upload(list(slots), device, torch.int32)


def _unknown(placed: list[tuple[SequenceStep, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    rows, origins = zip(*[(row, step.row) for step, row in placed if step.token_ids[0] == UNKNOWN], strict=True)
    return integers(rows, device), integers(origins, device)


def _sample_rows(placed: list[tuple[SequenceStep, int]], num_rows: int, device: torch.device) -> Tensor | None:
    ends = [(step, row + len(step.token_ids)) for step, row in placed if step.samples]
    rows = list(chain.from_iterable([range(end - 1 - step.num_draft_tokens, end) for step, end in ends]))
    return None if len(rows) == num_rows else integers(rows, device)


def token_by_token(tensors: StepTensors) -> Iterator[StepTensors]:
    """Yield the tensors of each row alone, where groups are of one query each."""
    for group in tensors.groups:
        rows = group.rows
        yield replace(
            tensors,
            token_ids=tensors.token_ids[rows],
            positions=tensors.positions[rows],
            turned_by=None if tensors.turned_by is None else tensors.turned_by[..., rows],
            slots=tensors.slots[rows],
            inputs=None if tensors.inputs is None else tensors.inputs[rows],
            added=None if tensors.added is None else tensors.added[:, rows],
            adapters=None if tensors.adapters is None else tensors.adapters[rows],
            groups=(replace(group, rows=slice(0, 1)),),
        )


def _positions_and_slots(
    starts: list[int], query_lens: list[int], tables: list[tuple[int, ...]], size: int
) -> tuple[list[int], list[int], list[int]]:
    """Return each token's position and slot, and the blocks that are first written here, but not filled.

    The tail of such a block holds another's leftovers.
    """
    if sum(query_lens) == len(starts):  # as in most steps: a token each, in the last block of the table
        slots = [table[-1] * size + start % size for start, table in zip(starts, tables, strict=True)]
        return starts, slots, [slot // size for slot in slots if slot % size == 0] if size > 1 else []
    positions: list[int] = []
    slots = []
    fresh: list[int] = []
    for start, count, table in zip(starts, query_lens, tables, strict=True):
        end = start + count
        positions += range(start, end)
        for index in range(start // size, -(-end // size)):
            base = (table[index] - index) * size
            slots += range(base + max(start, index * size), base + min(end, (index + 1) * size))
        if end % size and end // size * size >= start:
            fresh.append(table[-1])
    return positions, slots, fresh
