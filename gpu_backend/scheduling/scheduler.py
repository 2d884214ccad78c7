# Which sequences run in the next step. Running decodes first, one token each; then chunks of prompts, within one
# token budget; then waiting sequences, as far as there is room. When blocks run out, the scheduler preempts a sequence,
# which is computed again later.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from time import monotonic

from gpu_backend.kv_cache.block_tables import BlockTables
from gpu_backend.kv_cache.blocks import BlockManager
from gpu_backend.scheduling.admission import Admission
from gpu_backend.scheduling.budget import StepBudget
from gpu_backend.scheduling.replies import RequestReplies
from gpu_backend.scheduling.swapping import SwapChoice
from gpu_backend.speculation.planner import Speculator
from gpu_backend.step.config import EngineConfig
from gpu_backend.step.cost import StepWork
from gpu_backend.step.plan import BlockCopy, SequenceStep, StepPlan
from gpu_backend.step.sequence import Sequence, Status

MOST_HELD_UP = 4  # steps in a row that leave prompts of many steps less than a block's worth; then these go first


class Scheduler:
    """Owns every unfinished sequence: waiting in a queue, or running with blocks of the KV cache.

    A sequence gets blocks for all its tokens when it is admitted, and one more whenever a decode fills its last, so
    only decodes can run out of room. A preempted sequence keeps its place. Its blocks are copied to host memory, or
    released: then it is computed again, as far as they are no longer cached. ``swapping`` chooses.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        clock: Callable[[], float] = monotonic,
        speculator: Speculator | None = None,
        swapping: SwapChoice | None = None,
    ) -> None:
        self.blocks = blocks
        self.swapping = swapping
        self.speculator = speculator
        self.admission = Admission(config, blocks, clock)
        self.num_preemptions = 0
        self.num_preempted_for_starved = 0  # preemptions for a sequence that had waited for long
        self.num_swaps = 0  # preemptions by a copy to host memory
        self.prompt_tokens_seen = 0
        self.prompt_tokens_found = 0
        self._config = config
        self._max_seqs = config.max_num_seqs
        self._prefix_caching = config.prefix_caching
        self._tables = BlockTables(blocks, config.prefix_caching)
        self._running: dict[int, Sequence] = {}  # in the order of admission
        self._rows = list(range(config.max_num_seqs))  # free ones
        self._replies = RequestReplies(blocks.block_size)
        self._step = 0
        self._held_up = 0  # steps in a row in which prompts of many steps got less than a block's worth

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks, replies that wait for their first one's prompt included."""
        return len(self._replies) - len(self._running)

    @property
    def num_running(self) -> int:
        """Sequences with blocks."""
        return len(self._running)

    def has_work(self) -> bool:
        """Whether there is anything to compute."""
        return len(self._replies) > 0

    def running(self, sequence_id: int) -> Sequence | None:
        """Return the sequence of that id if it has blocks: one that has ended, or waits, has none."""
        return self._running.get(sequence_id)

    def add(self, replies: list[Sequence]) -> None:
        """Queue all replies of one request. The first computes the prompt; the others then share its full blocks."""
        leader = self._replies.add(replies)
        if self._prefix_caching and not leader.pools:
            self._tables.extend_hashes(leader)  # what waits is looked up in the cache again and again
        self.admission.add(leader)

    def all_running(self) -> list[Sequence]:
        """Return the sequences with blocks, in the order of their admission."""
        return list(self._running.values())

    def replies_of(self, request_id: str, reply_index: int | None = None) -> list[Sequence]:
        """Return a request's unfinished replies, or the one of that index; none if it is unknown or done."""
        return self._replies.of(request_id, reply_index)

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence go, finished or not; its blocks are available at once."""
        match sequence.status:
            case Status.RUNNING:
                del self._running[sequence.sequence_id]
                self._rows.append(sequence.row)
                self._tables.release(sequence)
                self.admission.leave(sequence)
            case Status.WAITING | Status.PREEMPTED | Status.SWAPPED:
                self._tables.release(sequence)
                self.admission.remove(sequence)
            case Status.FOLLOWING | Status.FINISHED:
                pass  # in no queue, and without blocks
        sequence.status = Status.FINISHED
        self.admission.add_first(self._replies.remove(sequence))

    def schedule(self, may_preempt: bool = True) -> StepPlan | None:
        """Choose what the next step computes, and give it room. The plan is empty if there is nothing to compute.

        A planned step counts as computed. While results of earlier ones are due, ``may_preempt`` is false: None then
        says that a sequence must be preempted first, or that drafts wait for tokens; call it again once all tokens are
        known.
        """
        goes_ahead = self._goes_ahead()
        if not may_preempt and not goes_ahead and self._drafts_wait_for_tokens():
            return None
        if not self._preempt_for_waiting(may_preempt):
            return None
        preemptions = self.num_preemptions
        if not self._grow_decodes(may_preempt):
            return None
        self._step += 1
        decodes, prompts = self._split_running()
        steps = [sequence.plan(1, self.blocks.block_size) for sequence in decodes]
        budget = self._budget(decodes, steps)
        steps += self._plan_prompts(prompts, budget, may_admit=preemptions == self.num_preemptions)
        if self.speculator is not None:
            goes_ahead = goes_ahead and len(decodes) == len(steps)
            knows_tokens = may_preempt or goes_ahead
            steps = self.speculator.extend(
                steps, self._running, self.blocks, self._step, goes_ahead=goes_ahead, knows_tokens=knows_tokens
            )
        return StepPlan(self._step, tuple(steps), self.blocks.take_copies())

    def advance(self, sequence: Sequence, end: int) -> None:
        """Record that a running sequence's first ``end`` tokens are computed; full blocks can be found from now on."""
        if self.speculator is not None:
            self._tables.trim(sequence)
        if not sequence.pools and end // self.blocks.block_size > sequence.num_published:
            self._tables.publish(sequence, end)
        if sequence.followers and end >= sequence.num_prompt:
            self.admission.add_first(self._replies.release_followers(sequence))

    def invalidate(self, sequence: Sequence) -> None:
        """Stop sharing the blocks of a sequence whose numbers went wrong."""
        self.blocks.forget(sequence.block_table)

    def invalidate_copies(self, copies: Iterable[BlockCopy]) -> None:
        """Compute again what these copies may not have brought to where it should be."""
        targets = {copy.target for copy in copies if copy.to_host}
        for sequence in self._queued():
            if not targets.isdisjoint(sequence.swapped):
                self._tables.release(sequence)
                sequence.status = Status.PREEMPTED
        self.blocks.invalidate_copies(copies)

    def service_gaps(self) -> dict[str, float]:
        """Return how far the service of waiting tenants lies apart in each tier, and how far it could."""
        self.admission.charge(self._running.values())
        queues = self.admission.queues.items()
        return {f"service_gap_{tier}": queue.gap() for tier, queue in queues} | {
            f"service_bound_{tier}": queue.bound for tier, queue in queues
        }

    def check(self) -> None:
        """Assert that every sequence is in one place, and that exactly the running ones hold blocks."""
        queued = list(self._queued())
        self.blocks.check((s.block_table for s in self._running.values()), (s.swapped for s in queued))
        for sequence in self._running.values():
            covered = len(sequence.block_table) * self.blocks.block_size
            assert covered >= sequence.num_computed, "a sequence was computed beyond its blocks"
            assert sequence.remaining >= (0 if sequence.pools else 1), "a running sequence has nothing to compute"
        rows = [*self._rows, *(sequence.row for sequence in self._running.values())]
        assert sorted(rows) == list(range(self._max_seqs)), "a row is lost, or belongs to two"
        assert not any(s.block_table for s in queued), "a waiting sequence holds blocks"
        kept = (len(s.swapped) * self.blocks.block_size for s in queued)
        assert all(s.num_computed <= n for s, n in zip(queued, kept, strict=True)), "computed, but not kept"
        everyone = sorted(s.sequence_id for s in chain(self._running.values(), queued))
        assert everyone == sorted(s.sequence_id for s in self._replies), "a sequence is in no place, or in two"
        for sequence in self._replies:
            assert (sequence.status is Status.RUNNING) == (sequence.sequence_id in self._running), "a status is wrong"
            assert (sequence.status is Status.SWAPPED) == bool(sequence.swapped), "a status is wrong"
        self._replies.check()
        self.admission.check(s for s in chain(self._running.values(), queued) if s.tenancy.place)

    def _goes_ahead(self) -> bool:
        """Whether the device drafts: none waits, and no sequence's tokens take more than the device knows."""
        running, speculator = self._running.values(), self.speculator
        return (
            speculator is not None
            and 0 < len(running) <= speculator.most_ahead
            and not self.num_waiting
            and all(map(speculator.may_go_ahead, running))
        )

    def _drafts_wait_for_tokens(self) -> bool:
        """Whether it is not known where sequences stand, or drafts need the tokens that are under way."""
        if self.speculator is None:
            return False
        return self.speculator.wants_to_draft or any(s.num_awaited > 1 for s in self._running.values())

    def _split_running(self) -> tuple[list[Sequence], list[Sequence]]:
        """Return the sequences that decode and those with more to compute, each in the order of admission."""
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self._running.values():
            if count := sequence.num_to_plan:
                (decodes if count == 1 else prompts).append(sequence)
        return decodes, prompts

    def _budget(self, decodes: list[Sequence], steps: list[SequenceStep]) -> StepBudget:
        num_batch = num_batch_decodes = 0
        if self._config.max_batch_tier_tokens is not None:
            num_batch = sum(sequence.tier == "batch" for sequence in self._running.values())
            num_batch_decodes = sum(sequence.tier == "batch" for sequence in decodes)
        return StepBudget(self._config, self._config.step_cost, steps, num_batch, num_batch_decodes)

    def _plan_prompts(self, prompts: list[Sequence], budget: StepBudget, may_admit: bool) -> list[SequenceStep]:
        """Return chunks of prompts, of those let in now, too. Prompts of many steps neither keep others waiting
        nor wait for them for ever.
        """
        long = [sequence for sequence in prompts if budget.is_long(sequence)]
        is_turn_of_long = self._held_up >= MOST_HELD_UP
        if long and not is_turn_of_long:
            budget.keep_half()
        of_long = self._chunks(long, budget) if is_turn_of_long else []
        steps = of_long + self._chunks([sequence for sequence in prompts if sequence not in long], budget)
        if may_admit and self._next_to_admit(budget):
            self.admission.charge(self._running.values())
            while (admitted := self._admit_next(budget)) is not None:
                budget.note_admission(admitted.tier)
                steps += self._chunks([admitted], budget)
        budget.open_rest()
        if not is_turn_of_long:
            of_long = self._chunks(long, budget)
            steps += of_long
        is_held_up = long and sum(len(step.token_ids) for step in of_long) < self.blocks.block_size
        self._held_up = self._held_up + 1 if is_held_up else 0
        return steps

    def _chunks(self, prompts: Iterable[Sequence], budget: StepBudget) -> list[SequenceStep]:
        """Give prompts what the budget has for them; one that gets nothing is in no step."""
        size = self.blocks.block_size
        return [sequence.plan(count, size) for sequence in prompts if (count := budget.take(sequence))]

    def _preempt_for_waiting(self, may_preempt: bool) -> bool:
        """Preempt for a sequence that waits; say whether that may be."""
        for_tier = self.admission.preempt_for_tier(self._running.values())
        leaving = for_tier or self.admission.preempt_for_starved(self._running.values())
        if leaving and not may_preempt:
            return False
        for sequence in leaving:
            if not for_tier:
                sequence.tenancy.preempted_for_starved = True
                self.num_preempted_for_starved += 1
            self._preempt(sequence)
        return True

    def _grow_decodes(self, may_preempt: bool) -> bool:
        """Give each decode the block its next token needs, preempting others or itself if it ``may_preempt``."""
        block_size = self.blocks.block_size
        for sequence in list(self._running.values()):
            is_full = len(sequence.block_table) * block_size <= sequence.num_computed
            if not is_full or not sequence.num_to_plan:
                continue
            while sequence.sequence_id in self._running and not self._tables.grow(sequence):
                if not may_preempt:
                    return False
                self._preempt(self.admission.preempt_for_memory(self._running.values()))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        assert not sequence.num_awaited, "a sequence is preempted while its next token is under way"
        del self._running[sequence.sequence_id]
        self._rows.append(sequence.row)
        if self._pays_to_swap(sequence) and self._tables.swap_out(sequence):
            self.num_swaps += 1
            sequence.status = Status.SWAPPED
        else:
            self._tables.release(sequence)
            sequence.status = Status.PREEMPTED
        self.admission.put_back(sequence)
        self.num_preemptions += 1

    def _pays_to_swap(self, sequence: Sequence) -> bool:
        """Whether copying what a sequence has computed takes less than computing it again."""
        kept = self.blocks.blocks_for(sequence.num_computed)
        if self.swapping is None or not kept:
            return False
        context = sum(other.num_computed for other in self._running.values())
        running = StepWork(len(self._running), context, context)
        return self.swapping.pays(running, sequence.num_computed, kept)

    def _admit_next(self, budget: StepBudget) -> Sequence | None:
        """Move the next sequence to the running ones; None if there is none or no room."""
        if (sequence := self._next_to_admit(budget)) is None:
            return None
        is_room = self.admission.is_room_for(sequence, self._running.values())
        # Each running sequence can fill a block before any must be preempted.
        if not is_room or not self._tables.fill(sequence, headroom=len(self._running)):
            self.admission.refuse(sequence)
            return None
        self._running[sequence.sequence_id] = sequence
        sequence.row = self._rows.pop()
        sequence.num_on_device = 0
        self._count_prefix(sequence)
        self.admission.admit(sequence)
        sequence.status = Status.RUNNING
        return sequence

    def _next_to_admit(self, budget: StepBudget) -> Sequence | None:
        """Return the sequence to be tried next, if there is a slot and some budget left."""
        lets_in = len(self._running) < self._max_seqs and budget.allows("interactive")
        sequence = self.admission.next(self._running.values(), budget.admits_batch) if lets_in else None
        if sequence and not self.admission.was_refused(sequence):
            return sequence
        return None

    def _count_prefix(self, sequence: Sequence) -> None:
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, sequence.num_prompt)
            self.prompt_tokens_seen += sequence.num_prompt
            self.prompt_tokens_found += sequence.cached_tokens

    def _queued(self) -> Iterator[Sequence]:
        return (sequence for sequence in self._replies if sequence.status is not Status.RUNNING)
