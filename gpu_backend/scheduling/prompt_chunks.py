# Which prompts a step computes a chunk of. Prompts of many steps neither keep others waiting nor wait for them for
# ever.

from __future__ import annotations

from collections.abc import Iterable

from gpu_backend.scheduling.budget import StepBudget
from gpu_backend.step.plan import SequenceStep
from gpu_backend.step.sequence import Sequence

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
