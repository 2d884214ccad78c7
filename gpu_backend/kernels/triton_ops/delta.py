# The gated delta rule of decodes in Triton: a state is read once and written once, where plain torch goes through it
# four times.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_backend.kernels.layout.recurrence import EPS

VALUES_AT_ONCE = 32  # of a head, in one program


def delta_step(mixed: Tensor, decay: Tensor, beta: Tensor, sums: Tensor, rows: Tensor) -> Tensor:
    """Take one token of each sequence into its row of ``sums`` (rows, value heads, key_dim, value_dim), in place.

    ``decay``, logarithms, and ``beta`` are float32 (tokens, value heads). Returns (tokens, value heads, value_dim).
    """
    tokens, (heads, key_dim, value_dim) = len(mixed), sums.shape[1:]
    width = (mixed.shape[1] - heads * value_dim) // 2
    assert mixed.is_contiguous() and sums.is_contiguous() and decay.is_contiguous() and beta.is_contiguous()
    out = torch.empty((tokens, heads, value_dim), dtype=mixed.dtype, device=mixed.device)
    delta_step_kernel[(tokens, heads, triton.cdiv(value_dim, VALUES_AT_ONCE))](
        mixed, decay, beta, sums, rows, out, mixed.shape[1], rows.stride(0), EPS, key_dim**-0.5,
        HEADS=heads, SHARED_BY=heads * key_dim // width, WIDTH=width, KEY_DIM=key_dim,
        KEY_PADDED=triton.next_power_of_2(key_dim), VALUE_DIM=value_dim, VALUES=VALUES_AT_ONCE, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def delta_step_kernel(
    mixed, decay, beta, sums, rows, out, mixed_stride, row_stride, eps, scale,
    HEADS: tl.constexpr, SHARED_BY: tl.constexpr, WIDTH: tl.constexpr, KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr, VALUE_DIM: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """One token, one head, some numbers of its values."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys = tl.arange(0, KEY_PADDED)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    source = mixed + token * mixed_stride
    of_key = source + head // SHARED_BY * KEY_DIM + keys
    query = tl.load(of_key, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
    key = tl.load(of_key + WIDTH, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query, 0) + eps) * scale
    key *= tl.rsqrt(tl.sum(key * key, 0) + eps)
    value = tl.load(source + 2 * WIDTH + head * VALUE_DIM + values, mask=values < VALUE_DIM, other=0.0).to(tl.float32)
    place = token * HEADS + head
    at = sums + (tl.load(rows + token * row_stride) * HEADS + head) * KEY_DIM * VALUE_DIM
    at = at + keys[:, None] * VALUE_DIM + values[None, :]
    held = (keys < KEY_DIM)[:, None] & (values < VALUE_DIM)[None, :]
    state = tl.load(at, mask=held, other=0.0) * tl.exp(tl.load(decay + place))
    told = tl.sum(state * key[:, None], 0)
    state += key[:, None] * ((value - told) * tl.load(beta + place))[None, :]
    tl.store(at, state, mask=held)
    made = tl.sum(state * query[:, None], 0)
    tl.store(out + place * VALUE_DIM + values, made.to(out.dtype.element_ty), mask=values < VALUE_DIM)
