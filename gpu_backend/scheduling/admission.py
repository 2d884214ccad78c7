# Which sequence is admitted next, and which is preempted: interactive work before batch work, in each tier the tenant
# served least. Batch work fills what interactive work leaves, gives it back at once, and yet never starves.

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator

from gpu_backend.kv_cache.blocks import BlockManager
from gpu_backend.scheduling.budget import StepBudget
from gpu_backend.scheduling.fairness import FairQueue
from gpu_backend.scheduling.forecast import LengthForecast, highest_use, remaining_tokens
from gpu_backend.scheduling.long_waits import LongWaits
from gpu_backend.step.config import EngineConfig
from gpu_backend.step.sequence import Sequence

TIERS = ("interactive", "batch")  # in the order in which they are served
SPREAD = 0.4  # of the forecast for one reply, as a share of the room; many replies make up for each other
MOST_MARGIN = 0.1  # of the room, kept free for forecasts that fail
LOOKS = 16  # at what tenants hold, within one patience


class Admission:
    """Owns all waiting sequences, and knows what each tenant is owed.

    A preempted sequence waits before all newcomers of its tier, in the order of the first admissions. When none of
    the batch tier was admitted for ``batch_patience`` seconds, the next of them passes interactive work, and is
    preempted no more. One that waited for ``interactive_patience`` seconds while another tenant held more goes before
    all, and replies of that tenant are preempted.
    """

    def __init__(self, config: EngineConfig, blocks: BlockManager, clock: Callable[[], float]) -> None:
        self.queues = {tier: FairQueue(config.cached_lead_tokens, self._num_cached) for tier in TIERS}
        self.forecast = LengthForecast()
        self._blocks = blocks
        self._clock = clock
        self._patience = config.fairness.batch_patience
        self._max_seqs = config.steps.max_num_seqs
        self._caps_batch = config.steps.max_batch_tier_tokens is not None
        self._long_waits = LongWaits(config.fairness.interactive_patience, config.steps.max_num_seqs, blocks)
        self._starved: Sequence | None = None  # goes next, for it has waited
        self._look_again = 0.0  # when to see whether any has
        self._max_waiting = config.fairness.max_waiting
        self.headroom = int(config.fairness.interactive_headroom * blocks.num_blocks)
        self.num_preempted_for_starved = 0  # preemptions for a sequence that had waited for long
        self._refused: Sequence | None = None  # found no room, and none has left since
        self._batch_admitted = 0.0  # when batch work was last let in
        self._places = 0

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over all waiting sequences, in no particular order."""
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

    def put_back(self, sequence: Sequence, for_starved: bool) -> None:
        """Let a preempted sequence wait at its place."""
        sequence.tenancy.since, sequence.tenancy.was_starved = self._clock(), False
        sequence.tenancy.preempted_for_starved = for_starved
        self.num_preempted_for_starved += for_starved
        self.queues[sequence.tier].put_back(sequence)
        self.reconsider()

    def remove(self, sequence: Sequence) -> None:
        """Let a waiting sequence go."""
        if sequence is self._starved:
            self._starved = None
        self.queues[sequence.tier].remove(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Record the end of a running sequence."""
        self.queues[sequence.tier].leave(sequence)
        self.reconsider()
        if sequence.num_generated and not sequence.pools:
            self.forecast.learn(sequence.num_generated)

    def next(self, running: Collection[Sequence], budget: StepBudget) -> Sequence | None:
        """Return the sequence to be tried next; None without a slot, some budget, or one that was not refused."""
        if len(running) >= self._max_seqs or not budget.allows("interactive"):
            return None
        sequence = self._next(running, budget.admits_batch)
        return None if sequence is self._refused else sequence

    def _next(self, running: Collection[Sequence], lets_batch_in: bool) -> Sequence | None:
        """Return the sequence whose turn it is. Batch work that is not let in keeps no other waiting."""
        if self._starved is not None:
            return self._starved
        aged = self._aged(self._clock()) if lets_batch_in else None
        if aged is not None:
            return aged
        interactive, batch = self.queues.values()
        head = interactive.head()
        if head is None:
            return batch.head() if lets_batch_in else None
        if head.tenancy.preempted_for_starved and (newcomer := interactive.newcomer()) is not None:
            shares = self._long_waits.shares(running)
            blocks = self._blocks.blocks_for(len(newcomer.token_ids))
            if newcomer.tenant != head.tenant and shares.of(newcomer, 1, blocks) <= shares.of(head):
                return newcomer  # what was won for its tenant stays with it while it holds less
        return head

    def before(self, tier: str) -> list[Sequence]:
        """Return all sequences that go before a newcomer of that tier."""
        return [sequence for name in TIERS[: TIERS.index(tier) + 1] for sequence in self.queues[name]]

    @property
    def lacks_room(self) -> bool:
        """Whether a sequence found no room, and none has left since."""
        return self._refused is not None

    def refuse(self, sequence: Sequence) -> None:
        """Remember that there was no room, so that it is not tried again at every step."""
        self._refused = sequence

    def is_room_for(self, sequence: Sequence, running: Collection[Sequence]) -> bool:
        """Whether all that run and this one will fit to their ends, by the forecast; any fits alone.

        For interactive work, batch work is no obstacle; batch work leaves the headroom free. A sequence that has
        waited for the running ones needs no forecast: if they do not fit to their ends, they do not without it.
        """
        if sequence is self._starved:
            return True
        blocks = self._blocks
        yields = _may_be_preempted(sequence)
        room = blocks.num_blocks - (self.headroom if yields else 0)
        needed = blocks.blocks_for(len(sequence.token_ids))
        longest = blocks.blocks_for(self.forecast.longest) * (len(running) + 1)
        if blocks.num_in_use + needed + longest <= room:
            return True
        staying = running if yields else [s for s in running if not _may_be_preempted(s)]
        if not staying:
            return True
        gone = sum(len(s.block_table) for s in running) - sum(len(s.block_table) for s in staying)
        replies = [(len(s.block_table), remaining_tokens(s, self.forecast)) for s in staying]
        replies.append((needed, remaining_tokens(sequence, self.forecast)))
        in_use = max(blocks.num_in_use - gone, 0) + needed
        margin = min(MOST_MARGIN, SPREAD / math.sqrt(len(replies)))
        return highest_use(replies, in_use, blocks.block_size) <= room * (1 - margin)

    def charge(self, running: Iterable[Sequence]) -> None:
        """Record what the running sequences generated since the last time."""
        for sequence in running:
            if len(sequence.token_ids) > sequence.tenancy.num_charged:
                self.queues[sequence.tier].charge_reply(sequence)

    def admit(self, sequence: Sequence) -> None:
        """Take ``next`` out of its queue; its tenant pays for the tokens of its prompt that were not cached."""
        queue = self.queues[sequence.tier]
        queue.pop(sequence, self._most_tokens(sequence))
        if not sequence.tenancy.place:
            self._places += 1
            sequence.tenancy.place = self._places
            queue.charge_prompt(sequence, sequence.remaining)
        now = self._clock()
        tenancy = sequence.tenancy
        tenancy.since, tenancy.num_at_admission, tenancy.preempted_for_starved = now, len(sequence.token_ids), False
        if sequence is self._starved:
            self._starved = None
            tenancy.was_starved = True
            self._long_waits.note_admission(sequence.tenant, now)
        if sequence.tier == "batch":
            self._batch_admitted = now

    def preempt_for_memory(self, running: Collection[Sequence]) -> Sequence:
        """Choose the sequence to preempt: batch work before interactive work, the latest admitted before the earlier.

        Where that one had waited for others, it is the latest of the tenant that holds most.
        """
        latest = max(running, key=lambda sequence: (_may_be_preempted(sequence), sequence.tenancy.place))
        if not latest.tenancy.was_starved or _may_be_preempted(latest):
            return latest
        shares = self._long_waits.shares(running)
        return max(running, key=lambda sequence: (shares.of(sequence), sequence.tenancy.place))

    def preempt_for_starved(self, running: Collection[Sequence]) -> list[Sequence]:
        """Return what is preempted for a sequence that waited long enough and now goes next; often none."""
        if not any(map(len, self.queues.values())):
            return []
        now = self._clock()
        if self._starved is None and now < self._look_again:
            return []
        before, self._starved = self._starved, None
        self.charge(running)
        for sequence in self._find_starved(running, now):
            is_batch = sequence.tier == "batch"
            free: list[Sequence] = []
            if not is_batch:
                free = sorted(filter(_may_be_preempted, running), key=lambda s: s.tenancy.place, reverse=True)
            bound = [s for s in running if is_batch or not _may_be_preempted(s)]
            leaving = self._long_waits.choose_preempted(sequence, free, bound, now)
            if leaving is None or not (leaving or self.lacks_room or sequence is before):
                continue  # or it gets in as it is
            self._starved = sequence
            if sequence is self._refused:
                self._refused = None
            return leaving
        self._look_again = now + self._long_waits.patience / LOOKS
        return []

    def preempt_for_tier(self, running: Iterable[Sequence]) -> list[Sequence]:
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
        for sequence in sorted(filter(_may_be_preempted, everyone), key=lambda s: s.tenancy.place, reverse=True):
            if needed <= 0 and too_many <= 0:
                break
            leaving.append(sequence)
            needed -= len(sequence.block_table)
            too_many -= 1
        return leaving if needed <= 0 and too_many <= 0 else []

    def service_gaps(self, running: Iterable[Sequence]) -> dict[str, float]:
        """Return how far the service of waiting tenants lies apart in each tier, and how far it could."""
        self.charge(running)
        queues = self.queues.items()
        return {f"service_gap_{tier}": queue.gap() for tier, queue in queues} | {
            f"service_bound_{tier}": queue.bound for tier, queue in queues
        }

    def check(self, admitted: Iterable[Sequence]) -> None:
        """Assert that the accounting of all tenants adds up, given all that were admitted and have not ended."""
        everyone = list(admitted)
        for tier, queue in self.queues.items():
            queue.check(sequence for sequence in everyone if sequence.tier == tier)

    def _find_starved(self, running: Collection[Sequence], now: float) -> list[Sequence]:
        """Return those that may go next and have waited for their patience: aged batch work, then the longest first."""
        interactive = self.queues["interactive"]
        newcomer = interactive.newcomer()
        waiting = [*interactive.returning(), *([newcomer] if newcomer else [])]
        starved = [s for s in waiting if now - s.tenancy.since >= self._long_waits.patience]
        starved.sort(key=lambda s: s.tenancy.since)
        aged = self._aged(now)
        if aged is None or (self._caps_batch and any(s.tier == "batch" for s in running)):
            return starved
        return [aged, *starved]

    def _aged(self, now: float) -> Sequence | None:
        """Return the next of the batch tier, if it passes interactive work."""
        oldest = self.queues["batch"].first()
        if oldest is None:
            return None
        oldest.tenancy.is_aged = now - max(oldest.times.arrived, self._batch_admitted) >= self._patience
        return oldest if oldest.tenancy.is_aged else None

    def reconsider(self) -> None:
        """Forget that there was no room, now that there may be some."""
        self._refused = None
        for queue in self.queues.values():
            queue.reconsider()

    def _num_cached(self, sequence: Sequence) -> int:
        """Return how many leading blocks of a waiting prompt would be found, about."""
        if sequence.unscored_from is not None:  # what comes out of the cache has no logits
            return 0
        tenancy = sequence.tenancy
        tenancy.num_found = self._blocks.count_known(sequence.block_hashes, tenancy.num_found)
        return tenancy.num_found

    def _most_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens a sequence can still generate."""
        room = self._blocks.num_blocks * self._blocks.block_size - len(sequence.token_ids)
        return max(0, min(sequence.sampling.max_tokens - sequence.num_generated, room))


def _may_be_preempted(sequence: Sequence) -> bool:
    return sequence.tier == "batch" and not sequence.tenancy.is_aged
