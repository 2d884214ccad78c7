# Bias, penalties, least lengths and grammars' masks on the device: the same logits as by their definitions on the CPU.

from __future__ import annotations

import math
from array import array
from collections import Counter

import torch

from gpu_backend.sampling.adjustments import adjust
from gpu_backend.sampling.token_counts import TokenCounts
from gpu_backend.step.grammar import apply_masks
from gpu_backend.step.plan import SequenceStep
from gpu_backend.step.sampling_params import SamplingParams
from tests.gpu.check import Check, Setting, relative_error, require

TOLERANCE = 1e-6


def penalties(setting: Setting) -> str:
    """Rows that ask for something, each for its own, among rows that ask for nothing."""
    vocab = setting.dice.choice((300, 5_000) if setting.device.type == "cpu" else (300, 32_000, 151_936))
    steps = [_step(setting, vocab, row, asks=row % 3 > 0) for row in range(9)]
    logits = setting.randn(len(steps), vocab) * 4
    expected = [_by_definition(row, step) for row, step in zip(logits.tolist(), steps, strict=True)]
    out, counts = logits.clone(), TokenCounts(len(steps), vocab, logits.device)
    counts.update(steps, torch.zeros(len(steps), dtype=torch.long, device=logits.device))
    adjust(out, steps, counts)
    finite = torch.tensor(expected).isfinite()
    require(torch.equal(out.cpu().isfinite(), finite), "other tokens are forbidden than on the CPU")
    require(torch.equal(out[::3], logits[::3]), "rows that ask for nothing were touched")
    error = relative_error(out.cpu()[finite], torch.tensor(expected)[finite])
    figures = f"vocabulary {vocab:,}, relative error {error:.1e}"
    require(error <= TOLERANCE, figures)
    return figures


def masks(setting: Setting) -> str:
    """Each bit decides about one token, to the last of a vocabulary that no word size divides."""
    vocab = setting.dice.choice((33, 260, 32_001, 151_936))
    for rows in ([0, 1, 2, 3], [2], [0, 3]):
        words = torch.randint(-(2**31), 2**31, (len(rows), -(-vocab // 32)), dtype=torch.int32)
        logits = setting.randn(4, vocab)
        out = logits.clone()
        apply_masks(out, rows, words)
        allowed = torch.ones(4, vocab, dtype=torch.bool)
        allowed[rows] = (words[:, :, None] >> torch.arange(32) & 1).view(len(rows), -1)[:, :vocab].bool()
        expected = logits.cpu().masked_fill(~allowed, -torch.inf)
        require(torch.equal(out.cpu(), expected), f"a mask of {len(rows)} rows and {vocab} tokens is not its bits")
    return f"vocabulary {vocab:,}, equal"


def _step(setting: Setting, vocab: int, row: int, *, asks: bool) -> SequenceStep:
    dice = setting.dice
    prompt, reply = ([dice.randrange(vocab) for _ in range(dice.randrange(1, 400))] for _ in range(2))
    reply += reply[: len(reply) // 2]
    sampling = SamplingParams(max_tokens=9999)
    if asks:
        sampling = SamplingParams(
            max_tokens=9999,
            presence_penalty=dice.choice((0.0, 0.7)),
            frequency_penalty=dice.choice((0.0, -0.3, 1.5)),
            repetition_penalty=dice.choice((1.0, 0.8, 1.3)),
            logit_bias=tuple((dice.randrange(vocab // 9) * 9 + i, dice.uniform(-9, 9)) for i in range(3)),
            min_tokens=dice.choice((0, 1000)),
            stop_token_ids=frozenset(dice.sample(range(vocab), 3)),
        )
    text = array("i", prompt + reply).tobytes()
    start = len(prompt) + len(reply) - 1
    return SequenceStep(1, (7,), start, (), True, sampling, 0, num_prompt=len(prompt), row=row, text=text)


def _by_definition(logits: list[float], step: SequenceStep) -> list[float]:
    """One row, token by token."""
    asked, out = step.sampling, list(logits)
    text = array("i", step.text)
    prompt, counts = set(text[: step.num_prompt]), Counter(text[step.num_prompt :])
    for token, bias in asked.logit_bias:
        out[token] += bias
    if step.num_generated < asked.min_tokens:
        for token in asked.stop_token_ids:
            out[token] = -math.inf
    for token in prompt | counts.keys():
        out[token] *= asked.repetition_penalty if out[token] < 0 else 1 / asked.repetition_penalty
    for token, count in counts.items():
        out[token] -= asked.frequency_penalty * count + asked.presence_penalty
    return out


CHECKS = (
    Check("bias, least length and penalties equal their definitions", penalties, (torch.float32,)),
    Check("grammars' masks forbid what their bits say", masks, (torch.float32,)),
)
