# Which sequences get guesses in a step, how many, and whether they pay: planned after everything else, within what the
# step's token budget leaves, in blocks that are given back with the guesses that did not hold.

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace

from gpu_backend.config import EngineConfig
from gpu_backend.engine import proposer
from gpu_backend.engine.blocks import BlockManager
from gpu_backend.engine.composition import may_speculate
from gpu_backend.engine.cost import StepCost, StepWork, plan_work
from gpu_backend.engine.guess_record import PROBE, GuessRecord
from gpu_backend.engine.guess_value import Offer, best_lengths, could_pay
from gpu_backend.engine.plan import SequenceStep
from gpu_backend.engine.requests import Limits
from gpu_backend.engine.sequence import Sequence

PROPOSERS = 64  # sequences asked for guesses in one step


Proposer = Callable[[Sequence, int], tuple[int, ...]]


class Speculator:
    """Adds guesses to step plans while they pay, and learns from what became of them.

    ``cost`` judges what they take; only its proportions matter. ``propose`` makes guesses, at most as many as it is
    told; without it the draft model does, a pass of which takes ``draft_share`` of a step.
    """

    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        cost: StepCost,
        propose: Proposer | None = None,
        draft_share: float = 0.0,
    ) -> None:
        self.propose = propose
        self.is_forced = False  # guess whether it pays or not: for measurements
        self.num_drafts = 0  # times that a sequence's guesses were verified
        self.num_proposed = 0  # guesses
        self.num_held_at = [0] * config.num_speculative_tokens  # guesses that held, by their place
        self._config = config
        self._max_model_len = max_model_len
        self._cost = cost
        self._draft_share = draft_share
        self._most = config.num_speculative_tokens
        self._is_on = False
        self._step = 0

    @property
    def num_held(self) -> int:
        """Guesses that held."""
        return sum(self.num_held_at)

    def counters(self) -> dict[str, float]:
        """Return what became of all guesses, for the load report."""
        counts = {"drafts": self.num_drafts, "draft_tokens": self.num_proposed, "accepted_tokens": self.num_held}
        held_at = {f"accepted_tokens_at_{place}": held for place, held in enumerate(self.num_held_at)}
        return {name: float(count) for name, count in (counts | held_at).items()}

    def extend(
        self, steps: list[SequenceStep], running: Mapping[int, Sequence], blocks: BlockManager
    ) -> list[SequenceStep]:
        """Return the steps of a plan, some decodes with guesses. Their blocks are in the sequences' tables."""
        self._step += 1
        decodes = [step for step in steps if step.samples and len(step.token_ids) == 1]
        base, work = plan_work(decodes), plan_work(steps)
        left = self._config.max_num_batched_tokens - work.tokens
        pass_seconds = self._draft_share * self._cost.seconds(base)
        if not decodes or left <= 0:
            return steps
        if not (self.is_forced or could_pay(self._cost, base, work, pass_seconds)):
            return steps
        longest = self._longest(base, work)
        changed: dict[int, SequenceStep] = {}
        if self.propose is None:
            offers, left = self._drafts(
                decodes, running, blocks, self._most_catching_up(work, longest, left), left, changed
            )
        else:
            offers = self._guesses(decodes, running)
        # A step of one reply alone keeps nobody waiting, however long it gets by guesses that pay.
        limit = longest if len(steps) > 1 else float("inf")
        lengths = best_lengths(self._cost, base, work, offers, left, limit, self._is_on, pass_seconds)
        if self.is_forced:
            lengths = _first_come(offers, left)
        self._is_on = any(lengths)
        batch_left = self._batch_tier_left(steps, running)
        for offer, length in zip(offers, lengths, strict=True):
            sequence = running[offer.step.sequence_id]
            if sequence.tier == "batch":
                length = min(length, batch_left)
                batch_left -= length
            if length:
                changed[offer.step.sequence_id] = _lengthen(offer, length, sequence, blocks, len(running))
            else:
                self._record(sequence).is_paused = True
        return [changed.get(step.sequence_id, step) for step in steps] if changed else steps

    def learn(self, sequence: Sequence, step: SequenceStep, num_gained: int, blocks: BlockManager) -> None:
        """Take note of how many tokens a step with guesses gained; none: its guesses did harm, and it gets no more."""
        if step.draft_ids:
            drafted = step.draft_start + len(step.draft_ids) + max(step.num_to_draft - 1, 0)
            _note_drafted(blocks, sequence.block_table, step.draft_start, min(drafted, step.start + num_gained))
        num_proposed = step.num_proposed or step.num_to_draft
        if not num_proposed:
            return
        self.num_drafts += 1
        self.num_proposed += num_proposed
        for place in range(num_gained - 1):
            self.num_held_at[place] += 1
        if num_gained:
            self._record(sequence).learn(num_proposed, num_gained - 1)
        else:
            self._record(sequence).is_allowed = False

    def _guesses(self, decodes: list[SequenceStep], running: Mapping[int, Sequence]) -> list[Offer]:
        """Ask for guesses: as many as may all hold, with room for one more token after the last."""
        assert self.propose is not None
        offers: list[Offer] = []
        for step in decodes:
            sequence = running[step.sequence_id]
            if not (most := self._most_for(sequence)):
                continue
            guesses = _cut(sequence, self.propose(sequence, most))
            if guesses:
                offers.append(Offer(step, len(guesses), self._trust(sequence), guesses))
            if len(offers) == PROPOSERS:
                break
        return offers

    def _drafts(
        self,
        decodes: list[SequenceStep],
        running: Mapping[int, Sequence],
        blocks: BlockManager,
        most: int,
        left: int,
        changed: dict[int, SequenceStep],
    ) -> tuple[list[Offer], int]:
        """Offer what the draft model can guess, once it has computed what it lacks: ``most`` such tokens in this step.

        Who lacks more is put into ``changed`` with a part of it. Returns the offers, and what is left of the budget.
        """
        offers: list[Offer] = []
        for step in decodes:
            sequence = running[step.sequence_id]
            if not (length := self._most_for(sequence)):
                continue
            start = _num_drafted(blocks, sequence.block_table, step.start)
            missing = step.start - start
            if missing <= most:
                known = tuple(sequence.token_ids[start:])
                offers.append(Offer(replace(step, draft_ids=known, draft_start=start), length, self._trust(sequence)))
            elif most:
                missing = most
                part = tuple(sequence.token_ids[start : start + most])
                changed[step.sequence_id] = replace(step, draft_ids=part, draft_start=start)
            else:
                continue
            most -= missing
            left -= missing
            if len(offers) == PROPOSERS:
                break
        return offers, left

    def _most_for(self, sequence: Sequence) -> int:
        """Return how many guesses a sequence may get in this step."""
        record = self._record(sequence)
        # Probes of several sequences fall into the same steps, where they share what guessing costs at all.
        if not record.is_allowed or (record.is_paused and self._step % record.pause):
            return 0
        room = min(sequence.sampling.max_tokens - sequence.num_generated, self._max_model_len - len(sequence.token_ids))
        return min(room - 1, 1 if record.is_paused else self._most)

    def _trust(self, sequence: Sequence) -> float:
        record = self._record(sequence)
        return max(PROBE, record.acceptance) if record.is_paused else record.acceptance

    def _record(self, sequence: Sequence) -> GuessRecord:
        if sequence.guess_record is None:
            sequence.guess_record = GuessRecord(may_speculate(sequence))
        return sequence.guess_record

    def _longest(self, base: StepWork, work: StepWork) -> float:
        """Return the seconds that the step may take: guesses stretch nobody's step more than prompts may."""
        return max(self._cost.seconds(work), self._config.step_stretch * self._cost.seconds(base))

    def _most_catching_up(self, work: StepWork, longest: float, left: int) -> int:
        """Return how many tokens the draft model may compute to catch up; at least a block's worth."""
        seconds = longest - self._cost.seconds(work)
        token = self._draft_share * self._cost.token
        fitting = int(seconds / token) if token * left > seconds else left
        return min(left, max(fitting, self._config.block_size))

    def _batch_tier_left(self, steps: list[SequenceStep], running: Mapping[int, Sequence]) -> int:
        if self._config.max_batch_tier_tokens is None:
            return self._config.max_num_batched_tokens
        taken = sum(len(step.token_ids) for step in steps if running[step.sequence_id].tier == "batch")
        return max(0, self._config.max_batch_tier_tokens - taken)


def make_speculator(config: EngineConfig, limits: Limits) -> Speculator | None:
    """Return the speculator that a configuration asks for."""
    if config.speculative_method == "off":
        return None
    propose = propose_from_text if config.speculative_method == "ngram" else None
    return Speculator(
        config, limits.max_model_len, config.step_cost or limits.assumed_cost, propose, limits.draft_share
    )


def propose_from_text(sequence: Sequence, count: int) -> tuple[int, ...]:
    """Guess a sequence's next tokens from its own text."""
    record = sequence.guess_record
    assert record is not None
    record.text += array("i", sequence.token_ids[len(record.text) // proposer.TOKEN :]).tobytes()
    return proposer.propose(record.text, count)


def _first_come(offers: list[Offer], most: int) -> list[int]:
    """Take all guesses that the budget leaves room for."""
    lengths = []
    for offer in offers:
        lengths.append(min(offer.length, most))
        most -= lengths[-1]
    return lengths


def _cut(sequence: Sequence, guesses: tuple[int, ...]) -> tuple[int, ...]:
    """Leave out the first guess that ends the reply, or that it cannot have, and all after it."""
    for index, token in enumerate(guesses):
        if token in sequence.sampling.stop_token_ids:
            guesses = guesses[:index]
            break
    if guesses and sequence.constraint is not None:
        guesses = guesses[: sequence.constraint.num_allowed(guesses)]
    return guesses


def _lengthen(offer: Offer, length: int, sequence: Sequence, blocks: BlockManager, headroom: int) -> SequenceStep:
    """Add an offer's first guesses to its step, as many as have room while each running sequence can fill a block."""
    step, table = offer.step, sequence.block_table
    known = step.start + len(step.token_ids)
    while len(table) < blocks.blocks_for(known + length) and blocks.available_to(sequence.tenant) > headroom:
        block = blocks.allocate_block(sequence.tenant)
        assert block is not None
        table = sequence.block_table = (*table, block)
    length = min(length, len(table) * blocks.block_size - known)
    covering = table[: blocks.blocks_for(known + length)]
    if not offer.guesses:
        return replace(step, block_table=covering, num_to_draft=length)
    guesses = offer.guesses[:length]
    return replace(step, token_ids=step.token_ids + guesses, block_table=covering, num_proposed=length)


def _num_drafted(blocks: BlockManager, block_table: tuple[int, ...], most: int) -> int:
    """Return how many leading tokens of a table, at most that many, the draft model has computed."""
    drafted = 0
    for block in block_table:
        drafted += blocks.num_drafted[block]
        if blocks.num_drafted[block] < blocks.block_size:
            break
    return min(drafted, most)


def _note_drafted(blocks: BlockManager, block_table: tuple[int, ...], start: int, end: int) -> None:
    """Note that the draft model has computed a table's tokens up to ``end``, from ``start`` on anew."""
    size = blocks.block_size
    for index in range(start // size, blocks.blocks_for(end)):
        block = block_table[index]
        blocks.num_drafted[block] = max(blocks.num_drafted[block], min(size, end - index * size))
