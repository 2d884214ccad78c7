# What drafts gain or cost on a device: decodes with drafts of which a chosen share holds, against decodes without.
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

from gpu_backend.engine.loop import EngineLoop
from gpu_backend.execution import device_step, graphs
from gpu_backend.kernels.layout.decode_rows import FROM_STATE, StateTensors
from gpu_backend.kernels.layout.sampling_tensors import SamplingTensors
from gpu_backend.kernels.layout.upload import upload
from gpu_backend.sampling.sampler import Sampled
from gpu_backend.step.plan import SequenceStep
from gpu_backend.step.sequence import Sequence as Reply

GUESSES = 4
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of drafts that hold if those before them do
SETTINGS = {
    "speculative_method": "ngram",
    "num_speculative_tokens": GUESSES,
}


def known(position: int, vocab: int) -> int:
    """Return the token at a position of any reply; ``known_at`` says the same of many."""
    return (position * 7919 + 5) % vocab


@contextmanager
def known_text(vocab: int, device: torch.device) -> Iterator[Tensor]:
    """Let every reply be that text, and the device draft it. Graphs captured meanwhile stay so.

    What it yields says how many of a thousand drafts of the device are right.
    """
    sample, draw, propose = device_step.sample, graphs.draw, graphs.propose
    right_of_1000 = torch.zeros((), dtype=torch.long, device=device)

    def sample_known(
        logits: Tensor,
        steps: Sequence[SequenceStep],
        last_tokens: Tensor | None = None,
        masks: Future[Tensor] | None = None,
    ) -> Sampled:
        sampled = sample(logits, steps, last_tokens, masks)
        positions = upload([step.start + len(step.token_ids) for step in steps], logits.device, torch.long)
        return replace(sampled, token_ids=_known_at(positions, logits.shape[-1]))

    def draw_known(logits: Tensor, tensors: SamplingTensors) -> tuple[Tensor, Tensor]:
        drawn, usable = draw(logits, tensors)
        return torch.where(drawn < 0, 0, _known_at(tensors.position.long(), logits.shape[-1])), usable

    def propose_known(inputs: Tensor, state: StateTensors, width: int) -> None:
        propose(inputs, state, width)  # what searching takes is a part of it
        row, start = inputs[:, 0], inputs[:, 1]
        start = torch.where(start == FROM_STATE, state.starts.index_select(0, row), start)
        where = start[:, None] + 1 + torch.arange(state.drafts.shape[1], device=inputs.device)
        dice = (where * 1_103_515_245 + row[:, None] * 40_503 + 12_345) % 2**31
        is_right = (dice // 2**9 * 48_271 % (2**31 - 1)) % 1000 < right_of_1000
        right = _known_at(where, vocab)
        state.drafts.index_copy_(0, row, torch.where(is_right, right, (right + 1) % vocab))

    device_step.sample, graphs.draw, graphs.propose = sample_known, draw_known, propose_known
    try:
        yield right_of_1000
    finally:
        device_step.sample, graphs.draw, graphs.propose = sample, draw, propose


def draft(loop: EngineLoop, share: float, vocab: int, right_of_1000: Tensor) -> None:
    """Let a loop draft that text, each token right with a chance of ``share``, by the host or on the device."""
    dice = random.Random(0)
    right_of_1000.fill_(round(1000 * share))

    def propose(reply: Reply, count: int) -> tuple[int, ...]:
        first = len(reply.token_ids)
        right = [known(first + i, vocab) for i in range(count)]
        return tuple(token if dice.random() < share else (token + 1) % vocab for token in right)

    assert loop.scheduler.speculator is not None
    loop.scheduler.speculator.draft_source = propose
    loop.scheduler.speculator.economics.is_forced = True  # what drafts cost where they do not pay is what is measured


def break_even(points: Sequence[tuple[float, float]]) -> float:
    """Return the share from which on drafts pay, between (share, times as fast) points; 2 if none does."""
    if points[0][1] >= 1:
        return points[0][0]
    for (low, slower), (high, faster) in pairwise(points):
        if faster >= 1:
            return low + (high - low) * (1 - slower) / (faster - slower)
    return 2.0


def _known_at(positions: Tensor, vocab: int) -> Tensor:
    return (positions * 7919 + 5) % vocab
