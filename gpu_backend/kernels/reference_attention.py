# Attention over the paged KV cache in plain torch. No Python loop runs per token: it loops over groups of sequences of
# similar shape, whose blocks are gathered.

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.kernels.layout.grouping import AttentionGroup
from gpu_backend.kernels.layout.paged import PagedLayout
from gpu_backend.kernels.layout.quantized_kv import KvScales, load_kv
from gpu_backend.kernels.layout.scoring import Scoring, first_seen
from gpu_backend.kernels.reference import soft_cap_

MOST_HEADS_AT_ONCE = 4  # key heads, in decodes
FLOATS_AT_ONCE = 2**18  # of keys and values, in decodes: about what a core's second cache holds


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    groups: Sequence[AttentionGroup | PagedLayout],
    scoring: Scoring,
    kv_scales: KvScales | None = None,
) -> Tensor:
    """Do what ``ops.paged_attention`` says; for a ``scoring`` with a window the groups must be made.

    A cache with one in the place of keys and values, (blocks, block_size, 1, heads, head_dim), has keys that are the
    values, too.
    """
    attended: list[Tensor] = []
    for group in groups:
        if isinstance(group, PagedLayout):
            attended.append(_attend_padded(query, kv_cache, kv_scales, group, scoring))
            continue
        mask = group.window_mask if scoring.window else group.mask
        assert mask is not None, "the groups were made without a window"
        attend = _attend_one_each if mask.shape[2] == 1 else _attend_several_each
        attended.append(attend(query, kv_cache, kv_scales, group, mask, scoring))
    return attended[0] if len(attended) == 1 else torch.cat(attended)


def _attend_padded(
    query: Tensor, kv_cache: Tensor, kv_scales: KvScales | None, layout: PagedLayout, scoring: Scoring
) -> Tensor:
    """As many queries each, tables padded with any blocks: all shapes are known before the sequences are known."""
    _, heads, head_dim = query.shape
    sequences, width = len(layout.block_tables), layout.max_query_len
    assert layout.rows.stop - layout.rows.start == sequences * width, "plain torch takes layouts of one query length"
    kv = _load_blocks(kv_cache, kv_scales, layout.block_tables.flatten(), query.dtype)
    kv = kv.view(sequences, -1, *kv_cache.shape[2:])
    places = torch.arange(kv.shape[1], device=query.device)
    ends = layout.context_lens[:, None] - torch.arange(width - 1, -1, -1, device=query.device)
    visible = places < ends[..., None]  # (sequences, width, context)
    if scoring.window:
        visible &= places >= first_seen(ends[..., None] - 1, scoring.window)
    kv = kv.masked_fill(~visible.any(1)[:, :, None, None, None], 0)  # what is not a number stays so behind a mask
    key, value = kv[:, :, 0].transpose(1, 2), kv[:, :, -1].transpose(1, 2)
    mask = torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill_(~visible, -torch.inf)
    q = query[layout.rows].view(sequences, width, kv_cache.shape[3], -1, head_dim).transpose(1, 2).flatten(2, 3)
    mask = mask.repeat_interleave(heads // kv_cache.shape[3], dim=1)[:, None]
    sinks = None if scoring.sinks is None else scoring.sinks.view(kv_cache.shape[3], -1).repeat(1, width)
    attended = dot_products(q, key, value, mask, scoring, sinks)
    attended = attended.view(sequences, kv_cache.shape[3], width, -1, head_dim).transpose(1, 2)
    return attended.reshape(-1, heads, head_dim)


def _attend_one_each(
    query: Tensor, kv_cache: Tensor, kv_scales: KvScales | None, group: AttentionGroup, mask: Tensor, scoring: Scoring
) -> Tensor:
    """One query each: the heads that share a key head take the place of several queries.

    Some sequences at a time, so that what was gathered is still in the processor's cache when it is used.
    """
    q = query[group.rows].view(group.num_sequences, kv_cache.shape[3], -1, query.shape[2])
    attended = torch.empty_like(q)
    tables = group.block_tables.view(group.num_sequences, -1)
    parts = _parts(group.widths, FLOATS_AT_ONCE // kv_cache[0].numel())
    room = kv_cache.new_empty(max((stop - start) * width for start, stop, width in parts), *kv_cache.shape[1:])
    for start, stop, width in parts:
        kv = _gather(kv_cache, kv_scales, tables[start:stop, :width], query.dtype, room)
        visible = mask[start:stop, ..., : kv.shape[1]]
        attended[start:stop] = _attend(q[start:stop], kv[:, :, 0], kv[:, :, -1], visible, scoring)
    return attended.view(-1, *query.shape[1:])


@lru_cache(maxsize=4)  # all layers of a step ask for the same
def _parts(widths: tuple[int, ...], most: int) -> list[tuple[int, int, int]]:
    """Cut sequences of these numbers of blocks into parts of ``most`` blocks: from where, to where, and the widest."""
    parts = []
    start = widest = 0
    for index, width in enumerate(widths):
        wider = max(widest, width)
        if index > start and (index + 1 - start) * wider > most:
            parts.append((start, index, widest))
            start, wider = index, width
        widest = wider
    return [*parts, (start, len(widths), widest)]


def _attend(q: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """Let ``q`` (sequences, kv_heads, sharing, head_dim) look at keys and values (sequences, context, kv_heads, …)."""
    count, kv_heads, sharing, head_dim = q.shape
    sinks = scoring.sinks
    if kv_heads > MOST_HEADS_AT_ONCE:
        sinks = None if sinks is None else sinks.view(kv_heads, sharing)
        return dot_products(q, key.transpose(1, 2), value.transpose(1, 2), mask, scoring, sinks)
    # One product for all heads: each query has zeros where the keys of other heads than its own lie. That multiplies
    # more, but reads keys and values as they lie; for few heads it is the faster way.
    spread = q.new_zeros(count, kv_heads, sharing, kv_heads, head_dim)
    torch.mul(q.permute(0, 2, 3, 1), scoring.scale, out=spread.diagonal(dim1=1, dim2=3))
    scores = torch.bmm(spread.view(count, kv_heads * sharing, -1), key.flatten(2).transpose(1, 2))
    scores = soft_cap_(scores, scoring.softcap).add_(mask[:, 0])
    attended = torch.bmm(_softmax(scores, sinks), value.flatten(2)).view(spread.shape)
    return attended.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _attend_several_each(
    query: Tensor, kv_cache: Tensor, kv_scales: KvScales | None, group: AttentionGroup, mask: Tensor, scoring: Scoring
) -> Tensor:
    _, heads, head_dim = query.shape
    kv = _gather(kv_cache, kv_scales, group.block_tables.view(group.num_sequences, -1), query.dtype)
    key, value = kv[:, :, 0].transpose(1, 2), kv[:, :, -1].transpose(1, 2)
    q = query[group.rows]
    if group.padded_rows is not None:
        q = q.index_select(0, group.padded_rows)
    q = q.view(group.num_sequences, -1, heads, head_dim).transpose(1, 2)
    attended = dot_products(q, key, value, mask, scoring, None if scoring.sinks is None else scoring.sinks[:, None])
    rows = attended.transpose(1, 2).reshape(-1, heads, head_dim)
    return rows if group.unpadded is None else rows.index_select(0, group.unpadded)


def latent_attention(
    query: Tensor,
    turned: Tensor,
    kv_cache: Tensor,
    groups: Sequence[AttentionGroup | PagedLayout],
    scoring: Scoring,
) -> Tensor:
    """Do what ``ops.latent_attention`` says: one key for all heads, whose first numbers are the value."""
    both = torch.cat((query, turned), 2)
    return paged_attention(both, kv_cache, groups, scoring)[..., : query.shape[2]]


def dot_products(
    q: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: Scoring, sinks: Tensor | None = None
) -> Tensor:
    """Return what queries (sequences, heads, queries, head_dim) see of keys and values, which may have fewer heads.

    ``sinks`` are the scoring's as (heads, queries), or (heads, 1).
    """
    if not scoring.softcap and sinks is None:
        return F.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scoring.scale, enable_gqa=True)
    sharing = q.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(sharing, 1), value.repeat_interleave(sharing, 1)
    scores = soft_cap_((q @ key.transpose(2, 3)).float().mul_(scoring.scale), scoring.softcap) + mask
    return _softmax(scores, sinks).to(q.dtype) @ value


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the shares of scores (..., context); ``sinks`` (...) of each row take a share, too."""
    if sinks is None:
        return scores.softmax(-1)
    also = sinks.to(scores.dtype)[..., None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, also), -1).softmax(-1)[..., :-1]


def _gather(
    kv_cache: Tensor, kv_scales: KvScales | None, block_tables: Tensor, dtype: torch.dtype, room: Tensor | None = None
) -> Tensor:
    """Copy blocks into contiguous memory: (sequences, blocks) becomes (sequences, context, 2, kv_heads, head_dim).

    ``room`` is what may be written over: memory that was just used is still in the processor's cache.
    """
    kv = _load_blocks(kv_cache, kv_scales, block_tables.reshape(-1), dtype, room)
    return kv.view(len(block_tables), -1, *kv_cache.shape[2:])


def _load_blocks(
    kv_cache: Tensor, kv_scales: KvScales | None, blocks: Tensor, dtype: torch.dtype, room: Tensor | None = None
) -> Tensor:
    raw = kv_cache if kv_scales is None else kv_cache.view(torch.uint8)
    copied = torch.index_select(raw, 0, blocks, out=None if room is None else room[: len(blocks)])
    return copied if kv_scales is None else load_kv(copied, kv_scales, dtype)
