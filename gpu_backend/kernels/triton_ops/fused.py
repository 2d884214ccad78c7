# What stands between a layer's matrix products, in Triton: each of these reads and writes every number once, where
# plain torch makes a round trip through memory for each step of it.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_backend.kernels.layout.quantized_kv import FP8, KvScales

MOST_FP8 = tl.constexpr(448.0)  # the largest number of float8 e4m3
HEADS_AT_ONCE = 8
COLUMNS_AT_ONCE = 1024


def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """Norm rows (tokens, width) in place; they may be a part of longer ones."""
    _norm_rows(x, None, weight, x, x, eps)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of ``x + residual``, and that sum; rows (tokens, width). Without a residual the sum is ``x``, and
    without weights it is not normed.
    """
    if weight is None:
        summed = x if residual is None else x + residual
        return summed, summed
    tokens = len(x)
    assert x.stride(1) == 1 and (residual is None or tokens == 1 or residual.stride() == x.stride())
    normed = torch.empty_like(x)
    summed = x if residual is None else torch.empty_like(x)
    _norm_rows(x, residual, weight, normed, summed, eps)
    return normed, summed


def _norm_rows(x: Tensor, residual: Tensor | None, weight: Tensor, normed: Tensor, summed: Tensor, eps: float) -> None:
    tokens, width = x.shape
    assert (x.stride() == normed.stride() and x.stride(1) == 1) or tokens == 1
    block = triton.next_power_of_2(width)
    add_rms_norm_kernel[(tokens,)](
        x, x if residual is None else residual, weight, normed, summed, x.stride(0), eps,
        WIDTH=width, BLOCK=block, ADDS=residual is not None, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up for rows (tokens, 2 · width) that hold gate and up beside each other."""
    return _gated(gate_up, gelu=False)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) · up for such rows, with GELU's approximation by a hyperbolic tangent."""
    return _gated(gate_up, gelu=True)


def _gated(gate_up: Tensor, gelu: bool) -> Tensor:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    gated_kernel[(tokens, triton.cdiv(width, COLUMNS_AT_ONCE))](
        gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=COLUMNS_AT_ONCE, GELU=gelu, num_warps=4
    )
    return out


def norm_rope_store(
    qkv: Tensor,
    qk_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    heads: int,
    eps: float,
    kv_scales: KvScales | None = None,
    turned: int | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Norm and rotate queries and keys, write keys and values to their slots; return the queries.

    ``qkv`` is (tokens, heads + 2 · kv_heads, head_dim), in this order; ``qk_norm`` (heads + kv_heads, head_dim) or
    None; ``cos`` and ``sin`` (tokens, 1, head_dim / 2); ``kv_cache`` one layer's, (blocks, block_size, 2, kv_heads,
    head_dim), of float8 with ``kv_scales``; ``slots`` (tokens,), where a negative one stores nothing. Queries come
    out as (tokens, heads, head_dim). ``turned`` and ``interleaved`` as in ``reference.apply_rope``.
    """
    kv_cache = kv_cache if kv_scales is None else kv_cache.view(FP8)
    tokens, _, head_dim = qkv.shape
    _, block_size, _, kv_heads, _ = kv_cache.shape
    query = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    assert qkv.stride(2) == 1 and qkv.stride(1) == head_dim and cos.is_contiguous() and sin.is_contiguous()
    norm_rope_store_kernel[(tokens, triton.cdiv(heads + 2 * kv_heads, HEADS_AT_ONCE))](
        qkv, qkv if qk_norm is None else qk_norm, cos, sin, query, kv_cache, slots,
        kv_scales.key if kv_scales else cos, kv_scales.value if kv_scales else cos,
        eps, qkv.stride(0), kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), kv_cache.stride(3),
        HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2, HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        PAIRS=(head_dim if turned is None else turned) // 2, INTERLEAVED=interleaved,
        BLOCK_SIZE=block_size, AT_ONCE=HEADS_AT_ONCE, NORMED=qk_norm is not None, SCALED=kv_scales is not None,
        num_warps=2,
    )  # fmt: skip
    return query


@triton.jit
def add_rms_norm_kernel(
    x, residual, weight, normed, summed, row_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr
):
    """One row. The sum is rounded before it is normed, and the normed row before it is weighted, as in plain torch."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    held = columns < WIDTH
    value = tl.load(x + row * row_stride + columns, mask=held, other=0.0)
    if ADDS:
        before = tl.load(residual + row * row_stride + columns, mask=held, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(value.dtype)
        tl.store(summed + row * row_stride + columns, value, mask=held)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    scaled = (wide * scale).to(value.dtype).to(tl.float32)
    out = scaled * tl.load(weight + columns, mask=held, other=0.0).to(tl.float32)
    tl.store(normed + row * row_stride + columns, out.to(value.dtype), mask=held)


@triton.jit
def gated_kernel(gate_up, out, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """A piece of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = columns < WIDTH
    gate = tl.load(gate_up + row * row_stride + columns, mask=held, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + WIDTH + columns, mask=held, other=0.0)
    opened = activate(gate, GELU).to(up.dtype).to(tl.float32)
    tl.store(out + row * WIDTH + columns, (opened * up.to(tl.float32)).to(up.dtype), mask=held)


@triton.jit
def activate(x, GELU: tl.constexpr):
    """SiLU, or GELU's approximation by a hyperbolic tangent: (1 + tanh y) / 2 is what SiLU's sigmoid is of 2y."""
    if GELU:
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return x / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize_on_alignment=["slots"])
def norm_rope_store_kernel(
    qkv, qk_norm, cos, sin, query, kv_cache, slots, key_scales, value_scales,
    eps, row_stride, block_stride, slot_stride, value_offset, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, AT_ONCE: tl.constexpr, NORMED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Some heads of one token, whatever they are: queries, keys or values, by their number."""
    DIM: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE))[:, None]
    dims = tl.arange(0, HALF_PADDED)[None, :]
    held = (heads < HEADS + 2 * KV_HEADS) & (dims < HALF)
    turns = heads < HEADS + KV_HEADS
    # Where both numbers of a pair lie; those behind what turns are pairs, too, which turn by nothing.
    at_first, at_second = dims, dims + HALF
    if INTERLEAVED:
        at_first = tl.where(dims < PAIRS, 2 * dims, dims + PAIRS)
        at_second = tl.where(dims < PAIRS, 2 * dims + 1, at_second)
    elif PAIRS < HALF:
        at_first = tl.where(dims < PAIRS, dims, dims + PAIRS)
        at_second = tl.where(dims < PAIRS, dims + PAIRS, at_second)
    source = qkv + token * row_stride + heads * DIM
    stored = tl.load(source + at_first, mask=held, other=0.0)
    first, second = stored.to(tl.float32), tl.load(source + at_second, mask=held, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1)[:, None] / DIM + eps)
        weight = qk_norm + heads * DIM
        normed = held & turns
        first_weight = tl.load(weight + at_first, mask=normed, other=0.0).to(tl.float32)
        second_weight = tl.load(weight + at_second, mask=normed, other=0.0).to(tl.float32)
        first_normed = ((first * scale).to(stored.dtype).to(tl.float32) * first_weight).to(stored.dtype)
        second_normed = ((second * scale).to(stored.dtype).to(tl.float32) * second_weight).to(stored.dtype)
        first = tl.where(turns, first_normed.to(tl.float32), first)
        second = tl.where(turns, second_normed.to(tl.float32), second)
    c = tl.load(cos + token * HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + token * HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    c, s = tl.where(turns, c, 1.0), tl.where(turns, s, 0.0)
    turned_first, turned_second = first * c - second * s, second * c + first * s

    is_query = heads < HEADS
    target = query + (token * HEADS + heads) * DIM
    tl.store(target + at_first, turned_first.to(stored.dtype), mask=held & is_query)
    tl.store(target + at_second, turned_second.to(stored.dtype), mask=held & is_query)
    slot = tl.load(slots + token).to(tl.int64)
    kv_head = (heads - HEADS) % KV_HEADS
    if SCALED:
        keyed = ~is_query & turns & (heads < HEADS + 2 * KV_HEADS)
        valued = ~turns & (heads < HEADS + 2 * KV_HEADS)
        kv_scale = tl.load(key_scales + kv_head, mask=keyed, other=1.0)
        kv_scale *= tl.load(value_scales + kv_head, mask=valued, other=1.0)
        turned_first = tl.clamp(turned_first / kv_scale, -MOST_FP8, MOST_FP8)
        turned_second = tl.clamp(turned_second / kv_scale, -MOST_FP8, MOST_FP8)
    place = kv_cache + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
    place += tl.where(turns, 0, value_offset) + kv_head * head_stride
    kept = held & ~is_query & (slot >= 0)
    tl.store(place + at_first, turned_first.to(kv_cache.dtype.element_ty), mask=kept)
    tl.store(place + at_second, turned_second.to(kv_cache.dtype.element_ty), mask=kept)
