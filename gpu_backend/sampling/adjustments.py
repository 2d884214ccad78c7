# What a request asks of the logits before a token is drawn from them: a bias, a least length, penalties for what was
# said already. All of it is a function of the tokens so far, so a reply that is computed again comes out the same.
#
# Meanings and order are vLLM's (vllm/v1/sample/sampler.py, SamplingParams), which are OpenAI's where OpenAI has them:
# bias, least length, repetition penalty (prompt and reply), then frequency and presence penalties (reply alone); a
# grammar has the last word.

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from gpu_backend.kernels.layout.upload import upload
from gpu_backend.kernels.reference import weigh_down
from gpu_backend.sampling.token_counts import TokenCounts
from gpu_backend.step.grammar import apply_masks, begin_masks
from gpu_backend.step.plan import SequenceStep


def adjust(
    logits: Tensor,
    steps: Sequence[SequenceStep],
    counts: TokenCounts | None = None,
    masks: Future[Tensor] | None = None,
) -> None:
    """Change ``logits`` (rows, vocab), float32, in place as each row's step asks; other rows are not touched.

    ``counts`` are of the tokens that the steps follow: needed where one is penalised. ``masks`` are those of the
    steps' constraints, where they were begun before.
    """
    _add_bias(logits, steps)
    _forbid_early_ends(logits, steps)
    _penalise(logits, steps, counts)
    _constrain(logits, steps, masks or begin_masks([step.constraint for step in steps], logits.shape[-1]))


def _constrain(logits: Tensor, steps: Sequence[SequenceStep], masks: Future[Tensor] | None) -> None:
    if masks is not None:
        apply_masks(logits, [row for row, step in enumerate(steps) if step.constraint is not None], masks.result())


def _add_bias(logits: Tensor, steps: Sequence[SequenceStep]) -> None:
    biases = [(row, id_, bias) for row, step in enumerate(steps) for id_, bias in step.sampling.logit_bias]
    if biases:
        rows, ids, values = zip(*biases, strict=True)
        where = upload([rows, ids], logits.device, torch.long)
        logits[where[0], where[1]] += upload(values, logits.device, logits.dtype)


def _forbid_early_ends(logits: Tensor, steps: Sequence[SequenceStep]) -> None:
    """Put -inf in place of stop tokens where the reply must not end yet."""
    ends = [
        (row, id_)
        for row, step in enumerate(steps)
        if step.sampling.min_tokens and step.constraint is None and step.num_generated < step.sampling.min_tokens
        for id_ in step.sampling.stop_token_ids
        if 0 <= id_ < logits.shape[-1]
    ]
    if ends:
        where = upload(ends, logits.device, torch.long)
        logits.index_put_((where[:, 0], where[:, 1]), torch.full((), -torch.inf, device=logits.device))


def _penalise(logits: Tensor, steps: Sequence[SequenceStep], counts: TokenCounts | None) -> None:
    rows = [row for row, step in enumerate(steps) if step.sampling.penalises_reply]
    if not rows:
        return
    asking = [steps[row] for row in rows]
    penalties = upload([step.sampling.penalties for step in asking], logits.device, logits.dtype)
    assert counts is not None, "penalties look back at what was counted"
    places = upload(rows, logits.device, torch.long)
    part = weigh_down(logits.index_select(0, places), counts.of(asking), penalties)
    logits.index_copy_(0, places, part)
