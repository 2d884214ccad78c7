# A KV cache of float8 (e4m3): half the bytes that a decode reads. Each key head of a layer has one scale for its keys
# and one for its values, measured once at the start; numbers are kept as value / scale.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
MOST = 448.0  # the largest number of e4m3; what is beyond becomes it
HEADROOM = 4.0  # how far beyond what was measured a number may lie before it is cut; costs two of 15 binades


@dataclass(frozen=True, slots=True)
class KvScales:
    """Of one layer: what the stored numbers are multiplied with; float32."""

    key: Tensor  # (kv_heads,)
    value: Tensor  # (kv_heads,)


def scales_from(kv: Tensor) -> KvScales:
    """Return a layer's scales from keys and values as they came, (blocks, block_size, 2, kv_heads, head_dim)."""
    largest = kv.abs().amax((0, 1, 4)).float().clamp(min=1e-6) * (HEADROOM / MOST)
    return KvScales(largest[0].contiguous(), largest[1].contiguous())


def quantize_kv(numbers: Tensor, scale: Tensor) -> Tensor:
    """Return (tokens, kv_heads, head_dim) as the bytes of float8; what is not a number stays so."""
    return (numbers.float() / scale[:, None]).clamp(-MOST, MOST).to(FP8).view(torch.uint8)


def load_kv(stored: Tensor, scales: KvScales, dtype: torch.dtype) -> Tensor:
    """Return the numbers of bytes (…, 2, kv_heads, head_dim)."""
    both = torch.stack([scales.key, scales.value])[:, :, None]
    return (stored.view(FP8).to(torch.float32) * both).to(dtype)
