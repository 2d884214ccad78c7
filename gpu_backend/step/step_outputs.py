# A step's result, read in its plan's order: what each sequence gained.

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from gpu_backend.step.plan import SequenceStep, StepResult, TokenLogprob


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What a step brought one sequence."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    hidden_sum: tuple[float, ...]
    scores: tuple[TokenLogprob, ...]
    has_failed: bool  # its numbers were not finite


class StepOutputs:
    """Hands out what is in a result: ``take`` it for each sequence of the plan, in its order.

    Where ``is_plain``, a sequence that samples gained a token and nothing else; so the next of ``tokens`` may be taken.
    """

    def __init__(self, result: StepResult) -> None:
        more = result.counts or result.logprobs or result.pooled or result.scored or result.failed
        self.is_plain = not more
        self.tokens = iter(result.token_ids)
        self._counts = iter(result.counts or (1,) * len(result.token_ids))
        self._logprobs = iter(result.logprobs)
        self._pooled = iter(result.pooled)
        self._scored = iter(result.scored)
        self._failed = result.failed

    def take(self, step: SequenceStep) -> SequenceOutput:
        """Return what the next sequence of the plan gained, whose step that is."""
        count = next(self._counts) if step.samples else 0
        return SequenceOutput(
            token_ids=tuple(islice(self.tokens, count)),
            logprobs=tuple(islice(self._logprobs, count)),
            hidden_sum=next(self._pooled) if step.pools else (),
            scores=next(self._scored) if step.targets else (),
            has_failed=step.sequence_id in self._failed,
        )
