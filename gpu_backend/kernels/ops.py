# The one place that chooses an operation's implementation: Triton for tensors on a GPU, plain torch for all others.
# Triton is imported when the first of them comes, so a machine without a GPU needs no compiler.

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.kernels import reference, reference_attention
from gpu_backend.kernels.layout.contiguous_kv import Part
from gpu_backend.kernels.layout.decode_rows import DecodeRows, StateTensors
from gpu_backend.kernels.layout.grouping import AttentionGroup
from gpu_backend.kernels.layout.paged import PagedLayout
from gpu_backend.kernels.layout.quantized_kv import FP8, KvScales
from gpu_backend.kernels.layout.sampling_tensors import SamplingTensors

COMPILERS = 8  # kernels that are compiled at once
# that kernels/triton_ops/small_batch.py takes; above it, tensor cores are worth their tiles of sixteen
SMALL_BATCH_ROWS = 4


def uses_triton(device: torch.device) -> bool:
    """Whether operations on tensors of that device are Triton's."""
    return device.type == "cuda"


def num_processors(device: torch.device) -> int:
    """Return how many programs can run at once: a GPU's multiprocessors."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of ``x + residual``, and that sum; all (tokens, width). Without a residual the sum is ``x``."""
    if uses_triton(x.device):
        from gpu_backend.kernels.triton_ops import fused

        return fused.add_rms_norm(x, residual, weight, eps)
    return reference.add_rms_norm(x, residual, weight, eps)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up (tokens, width) for rows that hold gate and up beside each other."""
    if uses_triton(gate_up.device):
        from gpu_backend.kernels.triton_ops import fused

        return fused.silu_and_mul(gate_up)
    return reference.silu_and_mul(gate_up)


def small_batch_norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Return norm(x + residual) · weightᵀ + bias, and that sum, in one launch; None for a larger batch."""
    if not _is_small_batch(x, weight):
        return None
    from gpu_backend.kernels.triton_ops import small_batch

    return small_batch.norm_linear(x, residual, norm, eps, weight, bias, scales)


def small_batch_silu_linear(
    gate_up: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None
) -> Tensor | None:
    """Return (silu(gate) · up) · weightᵀ + bias in one launch, for rows that hold both; None for a larger batch."""
    if not _is_small_batch(gate_up, weight):
        return None
    from gpu_backend.kernels.triton_ops import small_batch

    return small_batch.silu_linear(gate_up, weight, bias, scales)


def _is_small_batch(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is a matter of its weights' bytes and of launches, and those bytes are plain numbers."""
    return uses_triton(x.device) and 0 < len(x) <= SMALL_BATCH_ROWS and weight.dtype in (x.dtype, FP8, torch.int8)


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
    """Norm (if ``qk_norm`` is given) and rotate queries and keys, write keys and values to their slots of one layer.

    ``qkv`` is (tokens, heads + 2 · kv_heads, head_dim). Return the queries (tokens, heads, head_dim).
    """
    if uses_triton(qkv.device):
        from gpu_backend.kernels.triton_ops import fused

        kv_cache = kv_cache if kv_scales is None else kv_cache.view(FP8)
        return fused.norm_rope_store(qkv, qk_norm, cos, sin, kv_cache, slots, heads, eps, kv_scales)
    return reference.norm_rope_store(qkv, qk_norm, cos, sin, kv_cache, slots, heads, eps, kv_scales)


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    parts: Sequence[Part | AttentionGroup | PagedLayout],
    scale: float,
    window: int = 0,
    kv_scales: KvScales | None = None,
) -> Tensor:
    """Let each query look at its own sequence's keys up to its position; (tokens, heads, head_dim) in and out.

    ``parts`` say where the sequences lie; Triton takes layouts, plain torch all three,
    but of layouts only those of one query length.
    """
    if not uses_triton(query.device):
        return reference_attention.paged_attention(query, kv_cache, parts, scale, window, kv_scales)
    from gpu_backend.kernels.triton_ops import paged_attention as triton_attention

    kv_cache = kv_cache if kv_scales is None else kv_cache.view(FP8)
    out = query.new_empty(query.shape)
    for layout in parts:
        assert isinstance(layout, PagedLayout), "groups are for plain torch"
        rows = layout.rows
        triton_attention.paged_attention(query[rows], kv_cache, layout, scale, window, kv_scales, out[rows])
    return out


def compile_attention(
    query: Tensor,
    kv_cache: Tensor,
    layouts: Sequence[PagedLayout],
    windows: Sequence[int],
    kv_scales: KvScales | None = None,
) -> None:
    """Compile all kernels of attention that these layouts need, in parallel; on a GPU.

    ``query`` (tokens, heads, head_dim) has rows for the longest of them.
    """
    from triton import AsyncCompileMode

    from gpu_backend.kernels.triton_ops import paged_attention as triton_attention

    kv_cache = kv_cache if kv_scales is None else kv_cache.view(FP8)
    cases = [(layout, window) for window in windows for layout in layouts]

    def go_through(launch: triton_attention.Launch) -> None:
        for layout, window in cases:
            rows = query[layout.rows]
            triton_attention.paged_attention(rows, kv_cache, layout, 1.0, window, kv_scales, launch=launch)

    with ThreadPoolExecutor(COMPILERS) as threads, AsyncCompileMode(threads):
        go_through(triton_attention.only_compile)
    go_through(triton_attention.run)  # and load them


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, batch_invariant: bool = False) -> Tensor:
    """Return x (rows, in) · weightᵀ + bias; ``batch_invariant``: the same bits for a row whatever the others are."""
    if not batch_invariant:
        return F.linear(x, weight, bias)
    if not uses_triton(x.device):
        return reference.linear_by_rows(x, weight, bias)
    from gpu_backend.kernels.triton_ops import quantized_linear as triton_linear

    return triton_linear.linear(x, weight, None, bias, batch_invariant=True)


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    zeros: Tensor | None = None,
    rounds_input: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """Return x (rows, in) · weightᵀ + bias for weights (out, in) of float8 or int8, or int4 packed as (out, in / 2).

    With weights of float8 the input is rounded to it, too, where the device multiplies such rows; it does so for more
    than a few of them, sizes in multiples of 16, and in an order of its own. With ``rounds_input`` both sides are int8.
    ``zeros`` (out, groups) are what four bits count from; 8 if not given.
    """
    if not uses_triton(x.device):
        return reference.quantized_linear(x, weight, scales, bias, zeros, rounds_input)
    if not (rounds_input or batch_invariant) and _is_small_batch(x, weight):
        from gpu_backend.kernels.triton_ops import small_batch

        return small_batch.linear(x, weight, bias, scales)
    from gpu_backend.kernels.triton_ops import quantized_linear as triton_linear

    if weight.dtype != FP8 or batch_invariant or weight.shape[0] % 16 or weight.shape[1] % 16:
        return triton_linear.linear(x, weight, scales, bias, batch_invariant, zeros, rounds_input)
    rounded, row_scales = triton_linear.quantize_rows(x, FP8)
    product = torch._scaled_mm(
        rounded, weight.t(), scale_a=row_scales, scale_b=scales[None], out_dtype=torch.bfloat16
    ).to(x.dtype)
    return product if bias is None else product + bias


def draw(logits: Tensor, tensors: SamplingTensors, filters: bool) -> tuple[Tensor, Tensor]:
    """Return each row's next token (rows,) from adjusted logits (rows, vocab), and whether they are numbers; on a GPU.

    On the CPU ``sampling/sampler.py`` draws, in plain torch, by the same noise. ``filters`` False says that no row asks
    for top-k, top-p or min-p.
    """
    from gpu_backend.kernels.triton_ops import sampling

    return sampling.draw(logits, tensors, filters)


def propose_drafts(inputs: Tensor, state: StateTensors, width: int) -> None:
    """Draft what follows each place's text, where ``inputs`` (places, HEADER + width) leave drafts to the device."""
    if uses_triton(inputs.device):
        from gpu_backend.kernels.triton_ops import decoding

        return decoding.propose_drafts(inputs, state, width)
    return reference.propose_drafts(inputs, state, width)


def place_decodes(inputs: Tensor, state: StateTensors, rows: DecodeRows, block_size: int) -> None:
    """Fill ``rows`` with what a step of decodes computes, as ``inputs`` (places, HEADER + width) and ``state`` say."""
    if uses_triton(inputs.device):
        from gpu_backend.kernels.triton_ops import decoding

        return decoding.place_decodes(inputs, state, rows, block_size)
    return reference.place_decodes(inputs, state, rows, block_size)


def accept_draws(inputs: Tensor, state: StateTensors, rows: DecodeRows, tokens: Tensor, usable: Tensor) -> None:
    """Say which of the ``tokens`` drawn for ``rows`` count, and put the last one and its position into ``state``."""
    if uses_triton(inputs.device):
        from gpu_backend.kernels.triton_ops import decoding

        return decoding.accept_draws(inputs, state, rows, tokens, usable)
    return reference.accept_draws(inputs, state, rows, tokens, usable)


def log_probabilities(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability of each row's token (rows,), and of the ``count`` likeliest and their ids.

    The likeliest are (rows, count) each, in falling order.
    """
    if uses_triton(logits.device):
        from gpu_backend.kernels.triton_ops import logprobs

        return logprobs.log_probabilities(logits, tokens, count)
    return reference.log_probabilities(logits, tokens, count)
