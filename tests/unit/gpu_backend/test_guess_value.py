# When guesses pay, judged by a predicted clock.

from __future__ import annotations

import pytest

from gpu_backend.engine.cost import StepCost, StepWork
from gpu_backend.engine.guess_value import Offer, best_lengths, could_pay
from gpu_backend.engine.plan import SequenceStep
from gpu_backend.engine.sampling_params import SamplingParams

# A step takes as long as reading the weights up to 64 tokens, and as their products beyond.
COST = StepCost(fixed=0.0, weights=1.0, token=1 / 64, context=0.0, pair=0.0)


def offer(acceptance: float, guesses: int = 4) -> Offer:
    """Return an offer for a decode at position 10."""
    step = SequenceStep(1, (1,), 10, (0,), samples=True, sampling=SamplingParams(8), reply_index=0)
    return Offer(step, guesses, acceptance)


def lengths(
    decodes: int, *offers: Offer, prompts: int = 0, budget: int = 1000, seconds: float = 9.0, is_on: bool = True
) -> list[int]:
    """Return what is taken of the offers in a step with that many decodes, and tokens of prompts."""
    base = StepWork(decodes)
    return best_lengths(COST, base, base + StepWork(prompts), offers, budget, seconds, is_on)


def test_guesses_that_cost_nothing_are_taken_while_they_may_hold() -> None:
    """A step that waits for its weights has room; a guess with less than a chance in ten is not worth a place in it."""
    assert lengths(8, offer(0.9), offer(0.4), offer(0.05)) == [4, 2, 0]


def test_the_likeliest_guesses_come_first() -> None:
    """Where only some have room, chances decide, not the order of the sequences."""
    assert lengths(8, offer(0.5), offer(0.9), budget=3) == [0, 3]
    assert lengths(8, offer(0.5), offer(0.9), budget=5) == [1, 4]


@pytest.mark.parametrize(("decodes", "expected"), [(32, 4), (62, 2), (64, 0), (400, 0)])
def test_a_full_step_takes_no_guesses(decodes: int, expected: int) -> None:
    """From the knee on every guess takes the time of a token that is sure."""
    assert lengths(decodes, offer(0.9)) == [expected]


def test_no_guess_is_asked_for_where_none_could_pay() -> None:
    """Even one that is sure to hold would take as long as a decode."""
    assert could_pay(COST, StepWork(63), StepWork(63))
    assert not could_pay(COST, StepWork(64), StepWork(64))
    assert not could_pay(COST, StepWork(65), StepWork(65))


def test_a_step_full_of_prompts_takes_guesses_of_few_decodes() -> None:
    """What a decode would make in a guess's time counts, not what the prompts take."""
    assert lengths(2, offer(0.9), prompts=100) == [4]


def test_a_step_is_not_stretched_beyond_its_limit() -> None:
    """Others wait for the step to end."""
    assert lengths(2, offer(0.9), prompts=100, seconds=102 / 64 + 2.5 / 64) == [2]


def test_guessing_begins_only_where_it_gains_clearly() -> None:
    """Between the two thresholds it stays as it is, off or on."""
    hardly = [offer(0.9, 1)] * 7  # 56 decodes take 1 s; 63 tokens still do, and then a token's time for each
    close = [offer(0.95, 1)] * 64

    assert sum(lengths(56, *hardly, is_on=False)) == 7
    assert sum(lengths(60, *close, is_on=False)) == 4
    assert lengths(50, *[offer(0.86, 1)] * 40, is_on=False) != [0] * 40
