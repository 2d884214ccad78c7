# What each row of logits asks of the draw, as tensors on the device.

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

IN_PROMPT = 1 << 30  # added to the count of a token that the prompt has; no reply is as long
NO_PENALTIES = (1.0, 0.0, 0.0)  # for repetition, for each time, for having come at all


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """How each row is drawn. A CUDA graph captures these tensors; they are written over before each replay."""

    temperature: Tensor  # (rows,) float32; under 1e-5: the likeliest
    top_p: Tensor  # (rows,) float32; 1: all
    min_p: Tensor  # (rows,) float32; 0: all
    top_k: Tensor  # (rows,) int32; 0: all
    seed: Tensor  # (rows,) int64: its 64 bits
    position: Tensor  # (rows,) int32: of the token to be drawn
    reply: Tensor  # (rows,) int32: which of the request's replies

    def part(self, rows: slice | Tensor) -> SamplingTensors:
        """Return the same tensors for some rows."""
        return SamplingTensors(*(getattr(self, field.name)[rows] for field in fields(self)))
