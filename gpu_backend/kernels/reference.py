# Every operation of a forward pass in plain torch: what runs on the CPU, and what the Triton kernels are judged by.
# Attention is in a file of its own.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.kernels.layout.decode_rows import FROM_STATE, HEADER, LONGEST, SHORTEST, DecodeRows, StateTensors
from gpu_backend.kernels.layout.quantized_kv import KvScales, quantize_kv


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of ``x`` to root mean square one, then by ``weight`` (Zhang & Sennrich 2019)."""
    if x.dtype == torch.float32 and weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of ``x + residual``, and that sum; rows (tokens, width). Without a residual the sum is ``x``."""
    summed = x if residual is None else x + residual
    return rms_norm(summed, weight, eps), summed


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
) -> Tensor:
    """Norm and rotate queries and keys, write keys and values to their slots; return the queries.

    ``qkv`` is (tokens, heads + 2 · kv_heads, head_dim), in this order; ``qk_norm`` (heads + kv_heads, head_dim) or
    None; ``kv_cache`` one layer's, of float8 where there are ``kv_scales``.
    """
    rotated = qkv.shape[1] - kv_cache.shape[3]
    query_key, value = qkv[:, :rotated], qkv[:, rotated:]
    if qk_norm is not None:
        query_key = rms_norm(query_key, qk_norm, eps)
    query_key = apply_rope(query_key, cos, sin)
    key = query_key[:, heads:]
    if kv_scales is not None:
        key, value = quantize_kv(key, kv_scales.key), quantize_kv(value, kv_scales.value)
        kv_cache = kv_cache.view(torch.uint8)
    store_kv(key, value, kv_cache, slots)
    return query_key[:, :heads]


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
    """Return x · weightᵀ + bias for float8 (both sides rounded, a scale for each row), int8 or packed int4 weights.

    Shapes and packing as in ``models.quantization``. ``rounds_input`` says that x is rounded to int8, too.
    """
    if weight.dtype == torch.float8_e4m3fn:
        rounded, row_scales = quantize_rows(x, weight.dtype)
        product = F.linear(rounded.float(), weight.float()) * row_scales * scales
    elif rounds_input:
        rounded, row_scales = quantize_rows(x, torch.int8)
        product = (F.linear(rounded.double(), weight.double()) * row_scales * scales).float()
    elif weight.dtype == torch.int8:
        product = F.linear(x, weight.to(x.dtype)).float() * scales
    else:
        packed = weight.view(len(weight), scales.shape[1], 1, -1)
        numbers = torch.cat([packed & 15, packed >> 4], dim=2).flatten(2).float()
        numbers -= 8 if zeros is None else zeros[:, :, None].float()
        product = F.linear(x.float(), (numbers * scales[:, :, None]).flatten(1))
    product = product if bias is None else product + bias
    return product.to(x.dtype)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows (rows, width) as float8 e4m3 or int8, and the scales (rows, 1) to multiply them with."""
    most = 127.0 if dtype == torch.int8 else 448.0
    scales = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / most
    scaled = (x.float() / scales).clamp(-most, most)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales


def log_probabilities(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability of each row's token (rows,), and of the ``count`` likeliest and their ids.

    The likeliest are (rows, count) each, in falling order.
    """
    logprobs = logits.float().log_softmax(-1)
    top = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    return logprobs.gather(-1, tokens[:, None])[:, 0], top.values, top.indices


def propose_drafts(inputs: Tensor, state: StateTensors, width: int) -> None:
    """Draft what follows each place's text: what followed its end's longest match in it, of equal ones the last.

    A match that reaches into the text's end is taken for the beginning of a repetition; without a match of at least
    SHORTEST tokens the last one stands for every draft. ``inputs`` as in ``place_decodes``.
    """
    row, start, count = inputs[:, :3].unbind(1)
    start = torch.where(start == FROM_STATE, state.starts[row], start)
    last = inputs.gather(1, (HEADER + width - count)[:, None])[:, 0]
    last = torch.where(last == FROM_STATE, state.last_tokens[row], last)
    window = state.texts.shape[1]
    state.texts[row, start % window] = last.int()
    places = torch.arange(window)
    where = start[:, None] + 1 - window + places
    text = torch.where(where >= 0, state.texts[row[:, None], where % window], -1)
    length, alive = torch.zeros_like(where), where >= 0
    for back in range(1, min(LONGEST, window - 1) + 1):
        before = F.pad(text, (back, 0), value=-1)[:, :window]
        alive = alive & (before >= 0) & (before == text[:, window - back, None])
        length += alive
    best = torch.where(length >= SHORTEST, length * window + places, -1).amax(1, keepdim=True)
    first = torch.where(best >= 0, best % window, window - 1)
    ahead = first + torch.arange(state.drafts.shape[1]) % (window - first)
    state.drafts[row] = text.gather(1, ahead).long()


def place_decodes(inputs: Tensor, state: StateTensors, rows: DecodeRows, block_size: int) -> None:
    """Fill ``rows`` with what a step of decodes computes.

    ``inputs`` (places, HEADER + width) say of each place its row of the device state, where its tokens start, how many
    there are and how many of these are no drafts, which block of its table is new (none: -1) and what it is, and the
    tokens, behind as many as it lacks of ``width``. ``FROM_STATE`` in place of a start or a token stands for what the
    device state has. Rows that a place does not use lie before its own, and write to the spare block.
    """
    row, start, count, _, fresh_at, fresh = inputs[:, :HEADER].unbind(1)
    start = torch.where(start == FROM_STATE, state.starts[row], start)
    end, width = start + count, rows.width
    has_fresh = fresh_at >= 0
    state.block_tables[row[has_fresh], fresh_at[has_fresh]] = fresh[has_fresh].int()
    rows.block_tables.copy_(state.block_tables.index_select(0, row))
    given = inputs[:, HEADER:]
    behind = torch.arange(width) - (width - count)[:, None]  # the last token known
    drafts = state.drafts[row[:, None], (behind - 1).clamp(0, state.drafts.shape[1] - 1)]
    known = torch.where(behind > 0, drafts, state.last_tokens[row, None])
    rows.token_ids.copy_(torch.where(given == FROM_STATE, known, given).flatten())
    positions = end[:, None] - width + torch.arange(width)
    is_used = positions >= start[:, None]
    index = torch.where(is_used, positions // block_size, 0)
    blocks = torch.where(is_used, rows.block_tables.gather(1, index).long(), state.spare_block)
    rows.positions.copy_(positions.flatten())
    rows.slots.copy_((blocks * block_size + positions % block_size).flatten())
    rows.context_lens.copy_(end)
    sampling, of_row = rows.sampling, row.repeat_interleave(width)
    shares, numbers = state.shares[of_row], state.numbers[of_row]
    for column, kept in enumerate((sampling.temperature, sampling.top_p, sampling.min_p)):
        kept.copy_(shares[:, column])
    for column, kept in enumerate((sampling.seed, sampling.reply, sampling.top_k)):
        kept.copy_(numbers[:, column])
    sampling.position.copy_(rows.positions + 1)


def accept_draws(inputs: Tensor, state: StateTensors, rows: DecodeRows, tokens: Tensor, usable: Tensor) -> None:
    """Record what was drawn for ``rows``: drafts count while each is the token drawn before it, and one token more.

    The device state gets the last token that counts, its position, and the text; ``rows.drawn`` all ``tokens`` (rows,),
    whether their logits were numbers, how many count, and where the step began.
    """
    row, start, count, known = inputs[:, :4].unbind(1)
    start = torch.where(start == FROM_STATE, state.starts[row], start)
    width, tokens = rows.width, tokens.view(len(inputs), rows.width)
    last = width - count + known - 1  # column of the last token that is no draft
    columns = torch.arange(1, width)
    fails = (columns > last[:, None]) & (rows.token_ids.view(-1, width)[:, 1:] != tokens[:, :-1])
    end = torch.where(fails, columns, width).amin(1) if width > 1 else count
    gained = end - last
    state.last_tokens[row] = tokens.gather(1, end[:, None] - 1)[:, 0]
    state.starts[row] = start + known - 1 + gained
    if (window := state.texts.shape[1]) > 1:
        behind = torch.arange(width) - (width - count)[:, None]
        kept = (behind >= known[:, None] - 1) & (behind < (known - 1 + gained)[:, None])
        where = (start[:, None] + 1 + behind) % window
        state.texts[row[:, None].expand_as(where)[kept], where[kept]] = tokens[kept].int()
    rows.drawn.copy_(torch.cat((tokens, usable.view(-1, width), gained[:, None], start[:, None]), 1))
