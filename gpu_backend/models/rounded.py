# Checkpoints whose weights are of eight bits already: float8 as transformers and llm-compressor write it, and int8
# weights whose inputs are rounded, too (SmoothQuant, Xiao et al. 2023, is in their numbers). Inputs get the scale of
# their own row when they come, whatever fixed one the checkpoint has beside it: that is never coarser.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpu_backend.models.quantization import FP8, QuantizedLinear, quantize

if TYPE_CHECKING:
    from gpu_backend.models.weights import WeightSource


def load_rounded(
    weights: WeightSource, names: tuple[str, ...], outs: tuple[int, ...], width: int, bias: Tensor | None
) -> QuantizedLinear:
    """Load matrices that read the same input, their outputs below each other. Raises ``UnsupportedModel``.

    Where blocks have a scale each, the numbers are rounded a second time, to a scale for each row.
    """
    form = weights.packed
    assert form is not None
    dtype = FP8 if form.method == "fp8" else torch.int8
    numbers = [weights.get_stored(f"{name}.weight", dtype, out, width) for name, out in zip(names, outs, strict=True)]
    if form.block is None:
        scales = [weights.get_scales(f"{name}.{form.scales}", out) for name, out in zip(names, outs, strict=True)]
        together = torch.cat([some.view(torch.uint8) for some in numbers]).view(dtype)  # float8 is not put together
        return QuantizedLinear(
            together,
            torch.cat(scales),
            bias,
            rounds_input=form.method == "w8a8",
            batch_invariant=weights.linear.batch_invariant,
        )
    tall, wide = form.block
    whole = []
    for name, some in zip(names, numbers, strict=True):
        scales_of_blocks = weights.get_scales(f"{name}.{form.scales}", -(-len(some) // tall), -(-width // wide))
        spread = scales_of_blocks.repeat_interleave(tall, 0)[: len(some)].repeat_interleave(wide, 1)[:, :width]
        whole.append(some.float() * spread)
    return quantize(torch.cat(whole), bias, form.method, weights.linear.batch_invariant)
