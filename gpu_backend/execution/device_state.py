# What the device knows about the sequences that run: their last tokens, their blocks, how they draw. It stays there
# from step to step; the host sends only what has changed, so that a decode of many sequences costs it few bytes.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_backend.kernels.layout.decode_rows import StateTensors
from gpu_backend.kernels.layout.upload import upload
from gpu_backend.sampling.sampler import signed
from gpu_backend.step.plan import SequenceStep

NO_BLOCK = (-1, 0)


class DeviceState:
    """A row for each sequence that can run, and one more, ``spare``, for places without a sequence.

    The spare row's only block is ``spare_block``, which no sequence has: what unused places compute is written there.
    """

    def __init__(
        self,
        num_rows: int,
        num_blocks: int,
        spare_block: int,
        device: torch.device,
        max_drafts: int = 0,
        text_window: int = 1,
    ) -> None:
        self.spare = num_rows
        rows = num_rows + 1
        self.on_device = StateTensors(
            last_tokens=torch.zeros(rows, dtype=torch.long, device=device),
            starts=torch.zeros(rows, dtype=torch.long, device=device),
            block_tables=torch.full((rows, num_blocks), spare_block, dtype=torch.int32, device=device),
            shares=torch.ones(rows, 3, device=device),
            numbers=torch.zeros(rows, 3, dtype=torch.long, device=device),
            texts=torch.zeros(rows, text_window, dtype=torch.int32, device=device),
            drafts=torch.zeros(rows, max(1, max_drafts), dtype=torch.long, device=device),
            spare_block=spare_block,
        )
        self._owners = [-1] * num_rows  # sequence ids
        self._known: list[tuple[int, ...]] = [()] * num_rows  # the blocks that the device knows of

    @property
    def last_tokens(self) -> Tensor:
        """The token sampled last for each row."""
        return self.on_device.last_tokens

    @property
    def has_texts(self) -> bool:
        """Whether texts are kept, so that drafts can be made from them."""
        return self.on_device.texts.shape[1] > 1

    def update(self, steps: Sequence[SequenceStep]) -> list[tuple[int, int]]:
        """Bring the rows of these steps up to date, but for what is returned.

        That is for each step where in its table one block is new, and which it is: as for most that need any.
        ``NO_BLOCK`` stands for none.
        """
        newcomers = []
        left = []
        blocks: list[tuple[int, int, int]] = []  # row, place, block
        for step in steps:
            row, table = step.row, step.block_table
            if self._owners[row] != step.sequence_id:
                self._owners[row] = step.sequence_id
                self._known[row] = ()
                newcomers.append(step)
            known, one = self._known[row], NO_BLOCK
            if known is not table and known != table:
                same = len(known) if known == table[: len(known)] else 0
                if len(table) == same + 1:
                    one = same, table[same]
                else:
                    blocks += [(row, place, table[place]) for place in range(same, len(table))]
                self._known[row] = table
            left.append(one)
        device, tensors = self.last_tokens.device, self.on_device
        if blocks:
            rows, places, ids = upload(blocks, device, torch.int32).t().unbind()
            tensors.block_tables.index_put_((rows, places), ids)
        if newcomers:
            where = upload([step.row for step in newcomers], device, torch.long)
            asked = [step.sampling for step in newcomers]
            shares = [(wish.temperature, wish.top_p, wish.min_p) for wish in asked]
            numbers = [(signed(step.sampling.seed), step.reply_index, step.sampling.top_k) for step in newcomers]
            tensors.shares.index_copy_(0, where, upload(shares, device, torch.float32))
            tensors.numbers.index_copy_(0, where, upload(numbers, device, torch.long))
        self._tell([step for step in steps if step.text and step.num_unsure])
        return left

    def _tell(self, steps: Sequence[SequenceStep]) -> None:
        """Put what these steps say of their texts where the device drafts from."""
        if not steps:
            return
        texts, device = self.on_device.texts, self.last_tokens.device
        parts = [torch.frombuffer(bytearray(step.text), dtype=torch.int32) for step in steps]
        where = [
            torch.arange(step.text_start, step.text_start + len(part), dtype=torch.int32) % texts.shape[1]
            for step, part in zip(steps, parts, strict=True)
        ]
        owners = [torch.full_like(part, step.row) for step, part in zip(steps, parts, strict=True)]
        together = torch.stack([torch.cat(owners), torch.cat(where), torch.cat(parts)])
        rows, places, tokens = upload(together, device, torch.int32).unbind()
        texts.index_put_((rows, places), tokens)
