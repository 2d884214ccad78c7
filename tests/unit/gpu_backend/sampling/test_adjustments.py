# Bias, least length and penalties: transformers' processors judge where it has them, OpenAI's formula where not.

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpu_backend.sampling.adjustments import adjust
from gpu_backend.sampling.sampler import sample
from gpu_backend.sampling.token_counts import TokenCounts
from gpu_backend.step.plan import SequenceStep
from gpu_backend.step.sampling_params import SamplingParams

VOCAB = 40
PLAIN = SamplingParams(max_tokens=99, temperature=0.0)


def step(sampling: SamplingParams, prompt: list[int], reply: list[int]) -> SequenceStep:
    """The decode that follows ``reply``."""
    known = [*prompt, *reply]
    return SequenceStep(
        1,
        (known[-1],),
        len(known) - 1,
        (0,),
        True,
        sampling,
        0,
        num_prompt=len(prompt),
        text=array("i", known).tobytes() if sampling.penalises_reply else b"",
    )


def adjusted(logits: Tensor, *steps: SequenceStep) -> Tensor:
    out, counts = logits.clone(), TokenCounts(len(steps), VOCAB, logits.device)
    own = [replace(step, row=row) for row, step in enumerate(steps)]
    counts.update(own, torch.zeros(len(steps), dtype=torch.long))
    adjust(out, own, counts)
    return out


def random_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=30)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    TOKENS,
    st.floats(0.1, 3),
    st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=5),
    st.integers(0, 40),
)
def test_bias_length_and_repetition_are_those_of_transformers(
    prompt: list[int], reply: list[int], penalty: float, bias: dict[int, float], least: int
) -> None:
    """The same numbers come of its processors in our order: length, bias, repetition over prompt and reply."""
    from transformers import generation as judging  # a second, for runs of this test alone

    sampling = replace(
        PLAIN,
        repetition_penalty=penalty,
        logit_bias=tuple(bias.items()),
        min_tokens=least,
        stop_token_ids=frozenset({3, 17}),
    )
    logits = random_logits(1, len(prompt))

    ours = adjusted(logits, step(sampling, prompt, reply))

    judges = judging.LogitsProcessorList(
        [judging.MinNewTokensLengthLogitsProcessor(len(prompt), least, [3, 17], device="cpu")]
    )
    if bias:
        judges.append(judging.SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]))
    judges.append(judging.RepetitionPenaltyLogitsProcessor(penalty))
    torch.testing.assert_close(ours, judges(torch.tensor([[*prompt, *reply]]), logits.clone()))


@given(TOKENS, st.floats(-2, 2), st.floats(-2, 2))
def test_frequency_and_presence_follow_openais_formula(reply: list[int], frequency: float, presence: float) -> None:
    """mu[j] -= c[j] * frequency + (c[j] > 0) * presence, c counting the reply alone, not the prompt."""
    sampling = replace(PLAIN, frequency_penalty=frequency, presence_penalty=presence)
    logits = random_logits(1)

    ours = adjusted(logits, step(sampling, [5, 5, 6], reply))

    expected = [
        value - reply.count(j) * frequency - (presence if j in reply else 0)
        for j, value in enumerate(logits[0].tolist())
    ]
    torch.testing.assert_close(ours[0], torch.tensor(expected))


def test_rows_that_ask_nothing_are_not_touched_and_change_nothing() -> None:
    """Bit for bit: a row's logits are the same alone and among others, and its neighbours' are their own."""
    asks = [
        replace(PLAIN, repetition_penalty=1.3),
        PLAIN,
        replace(PLAIN, frequency_penalty=0.7, logit_bias=((4, -100.0),)),
        replace(PLAIN, min_tokens=9, stop_token_ids=frozenset({2})),
        replace(PLAIN, presence_penalty=-1.0, repetition_penalty=0.8),
    ]
    steps = [step(sampling, [row, 7, 7], list(range(row)) * 2) for row, sampling in enumerate(asks)]
    logits = random_logits(len(steps))

    together = adjusted(logits, *steps)

    assert torch.equal(together[1], logits[1])
    for row, own in enumerate(steps):
        assert torch.equal(together[row], adjusted(logits[row : row + 1], own)[0])
        assert row == 1 or not torch.equal(together[row], logits[row])


def test_logprobs_are_those_before_any_adjustment() -> None:
    """A bias moves the choice, not what the model thought of it."""
    logits = random_logits(1)
    sampling = replace(PLAIN, logit_bias=((9, 100.0),), logprobs=2)

    sampled = sample(logits.clone(), [step(sampling, [1], [])])

    assert sampled.token_ids.tolist() == [9]
    assert sampled.logprobs is not None
    (report,) = sampled.logprobs.read()
    assert report.logprob == pytest.approx(logits.log_softmax(-1)[0, 9].item())
    assert [id_ for id_, _ in report.top] == logits[0].topk(2).indices.tolist()


def test_numbers_that_are_not_finite_are_still_seen() -> None:
    """A least length puts infinities in; the check for poison looks at what the model said."""
    logits = random_logits(2)
    logits[1, 5] = float("nan")
    sampling = replace(PLAIN, min_tokens=5, stop_token_ids=frozenset({3}))

    assert sample(logits, [step(sampling, [1], []), step(sampling, [1], [])]).finite.tolist() == [True, False]
