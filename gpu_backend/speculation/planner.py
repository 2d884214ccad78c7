# Which sequences get drafts in a step, how many, and whether they pay: planned after everything else, within what the
# step's token budget leaves, in blocks that are given back with the drafts that did not hold.

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass

from gpu_backend.kv_cache.blocks import BlockManager
from gpu_backend.speculation.draft_account import DraftAccount
from gpu_backend.speculation.draft_blocks import lengthen, lengthen_ahead, note_drafted
from gpu_backend.speculation.draft_offers import DraftSource, device_offers, draft_from_text, draft_offers, text_offers
from gpu_backend.speculation.draft_value import Offer, StepFrame, best_lengths, could_pay, first_come, trial_lengths
from gpu_backend.speculation.step_times import StepTimes
from gpu_backend.step.config import EngineConfig
from gpu_backend.step.cost import StepCost, StepWork, plan_work
from gpu_backend.step.draft_record import DraftPrior, DraftRecord
from gpu_backend.step.limits import Limits
from gpu_backend.step.plan import SequenceStep, StepPlan
from gpu_backend.step.sequence import Sequence

MEASURED_EVERY = 16  # steps without drafts; their times are known, but may change
RETRIED_EVERY = 128  # steps, whatever was found to take too long
REST = 32  # steps with drafts, after which one without says what they save


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step that was planned, until its result is known."""

    frame: StepFrame
    work: StepWork  # drafts included
    drafting: float  # what making them takes by the cost table
    has_drafts: bool
    is_clean: bool  # nothing else is computed in it, so that its time says something about others


class Speculator:
    """Adds drafts to step plans while they pay, and learns from what became of them.

    ``cost`` is corrected by what steps take, drafts or none. ``draft_source`` makes drafts, at most as many as it is
    told; without it the draft model does, a pass of which takes ``draft_share`` of a step.
    """

    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        cost: StepCost,
        draft_source: DraftSource | None = None,
        draft_share: float = 0.0,
    ) -> None:
        self.draft_source = draft_source
        self.most_ahead = 0  # decodes for which the device drafts by itself
        self.is_forced = False  # draft whether it pays or not: for measurements
        self.num_drafts = 0  # times that a sequence's drafts were verified
        self.num_draft_tokens = 0  # drafts
        self.num_held_at = [0] * config.speculation.num_speculative_tokens  # drafts that held, by their place
        self.times = StepTimes(cost)
        self.account = DraftAccount()
        self._prior = DraftPrior()
        self._config = config
        self._max_model_len = max_model_len
        self._cost = cost
        self._draft_share = draft_share
        self._most = config.speculation.num_speculative_tokens
        self._is_on = False
        self._may_pay = True
        self._step = 0
        self._with_drafts = 0  # steps in a row
        self._planned: dict[int, _Planned] = {}  # by the plan's number

    @property
    def num_held(self) -> int:
        """Drafts that held."""
        return sum(self.num_held_at)

    def counters(self) -> dict[str, float]:
        """Return what became of all drafts, for the load report."""
        counts = {"drafts": self.num_drafts, "draft_tokens": self.num_draft_tokens, "accepted_tokens": self.num_held}
        held_at = {f"accepted_tokens_at_{place}": held for place, held in enumerate(self.num_held_at)}
        return {name: float(count) for name, count in (counts | held_at).items()}

    def extend(
        self,
        steps: list[SequenceStep],
        running: Mapping[int, Sequence],
        blocks: BlockManager,
        number: int,
        goes_ahead: bool = False,
        knows_tokens: bool = True,
    ) -> list[SequenceStep]:
        """Return the steps of a plan of that number, some decodes with drafts; their blocks are in the sequences'
        tables. If it ``goes_ahead``, the device makes them, maybe before the host knows the last tokens; otherwise
        there are none unless the host ``knows_tokens``.
        """
        self._step = number
        decodes = [step for step in steps if step.samples and len(step.token_ids) == 1]
        if not decodes:
            return steps
        base = plan_work(decodes)
        work = base if len(decodes) == len(steps) else plan_work(steps)
        frame = StepFrame(base, work, self._draft_share * self._cost.seconds(base))
        self._may_pay = self._may_draft(frame)
        extended = steps
        if self._may_pay and knows_tokens:
            extended = self._extend(steps, decodes, frame, running, blocks, goes_ahead)
        if extended is steps:
            is_wanted = self._step % MEASURED_EVERY == 0 or self._with_drafts or not self.times.knows_plain(base.tokens)
            self._is_on, self._with_drafts = False, 0
            if frame.is_decodes_alone and is_wanted:
                self._planned[number] = _Planned(frame, base, 0.0, has_drafts=False, is_clean=True)
        return extended

    def goes_ahead(self, running: Mapping[int, Sequence], unfinished: Sized) -> bool:
        """Whether the device drafts: no sequence waits, and none takes more for its tokens than the device knows."""
        is_for_all = 0 < len(running) <= self.most_ahead and len(running) == len(unfinished)
        return is_for_all and all(map(self._may_go_ahead, running.values()))

    def waits_for_tokens(self, running: Mapping[int, Sequence]) -> bool:
        """Whether the next step waits for the last tokens: drafts may pay, as it looked in the last, or it is not known
        where sequences stand.
        """
        if self.is_forced or self._may_pay or (self._step + 1) % RETRIED_EVERY == 0:
            return True
        return any(sequence.num_awaited > 1 for sequence in running.values())

    def _may_go_ahead(self, sequence: Sequence) -> bool:
        """Whether the device can draft a sequence's tokens, verify and follow them without the host.

        Steps of a graph have one width, which its beginning must fill.
        """
        asked = sequence.sampling
        return (
            sequence.remaining == 1
            and len(sequence.token_ids) > self._most
            and sequence.constraint is None
            and asked.logprobs is None
            and not asked.logit_bias
            and not asked.penalises_reply
            and sequence.num_generated >= asked.min_tokens
            and not sequence.pools
        )

    def note_step(self, plan: StepPlan, num_gained: int, seconds: float) -> None:
        """Take note of what a step took, and how many tokens more than its decodes it gained by drafts."""
        planned = self._planned.pop(plan.step, None)
        self._planned = {number: other for number, other in self._planned.items() if number > plan.step}
        if planned is None or plan.copies:
            return
        if planned.is_clean:
            self.times.learn(planned.work, planned.drafting, seconds, planned.has_drafts)
        if planned.has_drafts:
            frame = planned.frame
            extra = self.times.with_drafts(planned.work, planned.drafting) - frame.seconds(self.times)
            self.account.book(num_gained / frame.base.tokens - extra / self.times.plain(frame.base))

    def learn(self, sequence: Sequence, step: SequenceStep, num_gained: int, blocks: BlockManager) -> None:
        """Take note of how many tokens a step with drafts gained; none: its drafts did harm, and it gets no more."""
        if step.draft_ids:
            drafted = step.draft_start + len(step.draft_ids) + max(step.num_to_draft - 1, 0)
            note_drafted(blocks, sequence.block_table, step.draft_start, min(drafted, step.start + num_gained))
        num_draft_tokens = step.num_draft_tokens or step.num_to_draft
        if not num_draft_tokens:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        for place in range(num_gained - 1):
            self.num_held_at[place] += 1
        if num_gained:
            self._prior.learn(self._record(sequence), num_draft_tokens, num_gained - 1)
        else:
            self._record(sequence).is_allowed = False

    def _may_draft(self, frame: StepFrame) -> bool:
        """Whether this step is one for drafts, by what steps take and what was lost by drafts lately."""
        if self._config.steps.max_num_batched_tokens <= frame.work.tokens:
            return False
        if self.is_forced:
            return True
        self.account.earn()
        if self.account.is_overdrawn or not self.times.knows_plain(frame.base.tokens) or self._with_drafts >= REST:
            return False
        return self._step % RETRIED_EVERY == 0 or could_pay(self.times, frame, self._most)

    def _choose(self, frame: StepFrame, offers: list[Offer], most: int, is_alone: bool) -> list[int]:
        """Return how many drafts of each offer the step takes in."""
        if self.is_forced:
            return first_come(offers, most)
        # A step of one reply alone keeps no other waiting, however long it gets by drafts that pay.
        stretch = math.inf if is_alone else self._config.steps.step_stretch
        lengths = best_lengths(self.times, frame, offers, most, stretch, self._is_on)
        if not any(lengths) and self.account.balance >= 1:
            trial = trial_lengths(self.times, frame, offers, most, stretch)
            if self._step % RETRIED_EVERY == 0 or not self.times.knows_with_drafts(frame.work.tokens + sum(trial)):
                return trial
        return lengths

    def _extend(
        self,
        steps: list[SequenceStep],
        decodes: list[SequenceStep],
        frame: StepFrame,
        running: Mapping[int, Sequence],
        blocks: BlockManager,
        goes_ahead: bool,
    ) -> list[SequenceStep]:
        left = self._config.steps.max_num_batched_tokens - frame.work.tokens
        changed: dict[int, SequenceStep] = {}
        if goes_ahead:
            offers = device_offers(decodes, running, self._most_for)
        elif self.draft_source is not None:
            offers = text_offers(decodes, running, self._most_for, self.draft_source)
        else:
            most = self._most_catching_up(frame, left)
            offers, changed, missing = draft_offers(decodes, running, blocks, self._most_for, most)
            left -= missing
        lengths = self._choose(frame, offers, left, is_alone=len(steps) == 1)
        batch_left = self._batch_tier_left(steps, running)
        add = lengthen_ahead if goes_ahead else lengthen
        for offer, length in zip(offers, lengths, strict=True):
            sequence = running[offer.step.sequence_id]
            if sequence.tier == "batch":
                length = min(length, batch_left)
                batch_left -= length
            self._record(sequence).plan(length)
            if length:
                changed[sequence.sequence_id] = add(offer, length, sequence, blocks, len(running))
        return self._note_plan(steps, changed, frame, any(lengths))

    def _note_plan(
        self, steps: list[SequenceStep], changed: dict[int, SequenceStep], frame: StepFrame, drafts: bool
    ) -> list[SequenceStep]:
        if not changed:
            return steps
        self._is_on = drafts
        self._with_drafts += 1
        extended = [changed.get(step.sequence_id, step) for step in steps]
        self._planned[self._step] = self._plan_of(frame, extended)
        return extended

    def _plan_of(self, frame: StepFrame, steps: list[SequenceStep]) -> _Planned:
        drafted = sum(step.num_to_draft for step in steps)
        work = plan_work(steps) + StepWork(drafted, drafted, drafted * (frame.base.pairs // frame.base.tokens))
        drafting = max(step.num_to_draft for step in steps) * frame.drafting
        catches_up = any(len(step.draft_ids) > self._most + 1 for step in steps)
        return _Planned(frame, work, drafting, has_drafts=True, is_clean=frame.is_decodes_alone and not catches_up)

    def _most_for(self, sequence: Sequence) -> int:
        """Return how many drafts a sequence may get in this step."""
        if not self._record(sequence).is_due(self._step):
            return 0
        room = min(sequence.sampling.max_tokens - sequence.num_generated, self._max_model_len - len(sequence.token_ids))
        return min(room - sequence.num_awaited, self._most)  # all that is under way may come

    def _record(self, sequence: Sequence) -> DraftRecord:
        if sequence.draft_record is None:
            sequence.draft_record = self._prior.open_record(is_allowed=not sequence.pools)
        return sequence.draft_record

    def _most_catching_up(self, frame: StepFrame, left: int) -> int:
        """Return how many tokens the draft model may compute to catch up; at least a block's worth.

        By the cost table: more would stretch others' steps more than prompts may.
        """
        stretch = self._config.steps.step_stretch
        base = frame.base + StepWork(prompts=frame.work.prompts)
        seconds = max(0.0, stretch * self._cost.seconds(base) - self._cost.seconds(frame.work))
        token = self._draft_share * self._cost.token
        fitting = int(seconds / token) if token * left > seconds else left
        return min(left, max(fitting, self._config.cache.block_size))

    def _batch_tier_left(self, steps: list[SequenceStep], running: Mapping[int, Sequence]) -> int:
        if self._config.steps.max_batch_tier_tokens is None:
            return self._config.steps.max_num_batched_tokens
        taken = sum(len(step.token_ids) for step in steps if running[step.sequence_id].tier == "batch")
        return max(0, self._config.steps.max_batch_tier_tokens - taken)


def make_speculator(config: EngineConfig, limits: Limits) -> Speculator | None:
    """Return the speculator that a configuration asks for."""
    if config.speculation.speculative_method == "off":
        return None
    draft_source = draft_from_text if config.speculation.speculative_method == "ngram" else None
    return Speculator(
        config, limits.max_model_len, config.steps.step_cost or limits.assumed_cost, draft_source, limits.draft_share
    )
