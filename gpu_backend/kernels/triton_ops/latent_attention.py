# Attention over the paged cache of latent vectors in Triton (MLA; DeepSeek-V2, Liu et al. 2024). All heads share one
# key, whose first numbers are the value, too: a tile of it is read once for both, and for all heads and queries of a
# sequence that lie in one block of rows. Contexts are split over programs, and put together, as other attention's.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_backend.kernels.layout.paged import MAX_SPLITS, PagedLayout
from gpu_backend.kernels.layout.scoring import Scoring
from gpu_backend.kernels.triton_ops.paged_attention import (
    LOG2_E,
    PLACES,
    Launch,
    TileShape,
    combine_kernel,
    keys_of_rows,
    run,
    tiles_of_rows,
    tiles_of_split,
)

HEADS_AT_ONCE = 8
LEAST_ROWS = 16  # queries × heads of a sequence that lie in one tile
LEAST_DIM = 16  # numbers that tensor cores multiply at once


def tile_shape(query_rows: int, wide: bool, batch_invariant: bool = False) -> TileShape:
    """Choose it by a sequence's queries × heads; ``wide`` numbers have four bytes.

    Rows of 512 numbers and their sums fill a program's registers: few rows, and small tiles of keys.
    """
    if wide:
        return TileShape(16, 16, 8, 2)
    if query_rows <= LEAST_ROWS and not batch_invariant:
        return TileShape(16, 32, 4, 2)
    return TileShape(64, 32, 8, 2)


def latent_attention(
    query: Tensor,
    turned: Tensor,
    kv_cache: Tensor,
    layout: PagedLayout,
    scoring: Scoring,
    out: Tensor | None = None,
    launch: Launch = run,
) -> Tensor:
    """Let each query look at its own sequence's latent vectors up to its position; (tokens, heads, rank) in and out.

    ``query``, ``turned`` and ``out`` are the rows of this layout alone, the last two contiguous; all else as
    ``ops.latent_attention`` and ``paged_attention`` have it.
    """
    tokens, heads, rank = query.shape
    block_size, sequences, splits = kv_cache.shape[1], len(layout.context_lens), layout.num_splits
    wide = query.dtype == torch.float32
    rows = layout.max_query_len * heads
    shape = tile_shape(rows, wide, layout.split_tokens > 0)
    out = torch.empty((tokens, heads, rank), dtype=query.dtype, device=query.device) if out is None else out
    assert query.stride(2) == 1 and turned.is_contiguous() and out.is_contiguous()
    part, weight = out, out
    if splits > 1:
        part = torch.empty((tokens, heads, splits, rank), dtype=torch.float32, device=query.device)
        weight = torch.empty((tokens, heads, splits), dtype=torch.float32, device=query.device)
    common = {"HEADS": heads, "ROWS": shape.rows, "TILE": shape.tile, "FIXED": layout.split_tokens > 0}
    padded = triton.next_power_of_2(rank)
    launch(
        attend_latent_kernel, (triton.cdiv(rows, shape.rows) * splits, sequences),
        query, turned, kv_cache, layout.block_tables, layout.context_lens, layout.query_starts, part, weight,
        scoring.scale * LOG2_E, splits, layout.split_tokens // shape.tile, query.stride(0), query.stride(1),
        kv_cache.stride(0), kv_cache.stride(1), layout.block_tables.stride(0),
        RANK=rank, RANK_PADDED=max(LEAST_DIM, padded), TURNED=turned.shape[2],
        TURNED_PADDED=max(LEAST_DIM, triton.next_power_of_2(turned.shape[2])),
        BLOCK_SIZE=block_size, SPLIT=splits > 1, PRECISION="tf32x3" if wide else "tf32",
        num_warps=shape.num_warps, num_stages=shape.num_stages, **common,
    )  # fmt: skip
    if splits > 1:
        launch(
            combine_kernel, (layout.max_query_len * heads, sequences),
            part, weight, out, weight, layout.context_lens, layout.query_starts, layout.query_starts, 0, splits,
            layout.split_tokens // shape.tile, MOST_SPLITS=triton.next_power_of_2(max(splits, MAX_SPLITS)),
            KV_HEADS=1, DIM=rank, DIM_PADDED=padded, WINDOWED=False, SINKS=False, AHEAD=False, **common, num_warps=4,
        )  # fmt: skip
    return out


def norm_rope_store_latent(
    query: Tensor,
    latent: Tensor,
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    eps: float,
    interleaved: bool = False,
) -> Tensor:
    """Norm the latent vectors, rotate their key and the ends of queries, write both of the former to their slots, and
    return the latter (tokens, heads, turned).

    As ``reference`` says; a negative slot stores nothing.
    """
    (tokens, heads, dim), half, rank = query.shape, cos.shape[2], len(norm)
    turned = torch.empty((tokens, heads, 2 * half), dtype=query.dtype, device=query.device)
    assert query.stride(2) == latent.stride(1) == 1 and cos.is_contiguous() and sin.is_contiguous()
    norm_rope_store_latent_kernel[(tokens, 1 + triton.cdiv(heads, HEADS_AT_ONCE))](
        query, latent, norm, cos, sin, turned, kv_cache, slots, eps,
        query.stride(0), query.stride(1), latent.stride(0), kv_cache.stride(0), kv_cache.stride(1),
        HEADS=heads, OWN=dim - 2 * half, RANK=rank, RANK_PADDED=triton.next_power_of_2(rank), HALF=half,
        HALF_PADDED=triton.next_power_of_2(half), INTERLEAVED=interleaved, BLOCK_SIZE=kv_cache.shape[1],
        AT_ONCE=HEADS_AT_ONCE, num_warps=4,
    )  # fmt: skip
    return turned


@triton.jit(do_not_specialize=["splits", "split_tiles", "table_stride"], do_not_specialize_on_alignment=PLACES[:3])
def attend_latent_kernel(
    query, turned, kv_cache, block_tables, context_lens, query_starts, part, weight,
    scale, splits, split_tiles, token_stride, head_stride, block_stride, slot_stride, table_stride,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr, TURNED: tl.constexpr,
    TURNED_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, FIXED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of rows of one sequence, against one split of its context."""
    split = tl.program_id(0) % splits
    first_row = tl.program_id(0) // splits * ROWS
    sequence = tl.program_id(1)
    first = tl.load(query_starts + sequence)
    num_rows = (tl.load(query_starts + sequence + 1) - first) * HEADS
    if first_row >= num_rows:
        return
    start = tl.load(context_lens + sequence) - num_rows // HEADS  # position of the sequence's first query
    keys_end = keys_of_rows(first_row, num_rows, start, query_starts, HEADS, ROWS, False)
    begin, end = tiles_of_rows(first_row, keys_end, start, 0, HEADS, TILE, False)
    if SPLIT:
        begin, end = tiles_of_split(split, begin, end, split_tiles, splits, FIXED)
        if begin >= end:
            return

    rows = first_row + tl.arange(0, ROWS)
    dims, ends = tl.arange(0, RANK_PADDED), tl.arange(0, TURNED_PADDED)
    tokens = (first + rows // HEADS).to(tl.int64)
    heads = rows % HEADS
    real = (rows < num_rows)[:, None]
    held = real & (dims < RANK)[None, :]
    q = tl.load(
        query + tokens[:, None] * token_stride + heads[:, None].to(tl.int64) * head_stride + dims[None, :],
        mask=held, other=0.0,
    )  # fmt: skip
    places = tokens * HEADS + heads
    q_turned = tl.load(
        turned + places[:, None] * TURNED + ends[None, :], mask=real & (ends < TURNED)[None, :], other=0.0
    )
    positions = start + rows // HEADS
    table = block_tables + sequence.to(tl.int64) * table_stride
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, RANK_PADDED], tl.float32)
    for tile in range(begin, end):
        position = tile * TILE + tl.arange(0, TILE)
        written = position < keys_end
        block = tl.load(table + position // BLOCK_SIZE, mask=written, other=0)
        key = kv_cache + (block.to(tl.int64) * block_stride + position % BLOCK_SIZE * slot_stride)[:, None]
        latent = tl.load(key + dims[None, :], mask=written[:, None] & (dims < RANK)[None, :], other=0.0)
        shared = tl.load(key + RANK + ends[None, :], mask=written[:, None] & (ends < TURNED)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(q_turned, tl.trans(shared), scores, input_precision=PRECISION) * scale
        scores = tl.where(position[None, :] <= positions[:, None], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        shares = tl.exp2(scores - base[:, None])
        fade = tl.exp2(best - base)
        total = total * fade + tl.sum(shares, 1)
        acc = acc * fade[:, None] + tl.dot(shares.to(q.dtype), latent, input_precision=PRECISION)
        best = new_best

    some = tl.where(total > 0.0, total, 1.0)
    acc = acc / some[:, None]
    if SPLIT:
        places = places * splits + split
    tl.store(part + places[:, None] * RANK + dims[None, :], acc.to(part.dtype.element_ty), mask=held)
    if SPLIT:
        tl.store(weight + places, best + tl.log2(some), mask=rows < num_rows)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def norm_rope_store_latent_kernel(
    query, latent, norm, cos, sin, turned, kv_cache, slots, eps,
    token_stride, head_stride, latent_stride, block_stride, slot_stride,
    HEADS: tl.constexpr, OWN: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr, HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_SIZE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One token: what it keeps, or some heads' queries."""
    token = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, HALF_PADDED)
    at_first, at_second = pairs, pairs + HALF
    if INTERLEAVED:
        at_first, at_second = 2 * pairs, 2 * pairs + 1
    c = tl.load(cos + token * HALF + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + token * HALF + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
    if tl.program_id(1) == 0:
        slot = tl.load(slots + token).to(tl.int64)
        place = kv_cache + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
        source = latent + token * latent_stride
        columns = tl.arange(0, RANK_PADDED)
        value = tl.load(source + columns, mask=columns < RANK, other=0.0)
        wide = value.to(tl.float32)
        scaled = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / RANK + eps)).to(value.dtype).to(tl.float32)
        normed = scaled * tl.load(norm + columns, mask=columns < RANK, other=0.0).to(tl.float32)
        tl.store(place + columns, normed.to(kv_cache.dtype.element_ty), mask=(columns < RANK) & (slot >= 0))
        first = tl.load(source + RANK + at_first, mask=pairs < HALF, other=0.0).to(tl.float32)
        second = tl.load(source + RANK + at_second, mask=pairs < HALF, other=0.0).to(tl.float32)
        kept = (pairs < HALF) & (slot >= 0)
        tl.store(place + RANK + at_first, (first * c - second * s).to(kv_cache.dtype.element_ty), mask=kept)
        tl.store(place + RANK + at_second, (second * c + first * s).to(kv_cache.dtype.element_ty), mask=kept)
    else:
        heads = ((tl.program_id(1) - 1) * AT_ONCE + tl.arange(0, AT_ONCE))[:, None]
        held = (heads < HEADS) & (pairs < HALF)[None, :]
        ends = query + token * token_stride + heads * head_stride + OWN
        one = tl.load(ends + at_first[None, :], mask=held, other=0.0).to(tl.float32)
        other = tl.load(ends + at_second[None, :], mask=held, other=0.0).to(tl.float32)
        target = turned + (token * HEADS + heads) * 2 * HALF
        tl.store(target + at_first[None, :], (one * c - other * s).to(turned.dtype.element_ty), mask=held)
        tl.store(target + at_second[None, :], (other * c + one * s).to(turned.dtype.element_ty), mask=held)
