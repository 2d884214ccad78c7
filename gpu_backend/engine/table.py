# What the device knows about the sequences that run: their last tokens, their blocks, how they draw. It stays there
# from step to step; the host sends only what has changed, so that a decode of many sequences costs it few bytes.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_backend.engine.plan import SequenceStep
from gpu_backend.engine.upload import upload
from gpu_backend.engine.wishes import signed
from gpu_backend.kernels.wishes import Wishes


class RequestTable:
    """A row for each sequence that can run, and one more, ``spare``, for whoever is nobody.

    The spare row's only block is ``spare_block``, which no sequence has: what is computed for nobody is written there.
    """

    def __init__(self, num_rows: int, num_blocks: int, spare_block: int, device: torch.device) -> None:
        self.spare = num_rows
        self.spare_block = spare_block
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.long, device=device)  # sampled last
        self.block_tables = torch.full((num_rows + 1, num_blocks), spare_block, dtype=torch.int32, device=device)
        self._shares = torch.ones(num_rows + 1, 3, device=device)  # temperature, top-p, min-p
        self._numbers = torch.zeros(num_rows + 1, 3, dtype=torch.long, device=device)  # seed, reply index, top-k
        self._owners = [-1] * num_rows  # sequence ids
        self._known: list[tuple[int, ...]] = [()] * num_rows  # the blocks that the device knows of

    def update(self, steps: Sequence[SequenceStep]) -> None:
        """Bring the rows of these steps up to date."""
        newcomers = []
        blocks: list[tuple[int, int, int]] = []  # row, place, block
        for step in steps:
            row, table = step.row, step.block_table
            if self._owners[row] != step.sequence_id:
                self._owners[row] = step.sequence_id
                self._known[row] = ()
                newcomers.append(step)
            known = self._known[row]
            if known is not table and known != table:
                same = len(known) if known == table[: len(known)] else 0
                blocks += [(row, place, table[place]) for place in range(same, len(table))]
                self._known[row] = table
        device = self.last_tokens.device
        if blocks:
            rows, places, ids = upload(blocks, device, torch.int32).t().unbind()
            self.block_tables.index_put_((rows, places), ids)
        if newcomers:
            where = upload([step.row for step in newcomers], device, torch.long)
            asked = [step.sampling for step in newcomers]
            shares = [(wish.temperature, wish.top_p, wish.min_p) for wish in asked]
            numbers = [(signed(step.sampling.seed), step.reply_index, step.sampling.top_k) for step in newcomers]
            self._shares.index_copy_(0, where, upload(shares, device, torch.float32))
            self._numbers.index_copy_(0, where, upload(numbers, device, torch.long))

    def wishes(self, rows: Tensor, positions: Tensor) -> Wishes:
        """Return how tokens at these positions are drawn for these rows of the table."""
        temperature, top_p, min_p = self._shares.index_select(0, rows).t().contiguous().unbind()
        seed, reply, top_k = self._numbers.index_select(0, rows).t().contiguous().unbind()
        return Wishes(temperature, top_p, min_p, top_k.int(), seed, positions.int(), reply.int())
