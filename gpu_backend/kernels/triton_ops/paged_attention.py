# Attention over the paged KV cache in Triton: one kernel for decodes, drafts to verify and chunks of prompts. The query
# heads that share a key head lie in one tile with all queries of a sequence, so that each key is read once; a long
# context is split over several programs, and a second kernel puts the parts together (flash-decoding; Dao et al. 2023).

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_backend.kernels.layout.paged import MAX_SPLITS, SMALL_TILE_ROWS, PagedLayout
from gpu_backend.kernels.layout.quantized_kv import KvScales
from gpu_backend.kernels.layout.scoring import Scoring

MIN_TILES = tl.constexpr(2)  # that a split has at least: reading less is not worth another partial result
LOG2_E = 1.4426950408889634
SINK_SCALE = tl.constexpr(LOG2_E)  # all scores are in powers of two
CHUNKED = tl.constexpr(2)  # of WINDOWED: a window is the chunk of tokens that a query lies in
Launch = Callable[..., None]
# What changes from step to step is no reason to compile again: numbers, and parts of larger tensors.
CHANGING = ["window", "splits", "split_tiles", "table_stride"]
PLACES = ["block_tables", "context_lens", "query_starts", "ends"]


@dataclass(frozen=True, slots=True)
class TileShape:
    """How much one program holds: ``rows`` of queries × heads against ``tile`` keys at a time."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


def tile_shape(
    query_rows: int, head_dim: int, wide: bool, narrow: bool = False, batch_invariant: bool = False
) -> TileShape:
    """Choose it by a sequence's longest share of queries × heads; ``wide`` numbers have four bytes, and a ``narrow``
    cache one: it takes more tiles on their way to keep the memory busy.

    A small batch is a matter of bandwidth: small tiles, several programs per multiprocessor. A large one is a matter of
    arithmetic: as many as the registers hold, which are few of four bytes: each product is made of three there.
    ``batch_invariant`` is the same for both, since instructions of another size may add in another order.
    """
    large = head_dim > 128
    if wide:
        return TileShape(16, 16 if large else 32, 8 if large else 4, 2)
    if batch_invariant:
        return TileShape(64, 32 if large else 64, 4, 2 if large else 3)
    if query_rows <= SMALL_TILE_ROWS:
        return TileShape(max(16, triton.next_power_of_2(query_rows)), 32 if large else 64, 4, 5 if narrow else 3)
    return TileShape(64, 32, 4, 2) if large else TileShape(128, 64, 8, 3)


def run(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
    """Launch a kernel."""
    kernel[grid](*arguments, **options)


def only_compile(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
    """Let a kernel be compiled for arguments like these."""
    kernel.warmup(*arguments, grid=grid, **options)


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    layout: PagedLayout,
    scoring: Scoring,
    kv_scales: KvScales | None = None,
    out: Tensor | None = None,
    launch: Launch = run,
) -> Tensor:
    """Let each query look at its own sequence's keys up to its position; (tokens, heads, head_dim) in and out.

    ``query`` and ``out`` are the rows of this layout alone. ``kv_cache`` is one layer's, (blocks, block_size, 2,
    kv_heads, head_dim), whole or a view of the caches of all layers; ``kv_scales`` belong to one of float8. The launch
    depends on ``layout``'s shapes alone, so a CUDA graph may replay it over other contents. ``launch`` is what is done
    with the kernels.
    """
    window, softcap = abs(scoring.window), scoring.softcap
    windowed = CHUNKED.value if scoring.window < 0 else int(window > 0)
    tokens, heads, head_dim = query.shape
    _, block_size, _, kv_heads, _ = kv_cache.shape
    sequences, splits = len(layout.context_lens), layout.num_splits
    assert query.stride(2) == kv_cache.stride(4) == 1 and query.stride(1) == head_dim
    wide = query.dtype == torch.float32
    rows = layout.max_query_len * (heads // kv_heads)
    shape = tile_shape(rows, head_dim, wide, kv_scales is not None, layout.split_tokens > 0)
    row_blocks = triton.cdiv(rows, shape.rows)
    out = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device) if out is None else out
    part, weight = out, out
    if splits > 1:
        part = torch.empty((tokens, heads, splits, head_dim), dtype=torch.float32, device=query.device)
        weight = torch.empty((tokens, heads, splits), dtype=torch.float32, device=query.device)
    common = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "DIM": head_dim,
        "DIM_PADDED": triton.next_power_of_2(head_dim),
        "ROWS": shape.rows,
        "TILE": shape.tile,
        "SINKS": scoring.sinks is not None,
        "AHEAD": layout.ends is not None,
    }
    sinks = weight if scoring.sinks is None else scoring.sinks
    ends = layout.query_starts if layout.ends is None else layout.ends
    launch(
        attend_kernel,
        (row_blocks * splits, kv_heads, sequences),
        query,
        kv_cache,
        layout.block_tables,
        layout.context_lens,
        layout.query_starts,
        ends,
        part,
        weight,
        kv_scales.key if kv_scales else weight,
        kv_scales.value if kv_scales else weight,
        sinks,
        scoring.scale * (2 / softcap if softcap else 1) * LOG2_E,
        softcap * LOG2_E,
        window,
        splits,
        layout.split_tokens // shape.tile,
        query.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        layout.block_tables.stride(0),
        BLOCK_SIZE=block_size,
        SPLIT=splits > 1,
        SCALED=kv_scales is not None,
        WINDOWED=windowed,
        CAPPED=softcap > 0,
        FIXED=layout.split_tokens > 0,
        PRECISION="tf32x3" if wide else "tf32",
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **common,
    )
    if splits > 1:
        launch(
            combine_kernel, (layout.max_query_len * heads, sequences),
            part, weight, out, sinks, layout.context_lens, layout.query_starts, ends, window, splits,
            layout.split_tokens // shape.tile, MOST_SPLITS=triton.next_power_of_2(max(splits, MAX_SPLITS)),
            WINDOWED=windowed, FIXED=layout.split_tokens > 0, **common, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=PLACES)
def attend_kernel(
    query, kv_cache, block_tables, context_lens, query_starts, ends, part, weight, key_scales, value_scales, sinks,
    scale, cap, window, splits, split_tiles,
    query_stride, block_stride, slot_stride, value_offset, head_stride, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, SCALED: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, FIXED: tl.constexpr, SINKS: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of rows of one sequence and key head, against one split of its context."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    split = tl.program_id(0) % splits
    first_row = tl.program_id(0) // splits * ROWS
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    first = tl.load(query_starts + sequence)
    num_rows = (tl.load(query_starts + sequence + 1) - first) * GROUP
    if first_row >= num_rows:
        return
    start = tl.load(context_lens + sequence) - num_rows // GROUP  # position of the sequence's first query
    keys_end = keys_of_rows(first_row, num_rows, start, ends + first, GROUP, ROWS, AHEAD)
    begin, end = tiles_of_rows(first_row, keys_end, start, window, GROUP, TILE, WINDOWED)
    if SPLIT:
        begin, end = tiles_of_split(split, begin, end, split_tiles, splits, FIXED)
        if begin >= end:
            return

    rows = first_row + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PADDED)
    tokens = (first + rows // GROUP).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    held = (rows < num_rows)[:, None] & (dims < DIM)[None, :]
    q = tl.load(query + tokens[:, None] * query_stride + heads[:, None] * DIM + dims[None, :], mask=held, other=0.0)
    if SCALED:
        scale *= tl.load(key_scales + kv_head)
    positions = start + rows // GROUP
    last = positions  # that each row sees
    if AHEAD:
        last = tl.load(ends + tokens, mask=rows < num_rows, other=1) - 1
    table = block_tables + sequence.to(tl.int64) * table_stride
    keys = kv_cache + kv_head.to(tl.int64) * head_stride
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS and not SPLIT:  # where the context is split, a sink counts when the parts are put together
        best = tl.load(sinks + heads, mask=rows < num_rows, other=0.0) * SINK_SCALE
        total += 1.0
    acc = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    masked = begin
    if ROWS > 64 and not WINDOWED:  # tiles that every row sees whole need no mask; in a small batch the mask is free
        masked = tl.maximum(begin, tl.minimum(end, (start + first_row // GROUP + 1) // TILE))
        acc, total, best = _look_at_tiles(
            acc, total, best, q, begin, masked, positions, last, keys_end, window, keys, table, scale, cap,
            block_stride, slot_stride, value_offset, DIM, DIM_PADDED, BLOCK_SIZE, TILE, False, False, CAPPED, PRECISION,
        )  # fmt: skip
    acc, total, best = _look_at_tiles(
        acc, total, best, q, masked, end, positions, last, keys_end, window, keys, table, scale, cap,
        block_stride, slot_stride, value_offset, DIM, DIM_PADDED, BLOCK_SIZE, TILE, True, WINDOWED, CAPPED, PRECISION,
    )  # fmt: skip

    some = tl.where(total > 0.0, total, 1.0)
    acc = acc / some[:, None]
    if SCALED:
        acc *= tl.load(value_scales + kv_head)
    places = tokens * HEADS + heads
    if SPLIT:
        places = places * splits + split
    tl.store(part + places[:, None] * DIM + dims[None, :], acc.to(part.dtype.element_ty), mask=held)
    if SPLIT:
        tl.store(weight + places, best + tl.log2(some), mask=rows < num_rows)


@triton.jit
def _look_at_tiles(
    acc, total, best, q, begin, end, positions, last, keys_end, window, keys, table, scale, cap,
    block_stride, slot_stride, value_offset, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go on with the online softmax (Milakov & Gimelshein 2018) over tiles of keys, in powers of two."""
    dims = tl.arange(0, DIM_PADDED)
    for tile in range(begin, end):
        position = tile * TILE + tl.arange(0, TILE)
        block = tl.load(table + position // BLOCK_SIZE, mask=position < keys_end, other=0)
        place = block.to(tl.int64) * block_stride + position % BLOCK_SIZE * slot_stride
        if MASKED or DIM < DIM_PADDED:
            written = (position < keys_end)[:, None] & (dims < DIM)[None, :]
            k = tl.load(keys + place[:, None] + dims[None, :], mask=written, other=0.0)
            v = tl.load(keys + value_offset + place[:, None] + dims[None, :], mask=written, other=0.0)
        else:
            k = tl.load(keys + place[:, None] + dims[None, :])
            v = tl.load(keys + value_offset + place[:, None] + dims[None, :])
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale
        if CAPPED:  # tanh x = 1 - 2 / (1 + e^2x)
            scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores))
        if MASKED:
            seen = position[None, :] <= last[:, None]
            if WINDOWED:
                seen = seen & (position[None, :] >= first_seen(positions, window, WINDOWED)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        shares = tl.exp2(scores - base[:, None])
        fade = tl.exp2(best - base)
        total = total * fade + tl.sum(shares, 1)
        acc = acc * fade[:, None] + tl.dot(shares.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
        best = new_best
    return acc, total, best


@triton.jit(do_not_specialize=CHANGING[:3], do_not_specialize_on_alignment=PLACES[1:])
def combine_kernel(
    part, weight, out, sinks, context_lens, query_starts, ends, window, splits, split_tiles,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, MOST_SPLITS: tl.constexpr, WINDOWED: tl.constexpr, FIXED: tl.constexpr,
    SINKS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One query and head: weigh the parts by what their softmax summed up to."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    index = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    sequence = tl.program_id(1)
    first = tl.load(query_starts + sequence)
    num_rows = (tl.load(query_starts + sequence + 1) - first) * GROUP
    if index * GROUP >= num_rows:
        return
    start = tl.load(context_lens + sequence) - num_rows // GROUP
    first_row = (index * GROUP + head % GROUP) // ROWS * ROWS
    keys_end = keys_of_rows(first_row, num_rows, start, ends + first, GROUP, ROWS, AHEAD)
    begin, end = tiles_of_rows(first_row, keys_end, start, window, GROUP, TILE, WINDOWED)
    each = tl.arange(0, MOST_SPLITS)
    begins, ends = tiles_of_split(each, begin, end, split_tiles, splits, FIXED)
    used = (begins < ends) & (each < splits)

    dims = tl.arange(0, DIM_PADDED)
    places = ((first + index).to(tl.int64) * HEADS + head) * splits + each
    weights = tl.load(weight + places, mask=used, other=float("-inf"))
    most = tl.max(weights, 0)
    whole = 0.0
    if SINKS:
        sink = tl.load(sinks + head) * SINK_SCALE
        most = tl.maximum(most, sink)
        whole = tl.exp2(sink - most)
    weights = tl.exp2(weights - most)
    whole += tl.sum(weights, 0)
    held = used[:, None] & (dims < DIM)[None, :]
    parts = tl.load(part + places[:, None] * DIM + dims[None, :], mask=held, other=0.0)
    summed = tl.sum(parts * weights[:, None], 0) / whole
    place = ((first + index).to(tl.int64) * HEADS + head) * DIM + dims
    tl.store(out + place, summed.to(out.dtype.element_ty), mask=dims < DIM)


@triton.jit
def keys_of_rows(
    first_row, num_rows, start, ends, GROUP: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """Return before which position the keys end that a block of a sequence's rows sees; ``ends`` are its queries'."""
    end = start + (tl.minimum(first_row + ROWS, num_rows) - 1) // GROUP + 1
    if AHEAD:
        rows = first_row + tl.arange(0, ROWS)
        end = tl.max(tl.load(ends + rows // GROUP, mask=rows < num_rows, other=0), 0)
    return end


@triton.jit
def tiles_of_rows(
    first_row, keys_end, start, window, GROUP: tl.constexpr, TILE: tl.constexpr, WINDOWED: tl.constexpr
):  # fmt: skip
    """Return the first tile of keys that a block of rows sees any of, and the one after the last."""
    end = tl.cdiv(keys_end, TILE)
    begin = end * 0
    if WINDOWED:
        begin = tl.maximum(first_seen(start + first_row // GROUP, window, WINDOWED), 0) // TILE
    return begin, end


@triton.jit
def first_seen(position, window, WINDOWED: tl.constexpr):
    """Return the first position that a query sees, as ``layout.scoring`` has it; it may lie before 0."""
    if WINDOWED == CHUNKED:
        first = position // window * window
    else:
        first = position - window + 1
    return first


@triton.jit
def tiles_of_split(split, begin, end, split_tiles, splits, FIXED: tl.constexpr):
    """Return a split's first tile, and the one after the last; equal shares, or ``FIXED`` ones from position 0 on."""
    if FIXED:
        first, last = split * split_tiles, (split + 1) * split_tiles
    else:
        share = tl.maximum(tl.cdiv(end - begin, splits), MIN_TILES)
        first, last = begin + split * share, begin + (split + 1) * share
    return tl.maximum(begin, first), tl.minimum(end, last)
