# Every operation of a forward pass in plain torch: what runs on the CPU, and what the Triton kernels are judged by.
# No Python loop runs per token; attention loops over groups of sequences of similar shape.

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.kernels.grouping import AttentionGroup


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of ``x`` to root mean square one, then by ``weight`` (Zhang & Sennrich 2019)."""
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up for rows that hold gate and up beside each other (Shazeer 2020, SwiGLU)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads of ``x`` (tokens, heads, head_dim) by their positions' angles (Su et al. 2021).

    ``cos`` and ``sin`` are (tokens, 1, head_dim / 2); pairs are a head's first and second half, as in Llama.
    """
    first, second = x.chunk(2, dim=-1)
    rotated = torch.empty_like(x)
    half = x.shape[-1] // 2
    torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[..., half:]).addcmul_(first, sin)
    return rotated


def store_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    """Write keys and values (tokens, kv_heads, head_dim) to their slots of one layer's cache.

    ``kv_cache`` is (blocks, block_size, 2, kv_heads, head_dim); slot = block · block_size + offset.
    """
    flat = kv_cache.view(-1, 2, *kv_cache.shape[3:])
    flat[:, 0].index_copy_(0, slots, key)
    flat[:, 1].index_copy_(0, slots, value)


def paged_attention(
    query: Tensor, kv_cache: Tensor, groups: Sequence[AttentionGroup], scale: float, window: int = 0
) -> Tensor:
    """Let each query look at its own sequence's keys up to its position; (tokens, heads, head_dim) in and out.

    Several query heads may share one key head (Ainslie et al. 2023, grouped-query attention). With a ``window`` only
    that many keys count, the query's own the last of them (Beltagy et al. 2020); the groups must be made for it.
    """
    out = torch.empty_like(query)
    for group in groups:
        mask = group.window_mask if window else group.mask
        assert mask is not None, "the groups were made without a window"
        if mask.shape[2] == 1:
            _attend_one_each(query, kv_cache, group, mask, scale, out)
        else:
            _attend_several_each(query, kv_cache, group, mask, scale, out)
    return out


def _attend_one_each(
    query: Tensor, kv_cache: Tensor, group: AttentionGroup, mask: Tensor, scale: float, out: Tensor
) -> None:
    """One query each: the heads that share a key head take the place of several queries."""
    _, heads, head_dim = query.shape
    key, value = _gather(kv_cache, group)
    kv_heads = key.shape[1]
    q = query[group.rows].view(group.num_sequences, kv_heads, heads // kv_heads, head_dim)
    attended = F.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scale)
    out[group.rows] = attended.reshape(-1, heads, head_dim)


def _attend_several_each(
    query: Tensor, kv_cache: Tensor, group: AttentionGroup, mask: Tensor, scale: float, out: Tensor
) -> None:
    _, heads, head_dim = query.shape
    key, value = _gather(kv_cache, group)
    q = query[group.rows]
    if group.padded_rows is not None:
        q = q.index_select(0, group.padded_rows)
    q = q.view(group.num_sequences, -1, heads, head_dim).transpose(1, 2)
    attended = F.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    rows = attended.transpose(1, 2).reshape(-1, heads, head_dim)
    out[group.rows] = rows if group.unpadded is None else rows.index_select(0, group.unpadded)


def _gather(kv_cache: Tensor, group: AttentionGroup) -> tuple[Tensor, Tensor]:
    """Copy a group's blocks side by side: keys and values, each (sequences, kv_heads, context, head_dim)."""
    kv = kv_cache.index_select(0, group.block_tables)
    kv = kv.view(group.num_sequences, -1, *kv_cache.shape[2:])
    return kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
