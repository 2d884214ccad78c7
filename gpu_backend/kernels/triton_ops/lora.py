# LoRA adapters added to a product in Triton, each row's own: what Punica (Chen et al. 2023) and S-LoRA (Sheng et al.
# 2023) gather by row, a tile of rows computes once for each adapter among them. Nothing depends on what the host knows
# of the rows, so that graphs can replay it; and a row's sums are the same to the bit whatever else is in the batch.

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor, float32

ROWS = 16  # of a tile: the least that tensor cores take
COLUMNS = 64  # of a program's outputs
DEPTH = 64  # inputs of two bytes at a time
LEAST_INPUTS = 512  # of a split
MOST_SPLITS = 8
MOST_RANK = 64  # at a time


def add_lora_(out: Tensor, x: Tensor, shrink: Tensor, expand: Tensor, slots: Tensor, widths: Sequence[int]) -> Tensor:
    """Add what ``reference.add_lora_`` says; inner numbers are float32 until they meet ``expand``."""
    (rows, inputs), inner, rank = x.shape, shrink.shape[1], expand.shape[2]
    split, depth = split_of(inputs), DEPTH * 2 // x.itemsize
    splits = triton.cdiv(inputs, split)
    part = x.new_empty((splits, rows, inner), dtype=float32)
    tiles, precision = triton.cdiv(rows, ROWS), "tf32x3" if x.dtype == float32 else "tf32"
    columns = columns_of(inner, x.itemsize)
    shrink_kernel[(tiles, triton.cdiv(inner, columns), splits)](
        x, shrink, slots, part, rows, inputs, inner, x.stride(0),
        ROWS=ROWS, COLUMNS=columns, DEPTH=depth, SPLIT=split, PRECISION=precision, num_warps=4,
    )  # fmt: skip
    first, second, third = (*widths, 0, 0)[:3]
    blocks = sum(triton.cdiv(width, COLUMNS) for width in widths)
    expand_kernel[(tiles, blocks)](
        out, part, expand, slots, rows, first, second, third, inner, rank, splits, out.stride(0),
        ROWS=ROWS, COLUMNS=COLUMNS, RANK=rank_of(rank), PRECISION=precision, num_warps=4,
    )  # fmt: skip
    return out


def split_of(inputs: int) -> int:
    """Return how many inputs a split has: it does not follow the batch, as sums must not either."""
    return triton.cdiv(triton.cdiv(inputs, MOST_SPLITS), LEAST_INPUTS) * LEAST_INPUTS


def columns_of(inner: int, itemsize: int) -> int:
    """Return how many inner numbers a program computes."""
    return max(16, min(COLUMNS * 2 // itemsize, triton.next_power_of_2(inner)))


def rank_of(rank: int) -> int:
    """Return how many numbers of a rank are multiplied at a time."""
    return max(16, min(MOST_RANK, triton.next_power_of_2(rank)))


@triton.jit(do_not_specialize=["rows"])
def shrink_kernel(
    x, shrink, slots, part, rows, inputs, inner, row_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of rows times some inner columns of their adapters, over one part of the inputs."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    last = tl.max(slot, 0)
    if last < 0:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = (column < inner)[:, None]
    split = tl.program_id(2)
    end = tl.minimum(inputs, (split + 1) * SPLIT)
    from_x = x + row.to(tl.int64)[:, None] * row_stride
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    current = tl.min(tl.where(slot < 0, last, slot), 0)
    behind = last + 1
    while current <= last:
        here = (slot == current)[:, None]
        from_shrink = shrink + (current.to(tl.int64) * inner + column)[:, None] * inputs
        for begin in range(split * SPLIT, end, DEPTH):
            place = begin + tl.arange(0, DEPTH)[None, :]
            inside = place < inputs
            taken = tl.load(from_x + place, mask=here & inside, other=0.0)
            own = tl.load(from_shrink + place, mask=there & inside, other=0.0)
            acc = tl.dot(taken, tl.trans(own), acc, input_precision=PRECISION)
        current = tl.min(tl.where(slot > current, slot, behind), 0)
    target = part + (split.to(tl.int64) * rows + row)[:, None] * inner + column[None, :]
    tl.store(target, acc, mask=(slot >= 0)[:, None] & (column < inner)[None, :])


@triton.jit(do_not_specialize=["rows"])
def expand_kernel(
    out, part, expand, slots, rows, first, second, third, inner, rank, splits, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of rows times some outputs of one module, which are ``first``, ``second`` and ``third`` outputs wide."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    last = tl.max(slot, 0)
    if last < 0:
        return
    block = tl.program_id(1)
    of_first, of_second = tl.cdiv(first, COLUMNS), tl.cdiv(second, COLUMNS)
    module = (block >= of_first).to(tl.int32) + (block >= of_first + of_second).to(tl.int32)
    start = tl.where(module == 0, 0, tl.where(module == 1, first, first + second))
    width = tl.where(module == 0, first, tl.where(module == 1, second, third))
    block -= tl.where(module == 0, 0, tl.where(module == 1, of_first, of_first + of_second))
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    there = column < width
    column += start
    is_adapted = (slot >= 0)[:, None]
    outputs, behind, step = first + second + third, last + 1, rows.to(tl.int64) * inner
    from_part = part + row.to(tl.int64)[:, None] * inner + module * rank
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, rank, RANK):
        place = begin + tl.arange(0, RANK)[None, :]
        known = place < rank
        found = tl.zeros([ROWS, RANK], tl.float32)
        for split in tl.range(0, splits):
            found += tl.load(from_part + split * step + place, mask=is_adapted & known, other=0.0)
        current = tl.min(tl.where(slot < 0, last, slot), 0)
        while current <= last:
            from_expand = expand + (current.to(tl.int64) * outputs + column)[:, None] * rank + place
            own = tl.load(from_expand, mask=there[:, None] & known, other=0.0)
            taken = tl.where((slot == current)[:, None], found, 0.0).to(own.dtype)
            acc = tl.dot(taken, tl.trans(own), acc, input_precision=PRECISION)
            current = tl.min(tl.where(slot > current, slot, behind), 0)
    target = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    mask = is_adapted & there[None, :]
    tl.store(target, (tl.load(target, mask=mask, other=0.0) + acc).to(out.dtype.element_ty), mask=mask)
