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
from gpu_backend.scheduling.running import RunningSequences, SwapChoice
from gpu_backend.speculation.planner import Speculator
from gpu_backend.step.config import EngineConfig
from gpu_backend.step.plan import BlockCopy, SequenceStep, StepPlan
from gpu_backend.step.sequence import Sequence, Status


class Scheduler:
    """Moves every unfinished sequence: those of ``replies`` wait in ``admission``, or are ``running``.

    A sequence gets blocks for all its tokens when it is admitted, and one more whenever a decode fills its last, so
    only decodes can run out of room. A preempted sequence keeps its place.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        clock: Callable[[], float] = monotonic,
        speculator: Speculator | None = None,
        swapping: SwapChoice | None = None,
        keeps_states: bool = False,
    ) -> None:
        self.blocks = blocks
        self.speculator = speculator
        self.tables = BlockTables(blocks, config.prefixes.prefix_caching, keeps_states)
        self.running = RunningSequences(config.steps.max_num_seqs, blocks, self.tables, swapping)
        self.admission = Admission(config, blocks, clock)
        self.replies = RequestReplies(blocks.block_size)
        self._config = config.steps
        self._prompts = PromptChunks(blocks.block_size)
        self._step = 0

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks, replies that wait for their first one's prompt included."""
        return len(self.replies) - len(self.running.by_id)

    def add(self, replies: list[Sequence]) -> None:
        """Queue all replies of one request. The first computes the prompt; the others then share its full blocks."""
        leader = self.replies.add(replies)
        self.tables.name_waiting(leader)
        self.admission.add(leader)

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence go, finished or not; its blocks are available at once."""
        match sequence.status:
            case Status.RUNNING:
                self.running.remove(sequence)
                self.admission.leave(sequence)
            case Status.WAITING | Status.PREEMPTED | Status.SWAPPED:
                self.tables.release(sequence)
                self.admission.remove(sequence)
            case Status.FOLLOWING | Status.FINISHED:
                pass  # in no queue, and without blocks
        sequence.status = Status.FINISHED
        self.admission.add_first(self.replies.remove(sequence))

    def schedule(self, may_preempt: bool = True) -> StepPlan | None:
        """Choose what the next step computes, and give it room. The plan is empty if there is nothing to compute.

        A planned step counts as computed. While results of earlier ones are due, ``may_preempt`` is false: None then
        says that a sequence must be preempted first, or that drafts wait for tokens; call it again once all tokens are
        known.
        """
        running, size, speculator = self.running.by_id, self.blocks.block_size, self.speculator
        goes_ahead = speculator is not None and speculator.goes_ahead(running, self.replies)
        if speculator is not None and not may_preempt and not goes_ahead and speculator.waits_for_tokens(running):
            return None
        if not self._preempt_for_waiting(may_preempt):
            return None
        num_preempted = self.running.num_preempted
        if not self._grow_running(may_preempt):
            return None

        # Decodes, then chunks of prompts, then what is let in: nothing where those that run had too little room.
        self._step += 1
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in running.values():
            if count := sequence.num_to_plan:
                (decodes if count == 1 else prompts).append(sequence)
        steps = [sequence.plan(1, size) for sequence in decodes]
        budget = StepBudget(self._config, size, steps, running)
        admitted = self._admitted(budget) if num_preempted == self.running.num_preempted else ()
        steps += self._prompts.plan(prompts, admitted, budget)
        if speculator is not None:
            goes_ahead = goes_ahead and len(decodes) == len(steps)
            knows_tokens = may_preempt or goes_ahead
            steps = speculator.extend(steps, running, self.blocks, self._step, goes_ahead, knows_tokens)
        return StepPlan(self._step, tuple(steps), self.blocks.take_copies())

    def _preempt_for_waiting(self, may_preempt: bool) -> bool:
        """Preempt for those that wait and go before; say whether all that must be preempted could be."""
        for_tier = self.admission.preempt_for_tier(self.running.by_id.values())
        leaving = for_tier or self.admission.preempt_for_starved(self.running.by_id.values())
        if leaving and not may_preempt:
            return False
        for sequence in leaving:
            self._preempt(sequence, for_starved=not for_tier)
        return True

    def _grow_running(self, may_preempt: bool) -> bool:
        """Give running sequences the blocks that their next tokens need, preempting for them; say whether all have."""
        running, size = self.running.by_id, self.blocks.block_size
        for sequence in list(running.values()):
            if len(sequence.block_table) * size > sequence.num_computed or not sequence.num_to_plan:
                continue
            while sequence.sequence_id in running and not self.tables.grow(sequence):
                if not may_preempt:
                    return False
                self._preempt(self.admission.preempt_for_memory(running.values()))
        return True

    def advance(self, sequence: Sequence, end: int) -> None:
        """Record that a running sequence's first ``end`` tokens are computed; full blocks can be found from now on."""
        if self.speculator is not None:
            self.tables.trim(sequence)
        if not sequence.pools and end // self.blocks.block_size > sequence.num_published:
            self.tables.publish(sequence, end)
        if sequence.followers and end >= sequence.num_prompt:
            self.admission.add_first(self.replies.release_followers(sequence))

    def invalidate_copies(self, copies: Iterable[BlockCopy]) -> None:
        """Compute again what these copies may not have brought to where it should be."""
        targets = {copy.target for copy in copies if copy.to_host}
        for sequence in self.replies:
            if not targets.isdisjoint(sequence.swapped):
                self.tables.release(sequence)
                sequence.status = Status.PREEMPTED
        self.blocks.invalidate_copies(copies)

    def check(self) -> None:
        """Assert that every sequence is in one place, and that exactly the running ones hold blocks."""
        running = list(self.running)
        queued = [sequence for sequence in self.replies if sequence.status is not Status.RUNNING]
        tables = chain((s.block_table for s in running), self.tables.apart.values())
        self.blocks.check(tables, (s.swapped for s in queued))
        self.running.check()
        assert not any(s.block_table for s in queued), "a waiting sequence holds blocks"
        kept = (len(s.swapped) * self.blocks.block_size for s in queued)
        assert all(s.num_computed <= n for s, n in zip(queued, kept, strict=True)), "computed, but not kept"
        everyone = sorted(s.sequence_id for s in chain(running, queued))
        assert everyone == sorted(s.sequence_id for s in self.replies), "a sequence is in no place, or in two"
        for sequence in self.replies:
            is_running = sequence.sequence_id in self.running.by_id
            assert (sequence.status is Status.RUNNING) == is_running, "a status is wrong"
            assert (sequence.status is Status.SWAPPED) == bool(sequence.swapped), "a status is wrong"
        self.replies.check()
        self.admission.check(s for s in chain(running, queued) if s.tenancy.place)

    def _admitted(self, budget: StepBudget) -> Iterator[Sequence]:
        """Let the next sequences in, one by one, while there is a slot, some budget left, and room."""
        running = self.running.by_id.values()
        if self.admission.next(running, budget) is None:
            return
        self.admission.charge(running)
        while (sequence := self.admission.next(running, budget)) is not None:
            if not self.admission.is_room_for(sequence, running) or not self.running.admit(sequence):
                self.admission.refuse(sequence)
                return
            self.admission.admit(sequence)
            sequence.status = Status.RUNNING
            budget.note_admission(sequence.tier)
            yield sequence

    def _preempt(self, sequence: Sequence, for_starved: bool = False) -> None:
        self.running.preempt(sequence)
        self.admission.put_back(sequence, for_starved)


MOST_HELD_UP = 4  # steps in a row that leave prompts of many steps less than a block's worth; then these go first


class PromptChunks:
    """Cuts chunks off prompts, within a step's budget; half of it is kept for prompts of many steps."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._held_up = 0  # steps in a row in which prompts of many steps got less than a block's worth

    def plan(self, prompts: list[Sequence], admitted: Iterable[Sequence], budget: StepBudget) -> list[SequenceStep]:
        """Return chunks of prompts, and of those that are ``admitted``, one after the other, while there is budget."""
        long = [sequence for sequence in prompts if budget.is_long(sequence)]
        goes_first = self._held_up >= MOST_HELD_UP
        if long and not goes_first:
            budget.keep_half()
        of_long = self._cut(long, budget) if goes_first else []
        steps = of_long + self._cut([sequence for sequence in prompts if sequence not in long], budget)
        steps += self._cut(admitted, budget)
        budget.open_rest()
        if not goes_first:
            of_long = self._cut(long, budget)
            steps += of_long
        is_held_up = long and sum(len(step.token_ids) for step in of_long) < self._block_size
        self._held_up = self._held_up + 1 if is_held_up else 0
        return steps

    def _cut(self, prompts: Iterable[Sequence], budget: StepBudget) -> list[SequenceStep]:
        """Give prompts what the budget has for them; one that gets nothing is in no step."""
        size = self._block_size
        return [sequence.plan(count, size) for sequence in prompts if (count := budget.take(sequence))]
