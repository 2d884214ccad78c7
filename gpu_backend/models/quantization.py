# Matrix products, whose weights may be of eight or four bits: made from a checkpoint's own while it is loaded, matrix
# by matrix, or, where outliers are moved first, layer by layer, so that no more is ever there in full. Embeddings and
# the head stay as they are.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_backend.kernels import ops, reference
from gpu_backend.models.config.errors import UnsupportedModel

FP8 = torch.float8_e4m3fn
MOST_FP8 = 448.0
GROUPS = (128, 64, 32)  # inputs that share a scale in four bits: the largest that divides a matrix's inputs
# Of a group's largest weight: cutting it may cost less than finer steps save.
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix product, with a bias or without; its weights may be kept in few bits."""

    weight: Tensor  # (out, in), plain, fp8 or int8; or int4 packed (out, in / 2)
    bias: Tensor | None = None
    scales: Tensor | None = None  # float32: (out,), or (out, groups) of inputs, as int4 always has; None: it is plain
    # (out, groups): what groups count from; uint8 of int4, whose None is 8, and int16 of int8, whose None is 0
    zeros: Tensor | None = None
    order: Tensor | None = None  # (in,): which input each column is for; None: its own
    rounds_input: bool = False  # to int8, too
    batch_invariant: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        x = x if self.order is None else x.index_select(1, self.order)
        return ops.linear(
            x, self.weight, self.bias, self.batch_invariant, self.scales, self.zeros, rounds_input=self.rounds_input
        )

    def numbers(self) -> Tensor:
        """Return the weights (out, in): those of few bits as float32."""
        if self.scales is None:
            return self.weight
        scales = self.scales[:, None] if self.scales.dim() == 1 else self.scales
        kept = reference.grouped_numbers(self.weight, scales, self.zeros)
        return kept if self.order is None else torch.empty_like(kept).index_copy_(1, self.order, kept)

    def of_norm(self, x: Tensor, residual: Tensor | None, norm: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """Return the product with the norm of ``x + residual``, and that sum."""
        if self._reads_whole and (
            both := ops.small_batch_norm_linear(x, residual, norm, eps, self.weight, self.bias, self.scales)
        ):
            return both
        normed, summed = ops.add_rms_norm(x, residual, norm, eps)
        return self(normed), summed

    def of_gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """Return the product with activation(gate) · up."""
        fused = None
        if self._reads_whole:
            fused = ops.small_batch_gated_linear(gate_up, activation, self.weight, self.bias, self.scales)
        return self(ops.gated(gate_up, activation)) if fused is None else fused

    @property
    def _reads_whole(self) -> bool:
        """Whether inputs may stay as they are: where rounding saves a small batch no time, nothing is rounded."""
        is_grouped = self.scales is not None and self.scales.dim() > 1
        return not (self.rounds_input or self.batch_invariant or is_grouped)


def quantize(weight: Tensor, bias: Tensor | None, method: str, batch_invariant: bool = False) -> Linear:
    """Return the product with its weights (out, in) rounded. Raises ``UnsupportedModel`` where they don't divide."""
    if method == "int4":
        group = next((size for size in GROUPS if weight.shape[1] % size == 0), None)
        if group is None:
            raise UnsupportedModel(f"int4 needs inputs in groups of {GROUPS[-1]}; a matrix has {weight.shape[1]}")
        numbers, scales = _round_to_int4(weight, group)
        packed = pack_int4(numbers + 8, group)
        return Linear(packed, bias, scales, batch_invariant=batch_invariant)
    most = MOST_FP8 if method == "fp8" else 127.0
    scales = _largest(weight, 1) / most
    scaled = weight.float() / scales[:, None]
    rounded = scaled.clamp(-most, most).to(FP8) if method == "fp8" else scaled.round().to(torch.int8)
    return Linear(rounded, bias, scales, rounds_input=method == "w8a8", batch_invariant=batch_invariant)


def pack_int4(numbers: Tensor, group: int) -> Tensor:
    """Pack (out, in) of 0 … 15: byte i of a group has number i in its low bits, number i + group / 2 in its high."""
    halves = numbers.to(torch.uint8).view(len(numbers), -1, 2, group // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)


def _round_to_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return numbers (out, in) and scales (out, groups): for each group the clip with the least squared error."""
    grouped = weight.float().view(len(weight), -1, group)
    full = _largest(grouped, 2) / 7
    best_error = torch.full_like(full, torch.inf)
    scales = full
    for clip in CLIPS:
        tried = full * clip
        error = (_nearest(grouped, tried) * tried[..., None] - grouped).square_().sum(2)
        better = error < best_error
        scales, best_error = torch.where(better, tried, scales), torch.where(better, error, best_error)
    return _nearest(grouped, scales).flatten(1), scales


def _nearest(grouped: Tensor, scales: Tensor) -> Tensor:
    return (grouped / scales[..., None]).round_().clamp_(-8, 7)


def _largest(weight: Tensor, dim: int) -> Tensor:
    return weight.abs().amax(dim).float().clamp(min=1e-12)
