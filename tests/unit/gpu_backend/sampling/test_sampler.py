# How tokens are drawn: known answers for the noise, and what each filter lets through.

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpu_backend.sampling.sampler import noise, philox, sample, sampling_tensors_of
from gpu_backend.step.plan import SequenceStep
from gpu_backend.step.sampling_params import SamplingParams


def gumbel_noise(steps: list[SequenceStep], vocab_size: int, device: torch.device) -> Tensor:
    """Return the noise (steps, vocab) of each step's next position."""
    asked = sampling_tensors_of(steps, device)
    return noise(asked.position, asked.reply, asked.seed, vocab_size)


def step(sampling: SamplingParams, position: int = 5, reply_index: int = 0) -> SequenceStep:
    """A decode whose next token takes ``position``."""
    return SequenceStep(1, (7,), position - 1, (0,), True, sampling, reply_index)


def drawn(logits: Tensor, count: int, **wishes: float) -> list[int]:
    """Sample the same logits at ``count`` positions."""
    sampling = SamplingParams(max_tokens=1, seed=11, **wishes)  # type: ignore[arg-type]
    steps = [step(sampling, position) for position in range(1, count + 1)]
    return sample(logits.expand(count, -1).clone(), steps).token_ids.tolist()


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    """Ten rounds give the vectors that the authors of the generator publish (Random123, kat_vectors)."""
    c0, c1, c2, c3 = map(torch.tensor, counter)
    k0, k1 = map(torch.tensor, key)

    assert tuple(word.item() for word in philox((c0, c1, c2, c3), (k0, k1), rounds=10)) == words


def test_noise_is_a_function_of_seed_reply_and_position_alone() -> None:
    """A row's noise is the same in any batch and vocabulary; any other seed, reply or position has another."""
    base = step(SamplingParams(max_tokens=1, seed=2**40 + 3))
    others = [
        step(SamplingParams(max_tokens=1, seed=2**40 + 4)),
        step(SamplingParams(max_tokens=1, seed=2**41 + 3)),
        step(base.sampling, reply_index=1),
        step(base.sampling, position=6),
    ]
    cpu = torch.device("cpu")

    together = gumbel_noise([*others, base], 103, cpu)
    alone = gumbel_noise([base], 101, cpu)

    assert torch.equal(together[-1, :101], alone[0])
    for row in together[:-1]:
        assert (row[:101] != alone[0]).all()


def test_noise_has_the_gumbel_distribution() -> None:
    """Mean Euler's constant, variance pi squared over six, and never anything but a finite number."""
    steps = [step(SamplingParams(max_tokens=1, seed=seed)) for seed in range(50)]

    drawn = gumbel_noise(steps, 20_000, torch.device("cpu"))

    assert torch.isfinite(drawn).all()
    assert drawn.mean().item() == pytest.approx(0.57722, abs=0.005)
    assert drawn.var().item() == pytest.approx(math.pi**2 / 6, abs=0.01)


def test_draws_follow_the_models_probabilities() -> None:
    """Over many positions each token comes up as often as the softmax at that temperature says."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0])
    count = 20_000

    tokens = torch.tensor(drawn(logits, count, temperature=0.7))

    expected = (logits / 0.7).softmax(-1) * count
    observed = torch.bincount(tokens, minlength=6)
    chi_squared = ((observed - expected) ** 2 / expected).sum().item()
    assert chi_squared < 20.5  # five degrees of freedom, one in a thousand


def test_temperature_zero_takes_the_likeliest() -> None:
    """Greedy rows have no noise, also beside rows that do."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    cold, warm = SamplingParams(1, temperature=0.0), SamplingParams(1, temperature=5.0)

    tokens = sample(logits, [step(cold), step(warm), step(cold), step(warm)]).token_ids.tolist()

    assert [tokens[0], tokens[2]] == logits[[0, 2]].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("wishes", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.5}, {0}),  # 0.5 is reached by the first token
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.81}, {0, 1, 2}),
        ({"top_p": 0.0}, {0}),
        ({"min_p": 0.25}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.84}, {0, 1}),  # of what top-k left, 0.5 and 0.3 are 84.2 %
        ({"top_k": 3, "top_p": 0.85}, {0, 1, 2}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_filters_keep_the_likely_tokens(wishes: dict[str, float], allowed: set[int]) -> None:
    """Top-k counts, top-p adds up what top-k left, min-p compares with the likeliest."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()

    assert set(drawn(logits, 2000, **wishes)) == allowed


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**20),
    st.sampled_from([0, 1, 3, 40]),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.05, 0.9]),
)
def test_draw_is_the_best_score_among_the_tokens_that_sorting_leaves(
    seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    """Whatever the filters, the token is the one that a sort, a running sum and a mask would choose."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 100, generator=generator) * torch.tensor([[0.1], [2.0], [6.0]])
    steps = [step(SamplingParams(1, 0.8, top_p, top_k, min_p, seed=seed + i)) for i in range(3)]

    tokens = sample(logits, steps).token_ids.tolist()

    drawn = gumbel_noise(steps, 100, torch.device("cpu"))
    for row in range(3):
        scaled = logits[row] / 0.8
        values, order = scaled.sort(descending=True)
        values = values[: top_k or 100]
        probabilities = values.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        kept = (before < top_p) & (probabilities >= min_p * probabilities[0])
        kept[0] = True
        allowed = order[: len(values)][kept]
        assert tokens[row] == allowed[(scaled + drawn[row])[allowed].argmax()].item()


def test_rows_without_usable_numbers_are_named() -> None:
    """A row with an infinity or with what is not a number is flagged, and its neighbours are not."""
    logits = torch.zeros(4, 10)
    logits[1, 3], logits[2, 5] = float("nan"), float("inf")

    sampled = sample(logits, [step(SamplingParams(1, seed=i)) for i in range(4)])

    assert sampled.finite.tolist() == [True, False, False, True]


def test_logprobs_are_reported_only_where_asked() -> None:
    """Each row gets as many alternatives as it asked for; zero still reports the chosen token."""
    logits = torch.tensor([[1.0, 3.0, 2.0]]).expand(3, -1).clone()
    wishes = (None, 0, 2)

    sampled = sample(logits, [step(SamplingParams(1, temperature=0.0, logprobs=wish)) for wish in wishes])

    expected = logits[0].log_softmax(-1)
    assert sampled.logprobs is not None
    none, two = sampled.logprobs.read()
    assert none.top == ()
    assert two.logprob == pytest.approx(expected[1].item())
    assert [id_ for id_, _ in two.top] == [1, 2]
