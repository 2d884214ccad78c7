# How many prompt tokens a step may compute beside its decodes: within the token budget, within the tier's own cap, and
# no more than stretch the step beyond what its decodes alone would take, so that a long prompt stalls no stream.

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from gpu_backend.step.config import StepConfig
from gpu_backend.step.cost import StepCost, StepWork, chunk_work, plan_work
from gpu_backend.step.picture import Picture, uncut, with_whole
from gpu_backend.step.plan import SequenceStep
from gpu_backend.step.sequence import Sequence

MANY_STEPS = 8  # a prompt that takes more is long
NOTHING: Mapping[int, Sequence] = {}


class StepBudget:
    """What is left of one step. Without a known cost the number of tokens alone limits it.

    Of batch work, whose tokens may have a cap of their own, no more of the ``running`` sequences, to which the
    ``decodes`` belong, are let in than have a token each within the cap.
    """

    def __init__(
        self,
        config: StepConfig,
        block_size: int,
        decodes: SequenceOf[SequenceStep],
        running: Mapping[int, Sequence] = NOTHING,
    ) -> None:
        self._most = config.max_num_batched_tokens
        self._left = self._most - len(decodes)
        self._kept = 0
        cap = config.max_batch_tier_tokens or config.max_num_batched_tokens
        self._batch_left = self._batch_places = cap
        if config.max_batch_tier_tokens is not None:
            self._batch_left -= sum(running[step.sequence_id].tier == "batch" for step in decodes)
            self._batch_places -= sum(sequence.tier == "batch" for sequence in running.values())
        self._cost = config.step_cost if decodes else None
        self._is_spent = False
        self._least = block_size
        if self._cost is not None:
            self._work = plan_work(decodes)
            seconds = self._cost.seconds_launched(self._work)
            self._half_limit = (1 + config.step_stretch) / 2 * seconds
            self._limit = self._full_limit = config.step_stretch * seconds

    def is_long(self, sequence: Sequence) -> bool:
        """Whether a prompt takes more than a step's tokens, or many steps: deep in a context they compute little."""
        if sequence.remaining > self._most or self._cost is None:
            return sequence.remaining > self._most
        many = sequence.remaining // MANY_STEPS
        return self._cost.seconds(self._work + chunk_work(sequence.num_computed, many)) > self._full_limit

    def keep_half(self) -> None:
        """Keep half for long prompts until ``open_rest``: so they neither keep others waiting, nor wait for them."""
        self._kept = self._left // 2
        self._left -= self._kept
        if self._cost is not None:
            self._limit = self._half_limit

    def allows(self, tier: str) -> bool:
        """Whether another prompt of that tier would get any tokens."""
        return not self._is_spent and self._left > 0 and (tier != "batch" or self._batch_left > 0)

    @property
    def admits_batch(self) -> bool:
        """Whether more batch work may be let in."""
        return self._batch_places > 0 and self._batch_left > 0

    def note_admission(self, tier: str) -> None:
        """Count a sequence that was let in."""
        if tier == "batch":
            self._batch_places -= 1

    def open_rest(self) -> None:
        """Let prompts of many steps have what is left."""
        self._left += self._kept
        self._kept = 0
        self._is_spent = False
        if self._cost is not None:
            self._limit = self._full_limit

    def take(self, sequence: Sequence) -> int:
        """Say how many tokens of a prompt this step computes, and count them as taken.

        The first chunk of a step has at least a block's worth, so that every prompt comes to its end. None ends within
        a picture that must be computed whole.
        """
        if not self.allows(sequence.tier):
            return 0
        start, pictures = sequence.num_computed, sequence.pictures
        most = min(sequence.remaining, self._left)
        if sequence.tier == "batch":
            most = min(most, self._batch_left)
        taken = most = uncut(pictures, start, most)
        if self._cost is not None and most:
            taken = largest_chunk(self._cost, self._work, self._limit, start, most, pictures)
            least = with_whole(pictures, start, self._least) if self._least else 0
            taken = max(uncut(pictures, start, taken), min(most, least))
            if taken:
                self._least = 0
            self._work += chunk_work(start, taken, pictures)
            self._is_spent = taken < most
        self._left -= taken
        if sequence.tier == "batch":
            self._batch_left -= taken
        return taken


def largest_chunk(
    cost: StepCost, work: StepWork, limit: float, start: int, most: int, pictures: SequenceOf[Picture] = ()
) -> int:
    """Return how many tokens from position ``start``, at most ``most``, keep a step with ``work`` within ``limit``."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if cost.seconds(work + chunk_work(start, middle, pictures)) <= limit:
            low = middle
        else:
            high = middle - 1
    return low
