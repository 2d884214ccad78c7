# No sequence waits for ever for the ends of others' long replies: after a while the tenant that holds most of
# the engine, for its weight, gives a reply's place to one that holds less. docs/fairness.md has the rule.

from __future__ import annotations

from collections.abc import Iterable

from gpu_backend.kv_cache.blocks import BlockManager
from gpu_backend.step.sequence import Sequence

MOST_AGAIN = 16  # tokens of a context to be computed again for each that its reply got, where two take turns


class Shares:
    """What each tenant holds, over its weight: of the slots or of the KV blocks, whichever is the larger share."""

    def __init__(self, running: Iterable[Sequence], num_slots: int, num_blocks: int) -> None:
        self._num_slots = num_slots
        self._num_blocks = num_blocks
        self._held: dict[str, tuple[int, int]] = {}
        for sequence in running:
            slots, blocks = self._held.get(sequence.tenant, (0, 0))
            self._held[sequence.tenant] = slots + 1, blocks + len(sequence.block_table)

    def of(self, sequence: Sequence, more_slots: int = 0, more_blocks: int = 0) -> float:
        """Return the share of a sequence's tenant, if it held so much more than it does."""
        slots, blocks = self._held.get(sequence.tenant, (0, 0))
        largest = max((slots + more_slots) / self._num_slots, (blocks + more_blocks) / self._num_blocks)
        return largest / sequence.request.weight

    def without(self, sequence: Sequence) -> float:
        """Return what would be the share of a running sequence's tenant without it."""
        return self.of(sequence, -1, -len(sequence.block_table))

    def drop(self, sequence: Sequence) -> None:
        """Take a running sequence's part away."""
        slots, blocks = self._held[sequence.tenant]
        self._held[sequence.tenant] = slots - 1, blocks - len(sequence.block_table)


class LongWaits:
    """Decides what is preempted for a sequence that has waited; ``patience`` is in seconds.

    No sequence is preempted for a tenant that would then hold more than the preempted one held before, nor within a
    patience of having been let in. Each tenant gets in so once in a patience. Where the preempted one would hold less
    than the other then, as where all have one reply, the two take turns: once in a patience in the whole engine, and
    only once the reply that leaves was worth what is to be computed again.
    """

    def __init__(self, patience: float, max_num_seqs: int, blocks: BlockManager) -> None:
        self.patience = patience
        self._max_seqs = max_num_seqs
        self._blocks = blocks
        self._let_in: dict[str, float] = {}  # when a tenant got in so, those of the last patience
        self._took_turn = -self.patience  # when one last took another's turn
        self._is_turn = False  # whether the sequence last preempted for takes one

    def shares(self, running: Iterable[Sequence]) -> Shares:
        """Return what tenants hold."""
        return Shares(running, self._max_seqs, self._blocks.num_blocks)

    def choose_preempted(
        self, sequence: Sequence, free: list[Sequence], bound: list[Sequence], now: float
    ) -> list[Sequence] | None:
        """Return what is to leave so that a sequence gets in, perhaps none; None if it has to go on waiting.

        Those in ``free`` leave first, in that order, whatever their tenant; then of the ``bound`` those whose
        tenant holds most, the latest first.
        """
        if now - self._let_in.get(sequence.tenant, -self.patience) < self.patience:
            return None
        shares = self.shares(bound)
        wanted = shares.of(sequence, 1, self._blocks.blocks_for(len(sequence.token_ids)))
        by_tenant: dict[str, list[Sequence]] = {}
        for other in sorted(bound, key=lambda s: s.tenancy.place):
            if other.tenant != sequence.tenant and shares.of(other) >= wanted:
                by_tenant.setdefault(other.tenant, []).append(other)
        if not by_tenant:
            return None
        self._is_turn = False
        blocks, slots = self._lacking(sequence, len(free) + len(bound))
        leaving: list[Sequence] = []
        while blocks > 0 or slots > 0:
            if len(leaving) < len(free):
                other = free[len(leaving)]
            else:
                held = max(filter(None, by_tenant.values()), key=lambda held: shares.of(held[-1]), default=None)
                if held is None or shares.of(held[-1]) < wanted:
                    return None
                other = held.pop()
                is_turn = shares.without(other) < wanted
                if now - other.tenancy.since < self.patience or (is_turn and not self._may_take_turn(other, now)):
                    continue
                self._is_turn |= is_turn
                shares.drop(other)
            leaving.append(other)
            blocks, slots = blocks - len(other.block_table), slots - 1
        return leaving

    def note_admission(self, tenant: str, now: float) -> None:
        """Record that the sequence that others were preempted for is in."""
        self._let_in = {name: at for name, at in self._let_in.items() if now - at < self.patience}
        self._let_in[tenant] = now
        if self._is_turn:
            self._took_turn = now

    def _lacking(self, sequence: Sequence, num_running: int) -> tuple[int, int]:
        """Return the blocks and the slots that a sequence lacks; none where they are not positive."""
        blocks = self._blocks.blocks_for(len(sequence.token_ids)) + num_running
        return blocks - self._blocks.available_to(sequence.tenant), num_running - self._max_seqs + 1

    def _may_take_turn(self, sequence: Sequence, now: float) -> bool:
        generated = len(sequence.token_ids) - sequence.tenancy.num_at_admission
        return now - self._took_turn >= self.patience and MOST_AGAIN * generated >= len(sequence.token_ids)
