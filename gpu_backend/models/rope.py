# Rotary position embeddings: the angles by which queries and keys are turned, stretched for long contexts where a
# model's config says so.

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.models.config.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class RopeTable:
    """By what queries and keys are turned at each position, or at some tokens' positions."""

    cos: Tensor  # (positions, 1, head_dim / 2)
    sin: Tensor
    turned: int  # how many of a head's numbers turn, the first of them; behind their pairs all is 1 and 0
    interleaved: bool = False  # neighbours are a pair, instead of the two halves of what turns
    queries: Tensor | None = None  # (positions, 1, 1): what queries are multiplied with; None: nothing
    axes: Tensor | None = None  # (head_dim / 2,): by which of a token's time, row and column each turns

    def at(self, positions: Tensor) -> RopeTable:
        """Return it for tokens at these positions (tokens,), or at these times, rows and columns (3, tokens)."""
        if positions.dim() == 2:
            assert self.axes is not None
            axes = self.axes.expand(1, positions.shape[1], 1, -1)
            cos, sin = (each[positions].gather(0, axes)[0] for each in (self.cos, self.sin))
            return replace(self, cos=cos, sin=sin)
        queries = None if self.queries is None else self.queries.index_select(0, positions)
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        return replace(self, cos=cos, sin=sin, queries=queries)


def rope_table(rope: RopeConfig | None, head_dim: int, num_positions: int, like: Tensor) -> RopeTable:
    """Compute it in float32, rounded to ``like``'s type; without a rope nothing is turned."""
    if rope is None:
        shape = (num_positions, 1, head_dim // 2)
        return RopeTable(like.new_ones(()).expand(shape), like.new_zeros(()).expand(shape), head_dim)
    turned = rope.turned(head_dim)
    frequencies = rope_frequencies(rope, turned, num_positions)
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)[:, None]
    behind = (0, (head_dim - turned) // 2)
    cos = F.pad(angles.cos() * rope.attention_factor, behind, value=1.0)
    sin = F.pad(angles.sin() * rope.attention_factor, behind)
    queries = None
    if rope.query_beta:
        contexts = ((positions + rope.query_ahead) / rope.original_max_position).floor()
        queries = (1 + rope.query_beta * contexts.log1p())[:, None, None].to(like)
    return RopeTable(cos.to(like), sin.to(like), turned or head_dim, rope.interleaved, queries, _axes(rope, like))


def _axes(rope: RopeConfig, like: Tensor) -> Tensor | None:
    if not rope.sections:
        return None
    pairs = range(sum(rope.sections))
    if rope.takes_turns:  # until a kind has had all of its own; what is left goes by time
        axes = [pair % 3 if pair < 3 * rope.sections[pair % 3] else 0 for pair in pairs]
    else:
        axes = [axis for axis, count in enumerate(rope.sections) for _ in range(count)]
    return torch.tensor(axes, device=like.device)


def rope_frequencies(rope: RopeConfig, turned: int, num_positions: int) -> Tensor:
    """Return each pair's angle per position (Su et al. 2021), stretched for long contexts where the config says so.

    ``linear`` divides all of them (Chen et al. 2023). ``llama3`` and ``yarn`` divide the slow ones, keep the fast ones,
    and blend in between: by turns in the original context (Llama 3.1; as in transformers'
    ``_compute_llama3_parameters``), or by dimension (Peng et al. 2023, section 3.2; ``_compute_yarn_parameters``).
    ``longrope`` divides each by a factor of its own, which is another one where sequences may be longer than the
    original context (Ding et al. 2024): where there are ``num_positions``, so that no key in the cache turns again.
    """
    frequencies = 1.0 / rope.theta ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned)
    if rope.kind == "longrope":
        is_long = num_positions > rope.original_max_position
        return frequencies / torch.tensor(rope.long_factors if is_long else rope.short_factors)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_position * frequencies / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    elif rope.kind == "yarn":
        first, last = _yarn_range(rope, turned)
        blend = 1 - (torch.arange(turned // 2, dtype=torch.float32) - first) / (last - first)
    else:
        return frequencies
    kept = blend.clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / rope.factor)


def _yarn_range(rope: RopeConfig, turned: int) -> tuple[float, float]:
    """Return the dimensions between which yarn goes from keeping frequencies to dividing them."""

    def dimension(turns: float) -> float:
        return turned * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, turned - 1)
    return first, last if last != first else first + 0.001
