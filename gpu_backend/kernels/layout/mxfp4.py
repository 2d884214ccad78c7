# Weights of four-bit floats (e2m1) in blocks of 32 inputs with a power of two each, as GPT-OSS stores its experts (OCP
# Microscaling Formats 1.0, 2023). Not a number changes: only which inputs share a byte, so that kernels can multiply
# both halves of a block as they lie.

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
VALUES = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))  # of the low three bits; the fourth is the sign
SIGNED = torch.cat((VALUES, -VALUES))


def pair_halves(blocks: Tensor) -> Tensor:
    """Return stored bytes (..., blocks, 16), uint8, as (..., blocks · 16).

    The checkpoint's have neighbours in a byte, the first in its low bits; the result's have inputs i and i + 16.
    """
    first, second = blocks[..., :8], blocks[..., 8:]  # of a block's inputs 0 … 15, and 16 … 31
    even, odd = first & 15 | second << 4, first >> 4 | second & 240
    return torch.stack((even, odd), -1).flatten(-3)


def unpack_mxfp4(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers (outputs, inputs) of ``pair_halves``' bytes (outputs, inputs / 2), uint8, and their exponents
    (outputs, inputs / 32), uint8: of the same bias as float32's, and the least one is 0."""
    halves = weight.view(*scales.shape, BLOCK // 2)
    bits = torch.cat((halves & 15, halves >> 4), -1)
    powers = (scales.int() << 23).view(torch.float32)
    numbers = SIGNED.to(weight.device).index_select(0, bits.flatten().int()).view(bits.shape) * powers[..., None]
    return numbers.to(dtype).flatten(-2)
