# The plain-torch kernels against the definitions they implement, over awkward shapes.

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpu_backend.kernels import reference, reference_attention
from gpu_backend.kernels.layout.grouping import Grouping
from gpu_backend.kernels.layout.paged import PagedLayout
from gpu_backend.kernels.layout.scoring import Scoring

CPU = torch.device("cpu")


def attention_by_definition(query: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    """One sequence: queries (n, heads, dim) from position ``start`` on, all keys (length, kv_heads, dim)."""
    groups = query.shape[1] // keys.shape[1]
    visible = torch.arange(len(keys)) <= start + torch.arange(len(query))[:, None]
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1),
        keys.transpose(0, 1).repeat_interleave(groups, 0),
        values.transpose(0, 1).repeat_interleave(groups, 0),
        attn_mask=visible,
        scale=scale,
    )
    return out.transpose(0, 1)


shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=9)


@settings(max_examples=80, deadline=None)
@given(shapes, st.sampled_from([1, 4, 16]), st.sampled_from([(4, 4, 8), (4, 2, 16), (6, 1, 8), (1, 1, 24)]))
def test_paged_attention_equals_attention_over_the_sequence(
    lens: list[tuple[int, int]], block_size: int, heads: tuple[int, int, int]
) -> None:
    """For any mix of decodes and chunks, block sizes and head counts, with blocks scattered and leftovers around."""
    num_heads, kv_heads, dim = heads
    generator = torch.Generator().manual_seed(len(lens))
    lens = sorted(lens)
    num_blocks = sum(-(-(n + past) // block_size) for n, past in lens)
    pool = list(range(num_blocks))
    random.Random(1).shuffle(pool)
    cache = torch.zeros(num_blocks + 1, block_size, 2, kv_heads, dim)
    queries, tables, expected = [], [], []
    for n, past in lens:
        table = [pool.pop() for _ in range(-(-(n + past) // block_size))]
        keys, values = torch.randn(2, n + past, kv_heads, dim, generator=generator)
        slots = torch.tensor([table[i // block_size] * block_size + i % block_size for i in range(n + past)])
        reference.store_kv(keys, values, cache, slots)
        query = torch.randn(n, num_heads, dim, generator=generator)
        queries.append(query)
        tables.append(table)
        expected.append(attention_by_definition(query, keys, values, past, 0.3))

    positions = torch.tensor([past + i for n, past in lens for i in range(n)])
    grouping = Grouping(block_size, num_blocks, 64, CPU, torch.float32)
    groups = grouping.groups([n for n, _ in lens], positions, tables)
    out = reference_attention.paged_attention(torch.cat(queries), cache, groups, Scoring(0.3))

    torch.testing.assert_close(out, torch.cat(expected), atol=2e-5, rtol=1e-4)


def test_decodes_of_similar_length_share_a_call() -> None:
    """Sequences are grouped so that padding stays small: few calls, little waste."""
    contexts = sorted([100 + i for i in range(30)] + [5000])
    tables = [[0] * -(-context // 16) for context in contexts]

    groups = Grouping(16, 999, 5000, CPU, torch.float32).groups([1] * 31, torch.tensor(contexts) - 1, tables)

    assert [group.num_sequences for group in groups] == [30, 1]


def test_store_kv_writes_its_slots_and_no_others() -> None:
    """Keys and values land where the slots say."""
    cache = torch.zeros(3, 4, 2, 2, 5)
    key, value = torch.randn(2, 3, 2, 5)

    reference.store_kv(key, value, cache, torch.tensor([11, 0, 5]))

    assert torch.equal(cache[2, 3, 0], key[0]) and torch.equal(cache[2, 3, 1], value[0])
    assert torch.equal(cache[0, 0, 0], key[1]) and torch.equal(cache[1, 1, 1], value[2])
    assert cache.count_nonzero() == key.numel() + value.numel()


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Any leading shape, in float32 and bfloat16."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype)
    weight = torch.randn(shape[-1], generator=generator).to(dtype)

    out = reference.rms_norm(x, weight, 1e-5)

    expected = F.rms_norm(x.float(), shape[-1:], weight.float(), 1e-5)
    torch.testing.assert_close(out.float(), expected, atol=1e-5 if dtype == torch.float32 else 3e-2, rtol=2e-2)
    assert out.dtype == dtype


def test_rope_turns_each_pair_by_its_angle() -> None:
    """As a complex product: pair (i, i + dim / 2) of a head is one complex number."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 8, generator=generator)
    angles = torch.randn(5, 1, 4, generator=generator)

    out = reference.apply_rope(x, angles.cos(), angles.sin())

    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(out, torch.cat([turned.real, turned.imag], -1))


def test_silu_and_mul_leaves_its_input_alone() -> None:
    """silu(gate) times up, and nothing is written in place that the caller still owns."""
    gate_up = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    before = gate_up.clone()

    out = reference.silu_and_mul(gate_up)

    torch.testing.assert_close(out, before[:, :5] * torch.sigmoid(before[:, :5]) * before[:, 5:])
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("window", [0, 7, -7])
def test_layout_of_decodes_equals_groups(window: int) -> None:
    """Plain torch takes the kernels' layout of decodes, too, whatever its tables are padded with."""
    torch.manual_seed(1)
    contexts, spare = [5, 16, 33], 9
    tables = [[3], [5], [1, 7, 2]]
    cache = torch.randn(11, 16, 2, 2, 8)
    cache[10], cache[spare] = 0, torch.nan
    query, positions = torch.randn(3, 4, 8), torch.tensor(contexts) - 1
    groups = Grouping(16, 10, 64, CPU, torch.float32, window=window).groups([1] * 3, positions, tables)
    padded = torch.tensor([table + [spare] * (4 - len(table)) for table in tables], dtype=torch.int32)
    layout = PagedLayout(slice(0, 3), padded, positions.int() + 1, torch.arange(4, dtype=torch.int32), 1, 1)

    expected = reference_attention.paged_attention(query, cache, groups, Scoring(0.3, window))
    out = reference_attention.paged_attention(query, cache, [layout], Scoring(0.3, window))

    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
