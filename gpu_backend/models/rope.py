# Rotary position embeddings: the angles by which queries and keys are turned, stretched for long contexts where a
# model's config says so.

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpu_backend.models.config import RopeConfig


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each (positions, 1, head_dim / 2), from float32, rounded to ``like``'s type."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), rope_frequencies(rope, head_dim))[:, None]
    return (angles.cos() * rope.attention_factor).to(like), (angles.sin() * rope.attention_factor).to(like)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return each pair's angle per position (Su et al. 2021), stretched for long contexts where the config says so.

    ``linear`` divides all of them (Chen et al. 2023). ``llama3`` and ``yarn`` divide the slow ones, keep the fast ones,
    and blend in between: by turns in the original context (Llama 3.1; as in transformers'
    ``_compute_llama3_parameters``), or by dimension (Peng et al. 2023, section 3.2; ``_compute_yarn_parameters``).
    """
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_position * frequencies / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    elif rope.kind == "yarn":
        first, last = _yarn_range(rope, head_dim)
        blend = 1 - (torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)
    else:
        return frequencies
    kept = blend.clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / rope.factor)


def _yarn_range(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    """Return the dimensions between which yarn goes from keeping frequencies to dividing them."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last if last != first else first + 0.001
