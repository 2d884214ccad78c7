# The sequences that run: each has a row of the device's state and blocks of the KV cache for what it computed. What a
# preempted one computed is copied to host memory, or computed again, whichever takes less.

from __future__ import annotations

from collections.abc import Iterator

from gpu_backend.kv_cache.block_tables import BlockTables
from gpu_backend.kv_cache.blocks import BlockManager
from gpu_backend.step.cost import StepCost, StepWork, chunk_work
from gpu_backend.step.sequence import Sequence, Status

LEARNT_EVERY = 16  # steps, where the unit of a predicted cost is not known
MEMORY = 0.9  # how much of what was learnt counts after the next step


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


class SwapChoice:
    """Compares copies, of which one block's takes ``copy_seconds``, with the steps that ``cost`` predicts.

    Where ``is_measured`` is false only the proportions of ``cost`` are right, and its unit is learnt from steps.
    Without ``copy_seconds`` nothing is ever copied.
    """

    def __init__(self, cost: StepCost, is_measured: bool, copy_seconds: float | None) -> None:
        self._cost = cost
        self._unit = 1.0 if is_measured else 0.0  # seconds; 0: not known yet
        self._learns = not is_measured and copy_seconds is not None
        self._copy_seconds = copy_seconds

    def wants(self, step: int) -> bool:
        """Whether something is to be learnt from a step of that number."""
        return self._learns and step % LEARNT_EVERY == 0

    def learn(self, work: StepWork, seconds: float) -> None:
        """Take note of what a step took."""
        found = seconds / self._cost.seconds(work)
        self._unit = MEMORY * self._unit + (1 - MEMORY) * found if self._unit else found

    def pays(self, running: StepWork, num_tokens: int, num_blocks: int) -> bool:
        """Whether copying blocks out and in again takes less than computing their tokens beside what is running."""
        if self._copy_seconds is None:
            return False
        longer = self._cost.seconds(running + chunk_work(0, num_tokens)) - self._cost.seconds(running)
        return 2 * num_blocks * self._copy_seconds < self._unit * longer
