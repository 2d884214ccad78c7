# How a layer's attention scores keys.

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scoring:
    """What is the same for all queries of a layer. Several query heads may share one key head (Ainslie et al. 2023)."""

    scale: float
    window: int = 0  # how far back a query looks, as ``first_seen`` says; 0: all
    softcap: float = 0.0  # what scores are bounded by, see ``reference.soft_cap_``; 0: nothing
    # (heads,) float32: scores that take a share of each head's softmax, and add nothing (GPT-OSS; Xiao et al. 2024,
    # attention sinks).
    sinks: Tensor | None = None


def first_seen(positions: Tensor, window: int) -> Tensor:
    """Return the first position that queries at these positions see: a window's, themselves included (Beltagy et al.
    2020), or, of a window below 0, that of the chunk of as many tokens that they lie in (Llama 4)."""
    return positions - window + 1 if window > 0 else positions // -window * -window
