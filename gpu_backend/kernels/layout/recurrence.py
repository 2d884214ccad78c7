# Where the states of a step's sequences lie, of layers that keep one in the place of keys and values.

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

EPS = 1e-6  # added to the squared lengths of queries and keys


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The states of all layers that keep some, and which rows of them a step's tokens go on from.

    A step's first tokens are those of sequences with one each; ``longer`` ones lie behind them.
    """

    inputs: Tensor  # (layers, rows, channels, taps - 1): what the convolution saw last
    sums: Tensor  # (layers, rows, value heads, key_dim, value_dim) float32: of the delta rule
    rows: Tensor  # (tokens,) int64: the row of each sequence with one token
    longer: tuple[tuple[slice, int], ...] = ()  # tokens of the others, each with its row
