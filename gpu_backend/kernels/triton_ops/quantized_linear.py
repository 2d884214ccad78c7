# Matrix products with weights of eight or four bits, in Triton: a decode reads the weights once and little else, so its
# time is their bytes. The same kernel multiplies plain weights where sums must not depend on the size of the batch.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # the largest number of each type


@dataclass(frozen=True, slots=True)
class ProductShape:
    """How much one program computes: ``rows`` × ``columns`` of the output, over ``depth`` inputs at a time."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


FEW = ProductShape(16, 64, 128, 4, 4)  # a decode: bandwidth
SOME = ProductShape(64, 128, 64, 4, 4)  # in between, and for every batch where sums must come out the same
MANY = ProductShape(128, 128, 64, 8, 3)  # a prefill: arithmetic
PROGRAMS_WISHED = 256  # about two for each multiprocessor of a large device
MOST_SPLITS = 8


def product_shape(rows: int, batch_invariant: bool = False) -> ProductShape:
    """Choose it by the rows of the input."""
    if batch_invariant:
        return SOME
    return FEW if rows <= 32 else SOME if rows <= 128 else MANY


def linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    batch_invariant: bool = False,
    zeros: Tensor | None = None,
    rounds_input: bool = False,
) -> Tensor:
    """Return x · weightᵀ + bias; x (rows, in) of bfloat16, float16 or float32, rounded to int8 if ``rounds_input``.

    ``weight`` is int8 or float8 (out, in) with ``scales`` (out,), or with some for groups of inputs (out, groups) and
    ``zeros`` int16 (out, groups) that whole numbers count from, 0 if not given; or uint8 (out, in / 2) with ``scales``
    (out, groups), packed as ``models.quantization.pack_int4`` says, and ``zeros`` uint8, 8 if not given; or of x's own
    type (out, in), with none. Scales are float32.
    ``batch_invariant`` makes each row's sum the same to the bit however many rows there are.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    group = 0 if scales is None or scales.dim() == 1 else inputs // scales.shape[1]
    shape = product_shape(rows, batch_invariant)
    depth = group or shape.depth
    tiles = triton.cdiv(outputs, shape.columns) * (1 if batch_invariant else triton.cdiv(rows, shape.rows))
    splits = max(1, min(MOST_SPLITS, PROGRAMS_WISHED // tiles, triton.cdiv(inputs, depth) // 4))
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    x, row_scales = quantize_rows(x, torch.int8) if rounds_input else (x, out)
    part = out if splits == 1 else torch.empty((splits, rows, outputs), dtype=torch.float32, device=x.device)
    product_kernel[(triton.cdiv(rows, shape.rows), triton.cdiv(outputs, shape.columns), splits)](
        x, weight, out if scales is None else scales, weight if zeros is None else zeros, row_scales,
        out if bias is None else bias, part,
        rows, outputs, inputs, splits, x.stride(0), weight.stride(0),
        ROWS=shape.rows, COLUMNS=shape.columns, DEPTH=depth, SPLIT=splits > 1, GROUP=group,
        PACKED=weight.dtype == torch.uint8, SCALED=scales is not None, SHIFTED=zeros is not None,
        ROUNDED=rounds_input, BIASED=bias is not None, PRECISION="tf32x3" if out.dtype == torch.float32 else "tf32",
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    if splits > 1:
        sum_kernel[(rows, triton.cdiv(outputs, 1024))](
            part, out if bias is None else bias, out, rows, outputs, splits,
            BIASED=bias is not None, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows (rows, width) as float8 e4m3 or int8, and the scales (rows, 1) to multiply them with."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=dtype, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    quantize_rows_kernel[(rows,)](
        x, out, scales, x.stride(0), WIDTH=width, BLOCK=block, MOST=MOST[dtype], WHOLE=dtype == torch.int8,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out, scales


@triton.jit(do_not_specialize=["rows", "splits"])
def product_kernel(
    x, weight, scales, zeros, row_scales, bias, part, rows, outputs, inputs, splits, row_stride, weight_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr,
    PACKED: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, ROUNDED: tl.constexpr, BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the output, over one split of the inputs."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    steps = tl.cdiv(inputs, DEPTH)
    share = tl.cdiv(steps, splits)
    begin = split * share
    end = tl.minimum(begin + share, steps)
    here = (row < rows)[:, None]
    there = (column < outputs)[:, None]
    from_x = x + row.to(tl.int64)[:, None] * row_stride
    from_weight = weight + column.to(tl.int64)[:, None] * weight_stride
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    if PACKED:  # four bits: a group's first half lies in the low ends of its bytes, its second half in the high
        HALF: tl.constexpr = GROUP // 2
        byte = tl.arange(0, HALF)[None, :]
        for step in range(begin, end):
            packed = tl.load(from_weight + step * HALF + byte, mask=there, other=0)
            low = tl.load(from_x + step * GROUP + byte, mask=here, other=0.0)
            high = tl.load(from_x + step * GROUP + HALF + byte, mask=here, other=0.0)
            place = column * (inputs // GROUP) + step
            zero = 8
            if SHIFTED:
                zero = tl.load(zeros + place, mask=column < outputs, other=0).to(tl.int8)[:, None]
            first = ((packed & 15).to(tl.int8) - zero).to(low.dtype)
            second = ((packed >> 4).to(tl.int8) - zero).to(low.dtype)
            summed = tl.dot(low, tl.trans(first), input_precision=PRECISION)
            summed = tl.dot(high, tl.trans(second), summed, input_precision=PRECISION)
            scale = tl.load(scales + place, mask=column < outputs, other=0.0)
            acc += summed * scale[None, :]
    elif GROUP > 0:
        for step in range(begin, end):
            place = step * GROUP + tl.arange(0, GROUP)[None, :]
            taken = tl.load(from_x + place, mask=here, other=0.0)
            w = tl.load(from_weight + place, mask=there, other=0.0).to(taken.dtype)
            of_group = column * (inputs // GROUP) + step
            if SHIFTED:  # whole numbers up to 256 are whole in any type
                w -= tl.load(zeros + of_group, mask=column < outputs, other=0).to(taken.dtype)[:, None]
            summed = tl.dot(taken, tl.trans(w), input_precision=PRECISION)
            acc += summed * tl.load(scales + of_group, mask=column < outputs, other=0.0)[None, :]
    elif ROUNDED:
        whole = tl.zeros([ROWS, COLUMNS], tl.int32)
        for step in range(begin, end):
            place = step * DEPTH + tl.arange(0, DEPTH)[None, :]
            inside = place < inputs
            taken = tl.load(from_x + place, mask=here & inside, other=0)
            w = tl.load(from_weight + place, mask=there & inside, other=0)
            whole = tl.dot(taken, tl.trans(w), whole, out_dtype=tl.int32)
        acc = whole.to(tl.float32) * tl.load(row_scales + row, mask=row < rows, other=0.0)[:, None]
        acc *= tl.load(scales + column, mask=column < outputs, other=0.0)[None, :]
    else:
        for step in range(begin, end):
            place = step * DEPTH + tl.arange(0, DEPTH)[None, :]
            inside = place < inputs
            taken = tl.load(from_x + place, mask=here & inside, other=0.0)
            w = tl.load(from_weight + place, mask=there & inside, other=0.0).to(taken.dtype)
            acc = tl.dot(taken, tl.trans(w), acc, input_precision=PRECISION)
        if SCALED:
            acc *= tl.load(scales + column, mask=column < outputs, other=0.0)[None, :]
    if BIASED and not SPLIT:
        acc += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    target = part + (split.to(tl.int64) * rows + row[:, None]) * outputs + column[None, :]
    tl.store(target, acc.to(part.dtype.element_ty), mask=here & (column < outputs)[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def sum_kernel(part, bias, out, rows, outputs, splits, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    """A piece of one row: the splits' parts, added in their order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < outputs
    acc = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        acc += tl.load(part + (split * rows + row) * outputs + column, mask=held, other=0.0)
    if BIASED:
        acc += tl.load(bias + column, mask=held, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + column, acc.to(out.dtype.element_ty), mask=held)


@triton.jit
def quantize_rows_kernel(
    x, out, scales, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr, WHOLE: tl.constexpr
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    held = columns < WIDTH
    value = tl.load(x + row * row_stride + columns, mask=held, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / MOST
    tl.store(scales + row, scale)
    clipped = tl.clamp(value / scale, -MOST, MOST)
    if WHOLE:  # a conversion cuts off what is behind the point
        clipped += tl.where(clipped < 0.0, -0.5, 0.5)
    tl.store(out + row * WIDTH + columns, clipped.to(out.dtype.element_ty), mask=held)
