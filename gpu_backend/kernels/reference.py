# Every operation of a forward pass in plain torch: what runs on the CPU, and what the Triton kernels are judged by.
# No Python loop runs per token; attention loops over groups of sequences of similar shape.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# A group may be padded by a quarter, or by about as much work as another call costs.
WASTE_SHARE = 0.25
WASTE_ALLOWED = 64  # query rows × blocks


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences whose attention is computed in one call, padded to the longest of them.

    Their query rows are ``rows`` of the step, in order. With ``padded_rows`` (sequences × longest query) they must be
    spread to that shape first, since their queries differ in length; padding repeats a sequence's first row.
    """

    rows: slice
    num_sequences: int
    padded_rows: Tensor | None
    unpadded: Tensor | None  # where the rows lie in the padded shape, flattened
    block_tables: Tensor  # (sequences × blocks,), padded with a block of zeros
    mask: Tensor  # (sequences, 1, longest query, blocks × block size): 0 where a query may look, else -inf


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of ``x`` to root mean square one, then by ``weight`` (Zhang & Sennrich 2019)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


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


def paged_attention(query: Tensor, kv_cache: Tensor, groups: Sequence[AttentionGroup], scale: float) -> Tensor:
    """Let each query look at its own sequence's keys up to its position; (tokens, heads, head_dim) in and out.

    Several query heads may share one key head (Ainslie et al. 2023, grouped-query attention).
    """
    out = torch.empty_like(query)
    for group in groups:
        if group.mask.shape[2] == 1:
            _attend_one_each(query, kv_cache, group, scale, out)
        else:
            _attend_several_each(query, kv_cache, group, scale, out)
    return out


def group_sequences(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    null_block: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[AttentionGroup, ...]:
    """Cut a step's sequences, in their order, into groups that waste little when padded.

    ``context_lens`` count the tokens before and in the step. Sort sequences by shape first (``by_shape``).
    ``null_block`` is one that holds zeros; it pads the block tables.
    """
    groups, row, first = [], 0, 0
    for last in _group_ends(query_lens, context_lens, block_size):
        members = slice(first, last)
        groups.append(
            _make_group(
                row,
                query_lens[members],
                context_lens[members],
                block_tables[members],
                block_size,
                null_block,
                device,
                dtype,
            )
        )
        row, first = groups[-1].rows.stop, last
    return tuple(groups)


def by_shape(query_lens: Sequence[int], context_lens: Sequence[int]) -> list[int]:
    """Return the order of sequences in which neighbours are of similar shape: short queries first."""
    return sorted(range(len(query_lens)), key=lambda i: (query_lens[i], context_lens[i]))


def _attend_one_each(query: Tensor, kv_cache: Tensor, group: AttentionGroup, scale: float, out: Tensor) -> None:
    """One query each: the heads that share a key head take the place of several queries."""
    _, heads, head_dim = query.shape
    key, value = _gather(kv_cache, group)
    kv_heads = key.shape[1]
    q = query[group.rows].view(group.num_sequences, kv_heads, heads // kv_heads, head_dim)
    attended = F.scaled_dot_product_attention(q, key, value, attn_mask=group.mask, scale=scale)
    out[group.rows] = attended.reshape(-1, heads, head_dim)


def _attend_several_each(query: Tensor, kv_cache: Tensor, group: AttentionGroup, scale: float, out: Tensor) -> None:
    _, heads, head_dim = query.shape
    key, value = _gather(kv_cache, group)
    q = query[group.rows]
    if group.padded_rows is not None:
        q = q.index_select(0, group.padded_rows)
    q = q.view(group.num_sequences, -1, heads, head_dim).transpose(1, 2)
    attended = F.scaled_dot_product_attention(q, key, value, attn_mask=group.mask, scale=scale, enable_gqa=True)
    rows = attended.transpose(1, 2).reshape(-1, heads, head_dim)
    out[group.rows] = rows if group.unpadded is None else rows.index_select(0, group.unpadded)


def _gather(kv_cache: Tensor, group: AttentionGroup) -> tuple[Tensor, Tensor]:
    """Copy a group's blocks side by side: keys and values, each (sequences, kv_heads, context, head_dim)."""
    kv = kv_cache.index_select(0, group.block_tables)
    kv = kv.view(group.num_sequences, -1, *kv_cache.shape[2:])
    return kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)


def _group_ends(query_lens: Sequence[int], context_lens: Sequence[int], block_size: int) -> list[int]:
    """Return where each group ends. Work is counted in query rows × blocks."""
    ends = []
    longest_query, most_blocks, count, work = 0, 0, 0, 0
    for index, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        blocks = -(-context_len // block_size)
        longest = max(longest_query, query_len)
        most = max(most_blocks, blocks)
        joint = work + query_len * blocks
        padded = (count + 1) * longest * most
        mixed = longest_query == 1 and query_len > 1  # rows with one query each have a cheaper path
        if count and (mixed or padded - joint > max(WASTE_ALLOWED, WASTE_SHARE * joint)):
            ends.append(index)
            longest, most, count, joint = query_len, blocks, 0, query_len * blocks
        longest_query, most_blocks, count, work = longest, most, count + 1, joint
    return [*ends, len(query_lens)] if query_lens else []


def _make_group(
    first_row: int,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    null_block: int,
    device: torch.device,
    dtype: torch.dtype,
) -> AttentionGroup:
    count, longest = len(query_lens), max(query_lens)
    num_blocks = max(map(len, block_tables))
    tables = [block for table in block_tables for block in (*table, *(null_block,) * (num_blocks - len(table)))]
    lens = torch.tensor([query_lens, context_lens]).view(2, count, 1)
    offsets = torch.arange(longest)
    # A padded query looks at position 0, so that its row is finite; nobody reads it.
    limits = torch.where(offsets < lens[0], lens[1] - lens[0] + offsets, 0)  # (sequences, longest)
    visible = torch.arange(num_blocks * block_size) <= limits[..., None]
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)[:, None]
    padded_rows = unpadded = None
    if min(query_lens) < longest:
        starts = torch.cumsum(lens[0], 0) - lens[0]
        is_real = offsets < lens[0]
        padded_rows = torch.where(is_real, starts + offsets, starts).view(-1).to(device)
        unpadded = is_real.view(-1).nonzero().view(-1).to(device)
    return AttentionGroup(
        rows=slice(first_row, first_row + sum(query_lens)),
        num_sequences=count,
        padded_rows=padded_rows,
        unpadded=unpadded,
        block_tables=torch.tensor(tables).to(device),
        mask=mask.to(device),
    )
