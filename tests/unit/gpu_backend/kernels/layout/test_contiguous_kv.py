# The copies of decodes' keys and values against attention over their blocks, while sequences come, go, pause and draft.

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from gpu_backend.kernels import reference, reference_attention
from gpu_backend.kernels.layout.contiguous_kv import GROWTH, ContiguousKv
from gpu_backend.kernels.layout.grouping import Grouping
from gpu_backend.kernels.layout.kv_copies import Part
from gpu_backend.kernels.layout.quantized_kv import KvScales
from gpu_backend.step.plan import SequenceStep, StepPlan
from gpu_backend.step.sampling_params import SamplingParams
from gpu_backend.step.step_tensors import StepTensors, build_tensors

CPU = torch.device("cpu")
SIZE = 4
BLOCKS = 2000
SAMPLING = SamplingParams(max_tokens=1000)


class RunningSequences:
    """Sequences with scattered blocks of one cache, and steps over them computed with copies and without."""

    def __init__(self, heads: int, kv_heads: int, scales: KvScales | None = None) -> None:
        self.dice = random.Random(1)
        self.free = self.dice.sample(range(BLOCKS), BLOCKS)
        self.tables: dict[int, list[int]] = {}
        self.lens: dict[int, int] = {}
        self.heads, self.kv_heads, self.scales = heads, kv_heads, scales
        self.cache = torch.zeros(2, BLOCKS + 1, SIZE, 2, kv_heads, 8, dtype=torch.uint8 if scales else torch.float32)
        self.copying = Grouping(SIZE, BLOCKS, 1000, CPU, torch.float32)
        self.generator = torch.Generator().manual_seed(1)

    def come(self, sequence: int, tokens: int) -> None:
        self.tables[sequence], self.lens[sequence] = [], 0
        self.step({sequence: tokens})

    def go(self, sequence: int) -> None:
        self.free += self.tables.pop(sequence)
        del self.lens[sequence]

    def step(self, counts: dict[int, int], kept: dict[int, int] | None = None) -> StepTensors:
        """Compute so many tokens of each, of which ``kept`` says how many stay; both ways must agree."""
        steps = []
        for sequence, count in counts.items():
            start, table = self.lens[sequence], self.tables[sequence]
            while len(table) * SIZE < start + count:
                table.append(self.free.pop())
            covering = tuple(table[: -(-(start + count) // SIZE)])
            steps.append(SequenceStep(sequence, (7,) * count, start, covering, True, SAMPLING, 0, row=sequence))
            self.lens[sequence] += (kept or {}).get(sequence, count)
        plan = StepPlan(0, tuple(steps))
        batch = build_tensors(plan, self.copying, CPU)
        plain = build_tensors(plan, Grouping(SIZE, BLOCKS, 1000, CPU, torch.float32), CPU)
        assert sorted(batch.slots.tolist()) == sorted(plain.slots.tolist())
        by_slot = {slot: row for row, slot in enumerate(plain.slots.tolist())}
        order = torch.tensor([by_slot[slot] for slot in batch.slots.tolist()])
        for layer in self.cache:
            if batch.fresh_blocks is not None:
                layer.index_fill_(0, batch.fresh_blocks, 0)
            count = len(batch.slots)
            qkv = torch.randn(count, self.heads + 2 * self.kv_heads, 8, generator=self.generator)
            cos, sin = torch.ones(count, 1, 4), torch.zeros(count, 1, 4)
            query = reference.norm_rope_store(
                qkv, None, cos, sin, layer, batch.slots, self.heads, 1e-6, kv_scales=self.scales
            )
            got = self.attend(query, layer, batch)
            expected = torch.empty_like(query).index_copy_(0, order, query)
            torch.testing.assert_close(got, self.attend(expected, layer, plain)[order], atol=2e-5, rtol=1e-4)
        return batch

    def attend(self, query: Tensor, layer: Tensor, batch: StepTensors) -> Tensor:
        return reference_attention.paged_attention(query, layer, batch.groups, 0.3, kv_scales=self.scales)


def num_copied(batch: StepTensors) -> int:
    return sum(len(group.owners) for group in batch.groups if isinstance(group, Part))


@pytest.mark.parametrize("heads", [(4, 2), (6, 6)])
def test_copies_give_what_the_blocks_give(heads: tuple[int, int]) -> None:
    """Sequences come and go, prompts run beside them, drafts fail and decodes pause; most decodes use their copies."""
    running = RunningSequences(*heads)
    copied = decodes = 0
    for step in range(160):
        if len(running.lens) < 12 and running.dice.random() < 0.3:
            running.come(1000 + step, running.dice.randint(1, 60))
        counts = {sequence: 1 for sequence in running.lens if running.dice.random() < 0.98}
        kept = dict(counts)
        if counts and running.dice.random() < 0.1:
            drafting = running.dice.choice(list(counts))
            counts[drafting], kept[drafting] = 4, running.dice.randint(0, 4)
        if counts:
            copied += num_copied(running.step(counts, kept))
            decodes += len(counts)
        if running.lens and running.dice.random() < 0.1:
            running.go(running.dice.choice(list(running.lens)))

    assert copied > decodes / 2


def test_a_float8_cache_is_copied_as_numbers() -> None:
    """What the copies hold is what the cache's bytes mean."""
    running = RunningSequences(4, 2, KvScales(torch.tensor([0.01, 0.02]), torch.tensor([0.03, 0.01])))
    running.come(1, 9)

    batches = [running.step({1: 1}) for _ in range(6)]

    assert [num_copied(batch) for batch in batches] == [0, 1, 1, 1, 1, 1]


def test_a_copy_is_made_anew_when_it_is_full() -> None:
    """A long reply outgrows its room again and again, and never loses a token."""
    running = RunningSequences(2, 1)
    running.come(1, 3)

    parts = [part for _ in range(3 * GROWTH) for part in running.step({1: 1}).groups if isinstance(part, Part)]

    assert len(parts) == 3 * GROWTH - 1
    assert [part.width for part in parts[:: GROWTH + 1]] == [3 + 2 + n * (GROWTH + 1) + GROWTH for n in range(3)]


def test_another_sequence_in_the_same_blocks_has_no_copy() -> None:
    """A sequence that gets the blocks of one that left, and goes on where it ended, has its own keys and values."""
    running = RunningSequences(2, 1)
    running.come(1, 5)
    for _ in range(3):
        running.step({1: 1})
    table, length = running.tables[1], running.lens[1]
    running.tables, running.lens = {2: table}, {2: length}
    running.cache.normal_(generator=running.generator)

    assert num_copied(running.step({2: 1})) == 0


def test_no_more_is_copied_than_there_is_room_for() -> None:
    """The copies take a share of the cache at most; a sequence without room is read from its blocks."""
    running = RunningSequences(2, 1)
    running.copying.contiguous_kv = ContiguousKv(200, BLOCKS, SIZE)
    for sequence in range(8):
        running.come(sequence, 30)

    copied = [num_copied(running.step(dict.fromkeys(range(8), 1))) for _ in range(4)]

    assert copied == [0, 2, 2, 2]


def test_copies_of_a_float8_cache_take_no_more_bytes() -> None:
    """A number takes four bytes beside a cache where it takes one, so a fourth as many tokens are copied."""
    half, eighth = (
        Grouping(SIZE, 800, 1000, CPU, torch.float32, cache_dtype=dtype).contiguous_kv for dtype in (None, torch.uint8)
    )

    assert half is not None and eighth is not None
    assert (half.rooms.tokens, eighth.rooms.tokens) == (400 * SIZE, 100 * SIZE)
