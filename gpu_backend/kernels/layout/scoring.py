# How a layer's attention scores keys.

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scoring:
    """What is the same for all queries of a layer. Several query heads may share one key head (Ainslie et al. 2023)."""

    scale: float
    window: int = 0  # how many tokens back a query looks, itself included (Beltagy et al. 2020); 0: all
    softcap: float = 0.0  # what scores are bounded by, see ``reference.soft_cap_``; 0: nothing
    # (heads,) float32: scores that take a share of each head's softmax, and add nothing (GPT-OSS; Xiao et al. 2024,
    # attention sinks).
    sinks: Tensor | None = None
