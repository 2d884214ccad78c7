# The one place that chooses an operation's implementation: Triton for tensors on a GPU, plain torch for all others.
# Triton is imported when the first of them comes, so a machine without a GPU needs no compiler.

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.kernels import (
    reference,
    reference_attention,
    reference_decoding,
    reference_delta,
    reference_experts,
)
from gpu_backend.kernels.layout.grouping import AttentionGroup
from gpu_backend.kernels.layout.paged import PagedLayout
from gpu_backend.kernels.layout.quantized_kv import FP8, KvScales
from gpu_backend.kernels.layout.sampling_tensors import SamplingTensors
from gpu_backend.kernels.layout.scoring import Scoring

# that kernels/triton_ops/small_batch.py takes; above it, tensor cores are worth their tiles of sixteen
SMALL_BATCH_ROWS = 4

P = ParamSpec("P")
R = TypeVar("R")


def uses_triton(device: torch.device) -> bool:
    """Whether operations on tensors of that device are Triton's."""
    return device.type == "cuda"


def _by_device(plain: Callable[P, R], module: str) -> Callable[P, R]:
    """Return an operation by the device of its first tensor: ``plain``, or the function of the same name in a module of
    ``triton_ops``."""

    @wraps(plain)
    def operation(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor)
        if not uses_triton(first.device):
            return plain(*args, **kwargs)
        kernels = import_module(f"gpu_backend.kernels.triton_ops.{module}")
        kernel: Callable[P, R] = getattr(kernels, plain.__name__)
        return kernel(*args, **kwargs)

    return operation


rms_norm_ = _by_device(reference.rms_norm_, "fused")
add_rms_norm = _by_device(reference.add_rms_norm, "fused")
silu_and_mul = _by_device(reference.silu_and_mul, "fused")
gelu_and_mul = _by_device(reference.gelu_and_mul, "fused")
norm_rope_store = _by_device(reference.norm_rope_store, "fused")
norm_rope_store_latent = _by_device(reference.norm_rope_store_latent, "latent_attention")
propose_drafts = _by_device(reference_decoding.propose_drafts, "decoding")
place_decodes = _by_device(reference_decoding.place_decodes, "decoding")
accept_draws = _by_device(reference_decoding.accept_draws, "decoding")
penalise = _by_device(reference.penalise, "penalties")
log_probabilities = _by_device(reference.log_probabilities, "logprobs")
choose_experts = _by_device(reference_experts.choose_experts, "experts")
mix_experts = _by_device(reference_experts.mix_experts, "experts")
add_lora_ = _by_device(reference.add_lora_, "lora")
delta_step = _by_device(reference_delta.delta_step, "delta")
delta_chunks = reference_delta.delta_chunks  # on a GPU, too: products of a few large matrices


def num_processors(device: torch.device) -> int:
    """Return how many programs can run at once: a GPU's multiprocessors."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def small_batch_norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Return norm(x + residual) · weightᵀ + bias, and that sum, in one launch; None for a larger batch, or no norm."""
    if norm is None or not _is_small_batch(x, weight):
        return None
    from gpu_backend.kernels.triton_ops import small_batch

    return small_batch.norm_linear(x, residual, norm, eps, weight, bias, scales)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) · up for rows that hold both."""
    return gelu_and_mul(gate_up) if activation == "gelu_pytorch_tanh" else silu_and_mul(gate_up)


def small_batch_gated_linear(
    gate_up: Tensor, activation: str, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None
) -> Tensor | None:
    """Return (activation(gate) · up) · weightᵀ + bias in one launch, for rows with both; None for a larger batch."""
    if not _is_small_batch(gate_up, weight):
        return None
    from gpu_backend.kernels.triton_ops import small_batch

    return small_batch.gated_linear(gate_up, activation, weight, bias, scales)


def _is_small_batch(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is a matter of its weights' bytes and of launches, and those bytes are plain numbers."""
    return uses_triton(x.device) and 0 < len(x) <= SMALL_BATCH_ROWS and weight.dtype in (x.dtype, FP8, torch.int8)


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    groups: Sequence[AttentionGroup | PagedLayout],
    scoring: Scoring,
    kv_scales: KvScales | None = None,
) -> Tensor:
    """Let each query look at its own sequence's keys up to its position; (tokens, heads, head_dim) in and out.

    ``groups`` say where the sequences lie; Triton takes layouts, plain torch both, but of layouts only those of one
    query length.
    """
    if not uses_triton(query.device):
        return reference_attention.paged_attention(query, kv_cache, groups, scoring, kv_scales)
    from gpu_backend.kernels.triton_ops import paged_attention as triton_attention

    kv_cache = kv_cache if kv_scales is None else kv_cache.view(FP8)
    out = query.new_empty(query.shape)
    for layout in groups:
        assert isinstance(layout, PagedLayout), "groups are for plain torch"
        rows = layout.rows
        triton_attention.paged_attention(query[rows], kv_cache, layout, scoring, kv_scales, out[rows])
    return out


def latent_attention(
    query: Tensor,
    turned: Tensor,
    kv_cache: Tensor,
    groups: Sequence[AttentionGroup | PagedLayout],
    scoring: Scoring,
) -> Tensor:
    """Let each query look at its own sequence's latent vectors up to its position; (tokens, heads, rank) in and out.

    ``turned`` (tokens, heads, numbers) is the part of queries for the key that all heads share; ``kv_cache`` is one
    layer's, (blocks, block_size, 1, 1, rank + numbers); ``groups`` as for ``paged_attention``.
    """
    if not uses_triton(query.device):
        return reference_attention.latent_attention(query, turned, kv_cache, groups, scoring)
    from gpu_backend.kernels.triton_ops import latent_attention as triton_attention

    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for layout in groups:
        assert isinstance(layout, PagedLayout), "groups are for plain torch"
        rows = layout.rows
        triton_attention.latent_attention(query[rows], turned[rows], kv_cache, layout, scoring, out[rows])
    return out


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    batch_invariant: bool = False,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
    rounds_input: bool = False,
) -> Tensor:
    """Return x (rows, in) · weightᵀ + bias; ``batch_invariant``: the same bits for a row whatever the others are.

    Weights (out, in) with ``scales`` are of float8 or int8, or int4 packed as (out, in / 2). With weights of float8 the
    input is rounded to it, too, where the device multiplies such rows; it does so for more than a few of them, sizes in
    multiples of 16, and in an order of its own. With ``rounds_input`` both sides are int8. Where ``scales`` are of
    groups of inputs (out, groups), the input stays whole, and ``zeros`` (out, groups) are what whole numbers count
    from: if not given, 8 of four bits and 0 of eight.
    """
    if scales is None and not batch_invariant:
        return F.linear(x, weight, bias)
    if not uses_triton(x.device):
        if scales is None:
            return reference.linear_by_rows(x, weight, bias)
        return reference.quantized_linear(x, weight, scales, bias, zeros, rounds_input)
    from gpu_backend.kernels.triton_ops import quantized_linear as triton_linear

    if scales is None or batch_invariant or rounds_input or scales.dim() > 1:
        return triton_linear.linear(x, weight, scales, bias, batch_invariant, zeros, rounds_input)
    if _is_small_batch(x, weight):
        from gpu_backend.kernels.triton_ops import small_batch

        return small_batch.linear(x, weight, bias, scales)
    if weight.dtype != FP8 or weight.shape[0] % 16 or weight.shape[1] % 16:
        return triton_linear.linear(x, weight, scales, bias)
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
