# The sequences that run: each has a row of the device's state and blocks of the KV cache for what it computed. What a
# preempted one computed is copied to host memory, or computed again, whichever takes less.

from __future__ import annotations

from collections.abc import Iterator

from gpu_backend.kv_cache.block_tables import BlockTables
from gpu_backend.kv_cache.blocks import BlockManager
from gpu_backend.scheduling.swapping import SwapChoice
from gpu_backend.step.cost import StepWork
from gpu_backend.step.sequence import Sequence, Status


class RunningSequences:
    """Owns the sequences with blocks, in the order of their admission: at most ``num_rows``.

    Without ``swapping`` whatever is preempted is computed again, as far as it is no longer cached.
    """

    def __init__(self, num_rows: int, blocks: BlockManager, tables: BlockTables, swapping: SwapChoice | None) -> None:
        self.by_id: dict[int, Sequence] = {}
        self.swapping = swapping
        self.num_preempted = 0
        self.num_swapped = 0  # of them, those that were copied to host memory
        self._num_rows = num_rows
        self._rows = list(range(num_rows))  # free ones
        self._blocks = blocks
        self._tables = tables

    def admit(self, sequence: Sequence) -> bool:
        """Give a sequence blocks and a row, and say whether it has them."""
        # Each running sequence can fill a block before any must be preempted.
        if not self._tables.fill(sequence, headroom=len(self.by_id)):
            return False
        self.by_id[sequence.sequence_id] = sequence
        sequence.row = self._rows.pop()
        sequence.num_on_device = 0
        return True

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.by_id.values())

    def remove(self, sequence: Sequence) -> None:
        """Let a running sequence go; its blocks are available at once."""
        self._leave_row(sequence)
        self._tables.release(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; it is swapped out or computed again."""
        assert not sequence.num_awaited, "a sequence is preempted while its next token is under way"
        self._leave_row(sequence)
        if self._pays_to_swap(sequence) and self._tables.swap_out(sequence):
            self.num_swapped += 1
            sequence.status = Status.SWAPPED
        else:
            self._tables.release(sequence)
            sequence.status = Status.PREEMPTED
        self.num_preempted += 1

    def check(self) -> None:
        """Assert that rows add up, and that blocks cover what is computed."""
        for sequence in self.by_id.values():
            covered = len(sequence.block_table) * self._blocks.block_size
            assert covered >= sequence.num_computed, "a sequence was computed beyond its blocks"
            assert sequence.remaining >= (0 if sequence.pools else 1), "a running sequence has nothing to compute"
        rows = [*self._rows, *(sequence.row for sequence in self.by_id.values())]
        assert sorted(rows) == list(range(self._num_rows)), "a row is lost, or belongs to two"

    def _leave_row(self, sequence: Sequence) -> None:
        del self.by_id[sequence.sequence_id]
        self._rows.append(sequence.row)

    def _pays_to_swap(self, sequence: Sequence) -> bool:
        """Whether copying what a sequence has computed takes less than computing it again."""
        kept = self._blocks.blocks_for(sequence.num_computed)
        if self.swapping is None or not kept:
            return False
        context = sum(other.num_computed for other in self.by_id.values())
        running = StepWork(len(self.by_id), context, context)
        return self.swapping.pays(running, sequence.num_computed, kept)
