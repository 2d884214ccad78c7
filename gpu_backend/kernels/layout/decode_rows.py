# What a step of decodes reads and writes beside the model, as tensors that stay where they are: the device
# state, and the rows that one step makes of it. CUDA graphs capture them.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_backend.kernels.layout.sampling_tensors import SamplingTensors

FROM_STATE = -1  # in place of a token, a draft or a start: the device state knows it
SHORTEST, LONGEST = 3, 16  # tokens of a match that a draft follows; longer ones count as equal
# Numbers of a place before its tokens: row, start, how many tokens, how many of them no drafts, and where in its table
# which block is new.
HEADER = 6


@dataclass(frozen=True, slots=True)
class StateTensors:
    """What the device knows of the sequences that run, a row each; the last row is the spare one."""

    last_tokens: Tensor  # (rows,) int64: the last token known, which is computed next
    starts: Tensor  # (rows,) int64: its position
    block_tables: Tensor  # (rows, blocks) int32
    shares: Tensor  # (rows, 3) float32: temperature, top-p, min-p
    numbers: Tensor  # (rows, 3) int64: seed, reply index, top-k
    # (rows, window) int32, window a power of two: the last tokens, that of position p at p % window. 1: none is kept.
    texts: Tensor
    drafts: Tensor  # (rows, most) int64: at the tokens behind the last one
    spare_block: int  # no sequence's


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The rows of some places, ``width`` each: what is computed in a step, and how the next token is drawn.

    Made of one room for all graphs, which are replayed one after the other.
    """

    width: int
    token_ids: Tensor  # (rows,) int64
    positions: Tensor  # (rows,) int64
    slots: Tensor  # (rows,) int64
    block_tables: Tensor  # (places, blocks) int32; on a GPU read and written only up to a sequence's own length
    context_lens: Tensor  # (places,) int32
    query_starts: Tensor  # (places + 1,) int32
    sampling: SamplingTensors
    # (places, 2 · width + 2) int32: tokens, whether their logits were numbers, how many count, where the step began
    drawn: Tensor

    @classmethod
    def room_for(cls, places: int, rows: int, width: int, num_blocks: int, device: torch.device) -> DecodeRows:
        """Allocate them for up to ``places`` sequences, ``rows`` in all and ``width`` each."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        temperature, top_p, min_p = zeros(3, rows, dtype=torch.float32)
        seed, token_ids, positions, slots = zeros(4, rows, dtype=torch.long)
        return cls(
            width=width,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            block_tables=zeros(places, num_blocks),
            context_lens=zeros(places),
            query_starts=torch.arange(places + 1, dtype=torch.int32, device=device),
            sampling=SamplingTensors(temperature, top_p, min_p, zeros(rows), seed, zeros(rows), zeros(rows)),
            drawn=zeros(2 * (rows + places)),
        )

    def cut(self, places: int, width: int) -> DecodeRows:
        """Return the beginning of the same room, for fewer places or tokens of each."""
        rows = places * width
        return DecodeRows(
            width,
            self.token_ids[:rows],
            self.positions[:rows],
            self.slots[:rows],
            self.block_tables[:places],
            self.context_lens[:places],
            self.query_starts[: places + 1] * width,
            self.sampling.part(slice(rows)),
            self.drawn[: places * (2 * width + 2)].view(places, 2 * width + 2),
        )
