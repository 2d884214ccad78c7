# Products of one to four rows in Triton, with what stands before them: a sum's norm, or SiLU or GELU × up. A decode of
# few replies is the bytes of the weights and so many launches: this saves three a layer, and seven with weights of
# eight bits, whose inputs stay whole. A row's norm is a factor of its whole sum: it is found while weights stream by.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_backend.kernels.triton_ops.fused import activate

WARPS = 4
COLUMNS = 8  # outputs of a program: it has 16 KiB of weights on their way, and a multiprocessor has several programs


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return norm(x + residual) · weightᵀ + bias, and that sum; x (rows, in) of one to four rows.

    ``weight`` is (out, in), of x's type, or of float8 or int8 with ``scales`` (out,). Without a residual the sum is
    ``x``.
    """
    assert residual is None or len(x) == 1 or residual.stride() == x.stride()
    summed = x if residual is None else torch.empty_like(x)
    return _launch(x, residual, norm, weight, bias, scales, summed, eps, gated=False), summed


def gated_linear(
    gate_up: Tensor, activation: str, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None
) -> Tensor:
    """Return (activation(gate) · up) · weightᵀ + bias for one to four rows (rows, 2 · in), gate beside up."""
    gelu = activation == "gelu_pytorch_tanh"
    return _launch(gate_up, None, None, weight, bias, scales, gate_up, 0.0, gated=True, gelu=gelu)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ + bias for one to four rows."""
    return _launch(x, None, None, weight, bias, scales, x, 0.0, gated=False)


def _launch(
    x: Tensor, residual: Tensor | None, norm: Tensor | None, weight: Tensor, bias: Tensor | None,
    scales: Tensor | None, summed: Tensor, eps: float, gated: bool,
    gelu: bool = False,
) -> Tensor:  # fmt: skip
    outputs, inputs = weight.shape
    assert 0 < len(x) <= 4 and x.stride(1) == weight.stride(1) == 1
    out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    each = 16 // x.itemsize
    small_batch_kernel[(triton.cdiv(outputs, COLUMNS),)](
        x, x if residual is None else residual, x if norm is None else norm, weight, out if scales is None else scales,
        out if bias is None else bias, out, summed, len(x), outputs, x.stride(0), weight.stride(0), eps,
        INPUTS=inputs, ROWS=triton.next_power_of_2(len(x)), COLUMNS=COLUMNS, DEPTH=32 * WARPS * each, EACH=each,
        NORMED=norm is not None, ADDS=residual is not None, GATED=gated, GELU=gelu, SCALED=scales is not None,
        BIASED=bias is not None, num_warps=WARPS,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def small_batch_kernel(
    x, residual, norm, weight, scales, bias, out, summed, rows, outputs, row_stride, weight_stride, eps,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EACH: tl.constexpr,
    NORMED: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, SCALED: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """Some outputs of all rows; the first program keeps the sums."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = (column < outputs)[:, None]
    from_weight = weight + column.to(tl.int64)[:, None] * weight_stride
    a, a_squares = tl.zeros([COLUMNS, DEPTH // EACH], tl.float32), tl.zeros([1, DEPTH // EACH], tl.float32)
    b, b_squares = a, a_squares
    c, c_squares = a, a_squares
    d, d_squares = a, a_squares
    for begin in range(0, INPUTS, DEPTH):
        place = (begin + tl.arange(0, DEPTH))[None, :]
        w = tl.load(from_weight + place, mask=there & (place < INPUTS), other=0.0).to(tl.float32)
        gamma = w
        if NORMED:
            gamma = tl.load(norm + place, mask=place < INPUTS, other=0.0).to(tl.float32)
        a, a_squares = _add_row(
            a, a_squares, 0, w, gamma, x, residual, summed, place, rows, row_stride,
            INPUTS, EACH, NORMED, ADDS, GATED, GELU,
        )  # fmt: skip
        if ROWS > 1:
            b, b_squares = _add_row(
                b, b_squares, 1, w, gamma, x, residual, summed, place, rows, row_stride,
                INPUTS, EACH, NORMED, ADDS, GATED, GELU,
            )  # fmt: skip
        if ROWS > 2:
            c, c_squares = _add_row(
                c, c_squares, 2, w, gamma, x, residual, summed, place, rows, row_stride,
                INPUTS, EACH, NORMED, ADDS, GATED, GELU,
            )  # fmt: skip
            d, d_squares = _add_row(
                d, d_squares, 3, w, gamma, x, residual, summed, place, rows, row_stride,
                INPUTS, EACH, NORMED, ADDS, GATED, GELU,
            )  # fmt: skip
    scale, shift = tl.full([COLUMNS], 1.0, tl.float32), tl.zeros([COLUMNS], tl.float32)
    if SCALED:
        scale = tl.load(scales + column, mask=column < outputs, other=0.0)
    if BIASED:
        shift = tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)
    _store_row(out, a, a_squares, 0, scale, shift, column, rows, outputs, eps, INPUTS, NORMED)
    if ROWS > 1:
        _store_row(out, b, b_squares, 1, scale, shift, column, rows, outputs, eps, INPUTS, NORMED)
    if ROWS > 2:
        _store_row(out, c, c_squares, 2, scale, shift, column, rows, outputs, eps, INPUTS, NORMED)
        _store_row(out, d, d_squares, 3, scale, shift, column, rows, outputs, eps, INPUTS, NORMED)


@triton.jit
def _add_row(
    acc, squares, row, w, gamma, x, residual, summed, place, rows, row_stride,
    INPUTS: tl.constexpr, EACH: tl.constexpr, NORMED: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr,
    GELU: tl.constexpr,
):  # fmt: skip
    """Add what a row has at some inputs to its sums: first what is contiguous, which is one thread's."""
    inside = (place < INPUTS) & (row < rows)
    place += row * row_stride
    value = tl.load(x + place, mask=inside, other=0.0)
    if ADDS:
        before = tl.load(residual + place, mask=inside, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(value.dtype)
        if tl.program_id(0) == 0:
            tl.store(summed + place, value, mask=inside)
    wide = value.to(tl.float32)
    if NORMED:
        squares += tl.sum(tl.reshape(wide * wide, (1, squares.shape[1], EACH)), 2)
        wide *= gamma
    if GATED:
        up = tl.load(x + place + INPUTS, mask=inside, other=0.0).to(tl.float32)
        wide = activate(wide, GELU) * up
    acc += tl.sum(tl.reshape(w * wide, (acc.shape[0], acc.shape[1], EACH)), 2)
    return acc, squares


@triton.jit
def _store_row(
    out, acc, squares, row, scale, shift, column, rows, outputs, eps, INPUTS: tl.constexpr, NORMED: tl.constexpr
):  # fmt: skip
    total = tl.sum(acc, 1)
    if NORMED:
        total *= tl.rsqrt(tl.sum(squares) / INPUTS + eps)
    place = out + row * outputs + column
    tl.store(place, (total * scale + shift).to(out.dtype.element_ty), mask=(column < outputs) & (row < rows))
