# Every operation of a forward pass in plain torch: what runs on the CPU, and what the Triton kernels are judged by.
# Attention, and what goes before and after the model in a step of decodes, are in files of their own.

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.kernels.layout.quantized_kv import KvScales, quantize_kv
from gpu_backend.kernels.layout.sampling_tensors import IN_PROMPT


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of ``x`` to root mean square one, then by ``weight`` (Zhang & Sennrich 2019)."""
    if x.dtype == torch.float32 and weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """Norm rows (tokens, width) in place; they may be a part of longer ones."""
    x.copy_(rms_norm(x, weight, eps))


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of ``x + residual``, and that sum; rows (tokens, width). Without a residual the sum is ``x``, and
    without weights it is not normed.
    """
    summed = x if residual is None else x + residual
    return summed if weight is None else rms_norm(summed, weight, eps), summed


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up for rows that hold gate and up beside each other (Shazeer 2020, SwiGLU)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) · up for such rows, with GELU's approximation by a hyperbolic tangent."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def soft_cap_(scores: Tensor, cap: float) -> Tensor:
    """Bend scores so that none comes to ``cap`` (Gemma 2), in place, and return them; 0 leaves them alone."""
    return scores.div_(cap).tanh_().mul_(cap) if cap else scores


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, turned: int | None = None, interleaved: bool = False) -> Tensor:
    """Rotate the heads of ``x`` (tokens, heads, head_dim) by their positions' angles (Su et al. 2021).

    ``cos`` and ``sin`` are (tokens, 1, head_dim / 2). Of a head's numbers the first ``turned`` turn, all if it is None:
    pairs are the two halves of these, as in Llama, or neighbours where they are ``interleaved``.
    """
    turned = x.shape[-1] if turned is None else turned
    rotated = torch.empty_like(x)
    rotated[..., turned:] = x[..., turned:]
    (first, second), (to_first, to_second) = (_pairs(some[..., :turned], interleaved) for some in (x, rotated))
    cos, sin = cos[..., : turned // 2], sin[..., : turned // 2]
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin)
    return rotated


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])


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
    None; ``kv_cache`` one layer's, of float8 where there are ``kv_scales``; ``turned`` and ``interleaved`` as in
    ``apply_rope``.
    """
    rotated = qkv.shape[1] - kv_cache.shape[3]
    query_key, value = qkv[:, :rotated], qkv[:, rotated:]
    if qk_norm is not None:
        query_key = rms_norm(query_key, qk_norm, eps)
    query_key = apply_rope(query_key, cos, sin, turned, interleaved)
    key = query_key[:, heads:]
    if kv_scales is not None:
        key, value = quantize_kv(key, kv_scales.key), quantize_kv(value, kv_scales.value)
        kv_cache = kv_cache.view(torch.uint8)
    store_kv(key, value, kv_cache, slots)
    return query_key[:, :heads]


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

    ``query`` is (tokens, heads, own + turned), ``latent`` (tokens, rank + turned), ``norm`` (rank,), ``kv_cache`` one
    layer's, (blocks, block_size, 1, 1, rank + turned); ``interleaved`` as in ``apply_rope``.
    """
    rank = len(norm)
    key = apply_rope(latent[:, None, rank:], cos, sin, None, interleaved)[:, 0]
    kept = torch.cat((rms_norm(latent[:, :rank], norm, eps), key), 1)
    kv_cache.view(-1, kept.shape[1]).index_copy_(0, slots, kept)
    return apply_rope(query[:, :, -key.shape[1] :], cos, sin, None, interleaved)


def store_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    """Write keys and values (tokens, kv_heads, head_dim) to their slots of one layer's cache.

    ``kv_cache`` is (blocks, block_size, 2, kv_heads, head_dim); slot = block · block_size + offset.
    """
    kv_cache.view(-1, 2, *kv_cache.shape[3:]).index_copy_(0, slots, torch.stack((key, value), dim=1))


def linear_by_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias, row by row: the order in which a library adds depends on how many rows there are."""
    return torch.cat([F.linear(row.clone(), weight, bias) for row in x.split(1)]) if len(x) else F.linear(x, weight)


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    zeros: Tensor | None = None,
    rounds_input: bool = False,
) -> Tensor:
    """Return x · weightᵀ + bias for float8 (both sides rounded, a scale for each row), int8 or packed int4 weights; or
    for such as have a scale for each group of inputs.

    Shapes and packing as in ``models.quantization``. ``rounds_input`` says that x is rounded to int8, too.
    """
    if scales.dim() > 1:
        product = F.linear(x.float(), grouped_numbers(weight, scales, zeros))
    elif weight.dtype == torch.float8_e4m3fn:
        rounded, row_scales = quantize_rows(x, weight.dtype)
        product = F.linear(rounded.float(), weight.float()) * row_scales * scales
    elif rounds_input:
        rounded, row_scales = quantize_rows(x, torch.int8)
        product = (F.linear(rounded.double(), weight.double()) * row_scales * scales).float()
    else:
        product = F.linear(x, weight.to(x.dtype)).float() * scales
    product = product if bias is None else product + bias
    return product.to(x.dtype)


def grouped_numbers(weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Return the weights (out, in), float32, that have ``scales`` (out, groups) and maybe ``zeros`` of their own."""
    grouped = weight.view(*scales.shape, -1)
    if weight.dtype == torch.uint8:
        grouped = torch.cat([grouped & 15, grouped >> 4], dim=-1)
        zeros = torch.full_like(scales, 8) if zeros is None else zeros
    numbers = grouped.float()
    if zeros is not None:
        numbers -= zeros[..., None].float()
    return (numbers * scales[..., None]).flatten(-2)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows (rows, width) as float8 e4m3 or int8, and the scales (rows, 1) to multiply them with."""
    most = 127.0 if dtype == torch.int8 else 448.0
    scales = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / most
    scaled = (x.float() / scales).clamp(-most, most)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales


def add_lora_(out: Tensor, x: Tensor, shrink: Tensor, expand: Tensor, slots: Tensor, widths: Sequence[int]) -> Tensor:
    """Add to each row of ``out`` (rows, outputs) what its adapter makes of ``x`` (rows, inputs); return ``out``.

    ``slots`` (rows,) int32 says which adapter of the stacks a row has, less than 0: none. ``out`` holds the outputs of
    modules of these ``widths`` beside each other, all of which read ``x``. Module m adds expand[slot, its rows] ·
    shrink[slot, m · rank … (m + 1) · rank] · x; ``shrink`` is (slots, modules · rank, inputs), ``expand`` (slots,
    outputs, rank).
    """
    rank = expand.shape[2]
    for slot in slots.unique().tolist():
        if slot < 0:
            continue
        rows = (slots == slot).nonzero()[:, 0]
        inner = x.index_select(0, rows) @ shrink[slot].t()
        parts = [
            own @ of_module.t()
            for own, of_module in zip(inner.split(rank, 1), expand[slot].split(list(widths)), strict=True)
        ]
        out.index_add_(0, rows, torch.cat(parts, 1))
    return out


def log_probabilities(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability of each row's token (rows,), and of the ``count`` likeliest and their ids.

    The likeliest are (rows, count) each, in falling order.
    """
    logprobs = logits.float().log_softmax(-1)
    top = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    return logprobs.gather(-1, tokens[:, None])[:, 0], top.values, top.indices


def penalise(logits: Tensor, rows: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    """Return float32 logits (places, vocab) as ``weigh_down`` has them, for each place by what its row of ``counts``
    (rows, vocab) says.
    """
    return weigh_down(logits.float(), counts.index_select(0, rows), penalties)


def weigh_down(logits: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    """Return float32 ``logits`` less their penalties (rows, 3): for repetition, for each time, for having come at all.

    ``counts`` (rows, vocab) int32 are how often a reply has each token, with ``IN_PROMPT`` added if its prompt has it.
    """
    repetition, frequency, presence = penalties.t()[:, :, None]
    in_reply = counts & (IN_PROMPT - 1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(counts > 0, repeated, logits).sub_(in_reply * frequency).sub_((in_reply > 0) * presence)
