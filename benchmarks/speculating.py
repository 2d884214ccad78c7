# What guesses gain or cost on a device: decodes with guesses of which a chosen share holds, against decodes without.
# The model says a text that is known beforehand, whatever its logits are, so the share is what it is set to; drawing,
# verifying and the graphs are the engine's own.

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from gpu_backend.engine import device_step, graphs
from gpu_backend.engine.loop import EngineLoop
from gpu_backend.engine.plan import SequenceStep
from gpu_backend.engine.sampler import Sampled
from gpu_backend.engine.sequence import Sequence as Reply
from gpu_backend.engine.upload import upload
from gpu_backend.kernels.wishes import Wishes

GUESSES = 4
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of guesses that hold if those before them do
SETTINGS = {
    "speculative_method": "ngram",
    "num_speculative_tokens": GUESSES,
}


def known(position: int, vocab: int) -> int:
    """Return the token at a position of any reply; ``known_at`` says the same of many."""
    return (position * 7919 + 5) % vocab


@contextmanager
def known_text() -> Iterator[None]:
    """Let every reply be that text. Graphs captured meanwhile stay so."""
    sample, draw = device_step.sample, graphs.draw

    def sample_known(
        logits: Tensor,
        steps: Sequence[SequenceStep],
        last_tokens: Tensor | None = None,
        masks: Future[Tensor] | None = None,
    ) -> Sampled:
        sampled = sample(logits, steps, last_tokens, masks)
        positions = upload([step.start + len(step.token_ids) for step in steps], logits.device, torch.long)
        return replace(sampled, token_ids=_known_at(positions, logits.shape[-1]))

    def draw_known(logits: Tensor, wishes: Wishes) -> tuple[Tensor, Tensor]:
        drawn, usable = draw(logits, wishes)
        return torch.where(drawn < 0, 0, _known_at(wishes.position.long(), logits.shape[-1])), usable

    device_step.sample, graphs.draw = sample_known, draw_known
    try:
        yield
    finally:
        device_step.sample, graphs.draw = sample, draw


def guess(loop: EngineLoop, share: float, vocab: int) -> None:
    """Let a loop guess that text, each token right with a chance of ``share``."""
    dice = random.Random(0)

    def propose(reply: Reply, count: int) -> tuple[int, ...]:
        first = len(reply.token_ids)
        right = [known(first + i, vocab) for i in range(count)]
        return tuple(token if dice.random() < share else (token + 1) % vocab for token in right)

    assert loop.scheduler.speculator is not None
    loop.scheduler.speculator.propose = propose
    loop.scheduler.speculator.is_forced = True  # what guesses cost where they do not pay is what is measured


def break_even(points: Sequence[tuple[float, float]]) -> float:
    """Return the share from which on guesses pay, between (share, times as fast) points; 2 if none does."""
    if points[0][1] >= 1:
        return points[0][0]
    for (low, slower), (high, faster) in pairwise(points):
        if faster >= 1:
            return low + (high - low) * (1 - slower) / (faster - slower)
    return 2.0


def _known_at(positions: Tensor, vocab: int) -> Tensor:
    return (positions * 7919 + 5) % vocab
