# How matrix products are loaded: weights that read the same input are packed, so that one product does the work of
# several.

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gpu_backend.models.packed import load_packed, load_rounded
from gpu_backend.models.quantization import Linear, quantize
from gpu_backend.models.weights import WeightSource


class Product(Protocol):
    """A matrix product as layers use it, whatever its weights are kept in and whatever is added to it."""

    @property
    def weight(self) -> Tensor:
        """The matrix, or the fused bits of it."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...

    def of_norm(self, x: Tensor, residual: Tensor | None, norm: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """Return the product with the norm of ``x + residual``, and that sum."""
        ...

    def of_gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """Return the product with activation(gate) · up."""
        ...


def load_linear(weights: WeightSource, names: tuple[str, ...], outs: tuple[int, ...], width: int, bias: bool) -> Linear:
    """Load matrices that read the same input, packed into one: their outputs lie beside each other."""
    added = _together(weights, [f"{name}.bias" for name in names], outs) if bias else None
    if weights.packed is not None and weights.is_packed(names[0]):
        load = load_packed if weights.packed.is_of_words else load_rounded
        return load(weights, names, outs, width, added)
    weight = _together(weights, [f"{name}.weight" for name in names], outs, width)
    if weights.linear.quantization is not None and not weights.linear.is_smoothed:
        return quantize(weight, added, weights.linear.quantization, weights.linear.batch_invariant)
    return Linear(weight, added, batch_invariant=weights.linear.batch_invariant)


def load_whole(weights: WeightSource, name: str, out: int, width: int) -> Tensor:
    """Load a matrix (out, width) whose numbers are needed themselves: unpacked, where the checkpoint has it packed."""
    if not weights.is_packed(name):
        return weights.get(f"{name}.weight", out, width)
    return load_linear(weights, (name,), (out,), width, False).numbers()


def _together(weights: WeightSource, names: list[str], outs: tuple[int, ...], *width: int) -> Tensor:
    """Put tensors below each other, with only one of them in memory beside the whole."""
    first = weights.get(names[0], outs[0], *width)
    if len(names) == 1:
        return first
    packed = first.new_empty((sum(outs), *width))
    packed[: outs[0]] = first
    del first
    row = outs[0]
    for name, out in zip(names[1:], outs[1:], strict=True):
        packed[row : row + out] = weights.get(name, out, *width)
        row += out
    return packed
