# Draft tokens, verified: the model samples at every place of a draft, with that place's own noise, and
# drafts hold as long as they are what was sampled.
#
# So speculation changes no token, at any temperature: docs/speculation.md has the proof. Draft and sample are coupled
# by their common Gumbel noise (Daliri et al. 2024), where Leviathan et al. (2023) accept a draft by chance.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpu_backend.step.plan import SequenceStep


def rows_of(step: SequenceStep) -> list[SequenceStep]:
    """Return a step for each place that is sampled, as it would be if the drafts before it were known."""
    if not step.num_draft_tokens:
        return [step]
    rows = []
    drafts = step.token_ids[step.num_known :]
    looks_back = step.sampling.penalises_reply
    for count in range(step.num_draft_tokens + 1):
        constraint = step.constraint
        if constraint is not None and count:
            constraint = constraint.copy()
            problem = constraint.accept(drafts[:count])
            assert problem is None, "a draft does not follow the grammar"
        rows.append(
            replace(
                step,
                token_ids=step.token_ids[: step.num_known + count],
                drafted=drafts[:count] if looks_back else (),
                constraint=constraint,
                num_draft_tokens=0,
            )
        )
    return rows


def num_gained(step: SequenceStep, sampled: Sequence[int]) -> int:
    """Say how many of the tokens sampled at a step's places are the sequence's: one more than drafts held."""
    drafts = step.token_ids[step.num_known :]
    held = 0
    while held < len(drafts) and drafts[held] == sampled[held]:
        held += 1
    return held + 1
