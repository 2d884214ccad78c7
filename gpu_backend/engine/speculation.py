# Which sequences get guesses in a step, how many, and whether they pay: planned after everything else, within what the
# step's token budget leaves, in blocks that are given back with the guesses that did not hold.

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from gpu_backend.config import EngineConfig
from gpu_backend.engine import proposer
from gpu_backend.engine.blocks import BlockManager
from gpu_backend.engine.composition import may_speculate
from gpu_backend.engine.cost import StepCost, StepWork, plan_work
from gpu_backend.engine.guess_value import Offer, best_lengths, could_pay
from gpu_backend.engine.plan import SequenceStep
from gpu_backend.engine.requests import Limits
from gpu_backend.engine.sequence import Sequence

MEMORY = 0.9  # how much of what was learnt of a sequence counts after its next guesses
FIRST_PAUSE, LONGEST_PAUSE = 8, 512  # steps between two probes of a sequence whose guesses do not pay
PROBE = 0.7  # the acceptance that a probe is planned with; what a new sequence is trusted with, too
PROPOSERS = 64  # sequences asked for guesses in one step


@dataclass(slots=True)
class GuessRecord:
    """How one sequence's guesses went. ``tried`` counts guesses up to the first that failed, older ones for less."""

    is_allowed: bool
    held: float = 2 * PROBE
    tried: float = 2.0
    is_paused: bool = False
    pause: int = FIRST_PAUSE
    text: bytearray = field(default_factory=bytearray)  # its tokens, int32 each, as far as they were looked at

    @property
    def acceptance(self) -> float:
        """The chance that a guess holds if those before it did."""
        return self.held / self.tried

    def learn(self, num_proposed: int, num_held: int) -> None:
        """Take note of a step's guesses."""
        self.held = MEMORY * self.held + num_held
        self.tried = MEMORY * self.tried + min(num_held + 1, num_proposed)
        if num_held:
            self.is_paused, self.pause = False, FIRST_PAUSE
        elif self.is_paused:
            self.pause = min(2 * self.pause, LONGEST_PAUSE)


Proposer = Callable[[Sequence, int], tuple[int, ...]]


class Speculator:
    """Adds guesses to step plans while they pay, and learns from what became of them.

    ``cost`` judges what they take; only its proportions matter. ``propose`` makes them, at most as many as it is told.
    """

    def __init__(self, config: EngineConfig, max_model_len: int, cost: StepCost, propose: Proposer) -> None:
        self.propose = propose
        self.num_drafts = 0  # times that a sequence's guesses were verified
        self.num_proposed = 0  # guesses
        self.num_held_at = [0] * config.num_speculative_tokens  # guesses that held, by their place
        self._config = config
        self._max_model_len = max_model_len
        self._cost = cost
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
        if not decodes or left <= 0 or not could_pay(self._cost, base, work):
            return steps
        offers = self._offers(decodes, running)
        lengths = best_lengths(self._cost, base, work, offers, left, self._longest(base, work), self._is_on)
        self._is_on = any(lengths)
        batch_left = self._batch_tier_left(steps, running)
        longer: dict[int, SequenceStep] = {}
        for offer, length in zip(offers, lengths, strict=True):
            sequence = running[offer.step.sequence_id]
            record = sequence.guess_record
            assert record is not None
            if sequence.tier == "batch":
                length = min(length, batch_left)
                batch_left -= length
            if length:
                longer[offer.step.sequence_id] = _lengthen(offer, length, sequence, blocks, len(running))
            else:
                record.is_paused = True
        return [longer.get(step.sequence_id, step) for step in steps] if longer else steps

    def learn(self, sequence: Sequence, step: SequenceStep, num_gained: int) -> None:
        """Take note of how many tokens a step with guesses gained; none: its guesses did harm, and it gets no more."""
        record = sequence.guess_record
        assert record is not None
        self.num_drafts += 1
        self.num_proposed += step.num_proposed
        for place in range(num_gained - 1):
            self.num_held_at[place] += 1
        if num_gained:
            record.learn(step.num_proposed, num_gained - 1)
        else:
            record.is_allowed = False

    def _offers(self, decodes: list[SequenceStep], running: Mapping[int, Sequence]) -> list[Offer]:
        offers: list[Offer] = []
        for step in decodes:
            if len(offers) == PROPOSERS:
                break
            sequence = running[step.sequence_id]
            record = sequence.guess_record
            if record is None:
                record = sequence.guess_record = GuessRecord(may_speculate(sequence))
            # Probes of several sequences fall into the same steps, where they share what guessing costs at all.
            if not record.is_allowed or (record.is_paused and self._step % record.pause):
                continue
            if guesses := self._guesses(sequence):
                acceptance = max(PROBE, record.acceptance) if record.is_paused else record.acceptance
                offers.append(Offer(step, guesses[:1] if record.is_paused else guesses, acceptance))
        return offers

    def _guesses(self, sequence: Sequence) -> tuple[int, ...]:
        """Return guesses that may all hold: the last of them leaves room for one more token."""
        sampling = sequence.sampling
        room = min(sampling.max_tokens - sequence.num_generated, self._max_model_len - len(sequence.token_ids)) - 1
        guesses = self.propose(sequence, min(room, self._most)) if room > 0 else ()
        for index, token in enumerate(guesses):
            if token in sampling.stop_token_ids:
                guesses = guesses[:index]
                break
        if guesses and sequence.constraint is not None:
            guesses = guesses[: sequence.constraint.num_allowed(guesses)]
        return guesses

    def _longest(self, base: StepWork, work: StepWork) -> float:
        """Return the seconds that the step may take: guesses stretch nobody's step more than prompts may."""
        return max(self._cost.seconds(work), self._config.step_stretch * self._cost.seconds(base))

    def _batch_tier_left(self, steps: list[SequenceStep], running: Mapping[int, Sequence]) -> int:
        if self._config.max_batch_tier_tokens is None:
            return self._config.max_num_batched_tokens
        taken = sum(len(step.token_ids) for step in steps if running[step.sequence_id].tier == "batch")
        return max(0, self._config.max_batch_tier_tokens - taken)


def make_speculator(config: EngineConfig, limits: Limits) -> Speculator | None:
    """Return the speculator that a configuration asks for."""
    if config.speculative_method == "off":
        return None
    # Where nothing is known, a step takes as long as reading the weights, and from so many tokens on as multiplying.
    assumed = StepCost(fixed=0.0, weights=1.0, token=1 / limits.free_tokens, context=0.0, pair=0.0)
    return Speculator(config, limits.max_model_len, config.step_cost or assumed, propose_from_text)


def propose_from_text(sequence: Sequence, count: int) -> tuple[int, ...]:
    """Guess a sequence's next tokens from its own text."""
    record = sequence.guess_record
    assert record is not None
    record.text += array("i", sequence.token_ids[len(record.text) // proposer.TOKEN :]).tobytes()
    return proposer.propose(record.text, count)


def _lengthen(offer: Offer, length: int, sequence: Sequence, blocks: BlockManager, headroom: int) -> SequenceStep:
    """Add an offer's first guesses to its step, as many as have room while each running sequence can fill a block."""
    step, table = offer.step, sequence.block_table
    end = step.start + len(step.token_ids) + length
    while len(table) < blocks.blocks_for(end) and blocks.available_to(sequence.tenant) > headroom:
        block = blocks.allocate_block(sequence.tenant)
        assert block is not None
        table.append(block)
    length = min(length, len(table) * blocks.block_size - step.start - len(step.token_ids))
    return replace(
        step,
        token_ids=step.token_ids + offer.guesses[:length],
        block_table=tuple(table[: blocks.blocks_for(step.start + len(step.token_ids) + length)]),
        num_proposed=length,
    )
