# Which sequences get drafts in a step, and room for them: planned after everything else, within what the step's token
# budget leaves, in blocks that are given back with the drafts that did not hold.

from __future__ import annotations

from collections.abc import Mapping, Sized

from gpu_backend.kv_cache.blocks import BlockManager
from gpu_backend.speculation.drafts import (
    DraftSource,
    device_offers,
    draft_from_text,
    draft_offers,
    lengthen,
    lengthen_ahead,
    note_drafted,
    text_offers,
)
from gpu_backend.speculation.economics import DraftEconomics
from gpu_backend.step.config import EngineConfig
from gpu_backend.step.cost import StepCost
from gpu_backend.step.draft_record import DraftPrior, DraftRecord
from gpu_backend.step.limits import Limits
from gpu_backend.step.plan import SequenceStep
from gpu_backend.step.sequence import Sequence


class Speculator:
    """Adds drafts to step plans while they pay, by ``economics``, and learns from what became of them.

    ``draft_source`` makes drafts, at most as many as it is told; without it the draft model does, or a head, a pass of
    which takes ``draft_share`` of a step.
    """

    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        cost: StepCost,
        draft_source: DraftSource | None = None,
        draft_share: float = 0.0,
    ) -> None:
        self._most = config.speculation.num_speculative_tokens
        self.draft_source = draft_source
        self.most_ahead = 0  # decodes for which the device drafts by itself
        self.num_drafts = 0  # times that a sequence's drafts were verified
        self.num_draft_tokens = 0  # drafts
        self.num_held_at = [0] * self._most  # drafts that held, by their place
        self.economics = DraftEconomics(cost, config.steps.step_stretch, self._most, draft_share)
        self._lag = 1 if config.speculation.has_head else 0
        self._prior = DraftPrior()
        self._steps = config.steps
        self._max_model_len = max_model_len
        self._step = 0

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
        frame = self.economics.frame(steps, decodes)
        left = self._steps.max_num_batched_tokens - frame.work.tokens
        changed: dict[int, SequenceStep] = {}
        lengths: list[int] = []
        if self.economics.may_draft(frame, number, left) and knows_tokens:
            if goes_ahead:
                offers = device_offers(decodes, running, self._most_for)
            elif self.draft_source is not None:
                offers = text_offers(decodes, running, self._most_for, self.draft_source)
            else:
                most = self.economics.most_catching_up(frame, left, blocks.block_size)
                offers, changed, missing = draft_offers(decodes, running, blocks, self._most_for, most, self._lag)
                left -= missing
            lengths = self.economics.choose(frame, offers, left, number, is_alone=len(steps) == 1)
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
        if not changed:
            self.economics.note_without(frame, number)
            return steps
        extended = [changed.get(step.sequence_id, step) for step in steps]
        self.economics.note_with(frame, number, extended, drafts=any(lengths))
        return extended

    def goes_ahead(self, running: Mapping[int, Sequence], unfinished: Sized) -> bool:
        """Whether the device drafts: no sequence waits, and none takes more for its tokens than the device knows."""
        is_for_all = 0 < len(running) <= self.most_ahead and len(running) == len(unfinished)
        return is_for_all and all(map(self._may_go_ahead, running.values()))

    def waits_for_tokens(self, running: Mapping[int, Sequence]) -> bool:
        """Whether the next step waits for the last tokens: drafts may pay, or it is not known where sequences stand."""
        unsure = any(sequence.num_awaited > 1 for sequence in running.values())
        return unsure or self.economics.could_pay_in(self._step + 1)

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

    def learn(self, sequence: Sequence, step: SequenceStep, num_gained: int, blocks: BlockManager) -> None:
        """Take note of how many tokens a step with drafts gained; none: its drafts did harm, and it gets no more."""
        if step.draft_ids:
            # What a head made of its own drafts is not what it makes of the model's states: that is computed again.
            drafted = step.draft_start + len(step.draft_ids) + (0 if self._lag else max(step.num_to_draft - 1, 0))
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

    def _batch_tier_left(self, steps: list[SequenceStep], running: Mapping[int, Sequence]) -> int:
        if self._steps.max_batch_tier_tokens is None:
            return self._steps.max_num_batched_tokens
        taken = sum(len(step.token_ids) for step in steps if running[step.sequence_id].tier == "batch")
        return max(0, self._steps.max_batch_tier_tokens - taken)


def make_speculator(config: EngineConfig, limits: Limits) -> Speculator | None:
    """Return the speculator that a configuration asks for."""
    if config.speculation.speculative_method == "off":
        return None
    draft_source = draft_from_text if config.speculation.speculative_method == "ngram" else None
    return Speculator(
        config, limits.max_model_len, config.steps.step_cost or limits.assumed_cost, draft_source, limits.draft_share
    )
