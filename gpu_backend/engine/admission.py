# Who comes in next, and who gives way: interactive work before batch work, in each tier whoever was served least. Batch
# work fills what interactive work leaves, gives it back at once, and yet never starves.

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator

from gpu_backend.config import EngineConfig
from gpu_backend.engine.blocks import BlockManager
from gpu_backend.engine.fairness import FairQueue
from gpu_backend.engine.forecast import LengthForecast, highest_use, remaining_tokens
from gpu_backend.engine.sequence import Sequence

TIERS = ("interactive", "batch")  # in the order in which they are served
SPREAD = 0.4  # of the forecast for one reply, as a share of the room; many replies make up for each other
MOST_MARGIN = 0.1  # of the room, kept free for forecasts that fail


class Admission:
    """Owns everybody who waits, and knows who is owed what.

    A preempted sequence waits before all newcomers of its tier, in the order of the first admissions. When nobody of
    the batch tier was admitted for ``batch_patience`` seconds, the next of them passes interactive work, and gives way
    no more.
    """

    def __init__(self, config: EngineConfig, blocks: BlockManager, clock: Callable[[], float]) -> None:
        self.queues = {tier: FairQueue(config.cached_lead_tokens, self._num_cached) for tier in TIERS}
        self.forecast = LengthForecast()
        self._blocks = blocks
        self._clock = clock
        self._patience = config.batch_patience
        self._max_seqs = config.max_num_seqs
        self._max_waiting = config.max_waiting
        self._headroom = int(config.interactive_headroom * blocks.num_blocks)
        self._refused: Sequence | None = None  # found no room, and nobody has left since
        self._batch_admitted = 0.0  # when batch work was last let in
        self._places = 0

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over everybody who waits, in no particular order."""
        for queue in self.queues.values():
            yield from queue

    def is_full_for(self, tier: str, tenant: str) -> bool:
        """Whether a tenant has as many requests waiting as others could still add: so no tenant fills a queue alone."""
        queue = self.queues[tier]
        return queue.num_waiting_of(tenant) >= self._max_waiting - len(queue)

    def add(self, sequence: Sequence) -> None:
        """Let a newcomer wait."""
        self.queues[sequence.tier].add(sequence)

    def add_first(self, sequences: list[Sequence]) -> None:
        """Let further replies to a prompt wait before all else of their tenant."""
        if sequences:
            self.queues[sequences[0].tier].add_first(sequences)

    def put_back(self, sequence: Sequence) -> None:
        """Let a preempted sequence wait at its place."""
        self.queues[sequence.tier].put_back(sequence)
        self._reconsider()

    def remove(self, sequence: Sequence) -> None:
        """Let a waiting sequence go."""
        self.queues[sequence.tier].remove(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Book the end of a running sequence."""
        self.queues[sequence.tier].leave(sequence)
        self._reconsider()
        if sequence.num_generated and not sequence.pools:
            self.forecast.learn(sequence.num_generated)

    def next(self, lets_batch_in: bool = True) -> Sequence | None:
        """Return who goes next, or None if nobody waits. Call ``charge`` first.

        Batch work that is not let in, for its tier has what it may have, keeps nobody waiting.
        """
        interactive, batch = self.queues.values()
        if not lets_batch_in:
            return interactive.head()
        oldest = batch.first()
        if oldest is not None:
            oldest.is_aged = self._clock() - max(oldest.arrived, self._batch_admitted) >= self._patience
            if oldest.is_aged:
                return oldest
        return interactive.head() or batch.head()

    def before(self, tier: str) -> list[Sequence]:
        """Return everybody who goes before a newcomer of that tier."""
        return [sequence for name in TIERS[: TIERS.index(tier) + 1] for sequence in self.queues[name]]

    @property
    def lacks_room(self) -> bool:
        """Whether somebody found no room, and nobody has left since."""
        return self._refused is not None

    def was_refused(self, sequence: Sequence) -> bool:
        """Whether that one found no room, and nobody has left since."""
        return sequence is self._refused

    def refuse(self, sequence: Sequence) -> None:
        """Remember that there was no room, so that it is not tried again at every step."""
        self._refused = sequence

    def is_room_for(self, sequence: Sequence, running: Collection[Sequence]) -> bool:
        """Whether all who run and this one will fit to their ends, by the forecast; anybody fits alone.

        For interactive work, batch work is no obstacle; batch work leaves the headroom free.
        """
        blocks = self._blocks
        yields = _yields(sequence)
        room = blocks.num_blocks - (self._headroom if yields else 0)
        needed = blocks.blocks_for(len(sequence.token_ids))
        longest = blocks.blocks_for(self.forecast.longest) * (len(running) + 1)
        if blocks.num_in_use + needed + longest <= room:
            return True
        staying = running if yields else [s for s in running if not _yields(s)]
        if not staying:
            return True
        gone = sum(len(s.block_table) for s in running) - sum(len(s.block_table) for s in staying)
        replies = [(len(s.block_table), remaining_tokens(s, self.forecast)) for s in staying]
        replies.append((needed, remaining_tokens(sequence, self.forecast)))
        in_use = max(blocks.num_in_use - gone, 0) + needed
        margin = min(MOST_MARGIN, SPREAD / math.sqrt(len(replies)))
        return highest_use(replies, in_use, blocks.block_size) <= room * (1 - margin)

    def charge(self, running: Iterable[Sequence]) -> None:
        """Book what the running sequences generated since the last time."""
        for sequence in running:
            if len(sequence.token_ids) > sequence.num_charged:
                self.queues[sequence.tier].charge_reply(sequence)

    def admit(self, sequence: Sequence) -> None:
        """Take ``next`` out of its queue; its tenant pays for the tokens of its prompt that were not cached."""
        queue = self.queues[sequence.tier]
        queue.pop(sequence, self._most_tokens(sequence))
        if not sequence.place:
            self._places += 1
            sequence.place = self._places
            queue.charge_prompt(sequence, sequence.remaining)
        if sequence.tier == "batch":
            self._batch_admitted = self._clock()

    def who_gives_way(self, running: Iterable[Sequence]) -> Sequence:
        """Choose who loses its blocks: batch work before interactive work, the latest admitted before the earlier."""
        return max(running, key=lambda sequence: (_yields(sequence), sequence.place))

    def who_yields(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Return batch work that must leave so that the interactive request that goes next has room; none if it cannot.

        The latest admitted leaves first.
        """
        head = self.queues["interactive"].head()
        if head is None:
            return []
        everyone = list(running)
        needed = self._blocks.blocks_for(len(head.token_ids)) + len(everyone) - self._blocks.available_to(head.tenant)
        too_many = len(everyone) - self._max_seqs + 1
        leaving: list[Sequence] = []
        for sequence in sorted(filter(_yields, everyone), key=lambda s: s.place, reverse=True):
            if needed <= 0 and too_many <= 0:
                break
            leaving.append(sequence)
            needed -= len(sequence.block_table)
            too_many -= 1
        return leaving if needed <= 0 and too_many <= 0 else []

    def check(self, admitted: Iterable[Sequence]) -> None:
        """Assert that the books of all tenants are in order, given everybody who was admitted and has not ended."""
        everyone = list(admitted)
        for tier, queue in self.queues.items():
            queue.check(sequence for sequence in everyone if sequence.tier == tier)

    def _reconsider(self) -> None:
        self._refused = None
        for queue in self.queues.values():
            queue.reconsider()

    def _num_cached(self, sequence: Sequence) -> int:
        """Return how many leading blocks of a waiting prompt would be found, about."""
        if sequence.unscored_from is not None:  # what comes out of the cache has no logits
            return 0
        sequence.num_found = self._blocks.count_known(sequence.block_hashes, sequence.num_found)
        return sequence.num_found

    def _most_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens a sequence can still generate."""
        room = self._blocks.num_blocks * self._blocks.block_size - len(sequence.token_ids)
        return max(0, min(sequence.sampling.max_tokens - sequence.num_generated, room))


def _yields(sequence: Sequence) -> bool:
    return sequence.tier == "batch" and not sequence.is_aged
