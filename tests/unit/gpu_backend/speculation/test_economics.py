# When drafts pay, judged by a predicted clock.

from __future__ import annotations

import math

import pytest

from gpu_backend.speculation.economics import (
    ALLOWANCE,
    MOST,
    DraftAccount,
    Offer,
    StepFrame,
    StepTimes,
    best_lengths,
    could_pay,
    trial_lengths,
)
from gpu_backend.step.cost import ASSUMED_COSTS, StepCost, StepWork
from gpu_backend.step.plan import SequenceStep
from gpu_backend.step.sampling_params import SamplingParams

# A step takes as long as reading the weights up to 64 tokens, and as their products beyond.
COST = StepCost(fixed=0.0, weights=1.0, token=1 / 64, context=0.0, pair=0.0)
ON_CPU = ASSUMED_COSTS["cpu"]


def offer(acceptance: float, drafts: int = 4) -> Offer:
    """Return an offer for a decode at position 10."""
    step = SequenceStep(1, (1,), 10, (0,), samples=True, sampling=SamplingParams(8), reply_index=0)
    return Offer(step, drafts, acceptance)


def lengths(
    decodes: int, *offers: Offer, prompts: int = 0, budget: int = 1000, stretch: float = 9.0, is_on: bool = True
) -> list[int]:
    """Return what is taken of the offers in a step with that many decodes, and tokens of prompts."""
    base = StepWork(decodes)
    return best_lengths(StepTimes(COST), StepFrame(base, base + StepWork(prompts)), offers, budget, stretch, is_on)


def test_drafts_that_cost_nothing_are_taken_while_they_may_hold() -> None:
    """A step that waits for its weights has room; a draft with less than a chance in ten is not worth a place in it."""
    assert lengths(8, offer(0.9), offer(0.4), offer(0.05)) == [4, 2, 0]


def test_the_likeliest_drafts_come_first() -> None:
    """Where only some have room, chances decide, not the order of the sequences."""
    assert lengths(8, offer(0.5), offer(0.9), budget=3) == [0, 3]
    assert lengths(8, offer(0.5), offer(0.9), budget=5) == [1, 4]


@pytest.mark.parametrize(("decodes", "expected"), [(32, 4), (62, 2), (64, 0), (400, 0)])
def test_a_full_step_takes_no_drafts(decodes: int, expected: int) -> None:
    """From the knee on every draft takes the time of a token that is sure."""
    assert lengths(decodes, offer(0.9)) == [expected]


def test_no_draft_is_asked_for_where_none_could_pay() -> None:
    """Even one that is sure to hold would take as long as a decode."""
    times = StepTimes(COST)

    assert could_pay(times, StepFrame(StepWork(63), StepWork(63)), 4)
    assert not could_pay(times, StepFrame(StepWork(64), StepWork(64)), 4)
    assert not could_pay(times, StepFrame(StepWork(65), StepWork(65)), 4)


def test_a_step_full_of_prompts_takes_drafts_of_few_decodes() -> None:
    """What a decode would make in a draft's time counts, not what the prompts take."""
    assert lengths(2, offer(0.9), prompts=100) == [4]


def test_a_step_is_not_stretched_beyond_its_limit() -> None:
    """Others wait for the step to end, unless each of them has as many tokens of it by drafts."""
    assert lengths(2, offer(0.9), prompts=100, stretch=102 / 64 + 2.5 / 64) == [2]
    frame = StepFrame(StepWork(8), StepWork(8))  # takes 2.6; each draft 0.2 more
    all_but_one, everyone = (
        sum(best_lengths(StepTimes(ON_CPU), frame, [offer(0.95)] * count, 99, 1.5, True)) for count in (7, 8)
    )
    assert (all_but_one, everyone) == (6, 32)


def test_what_was_measured_decides() -> None:
    """A product with a vector is none with a matrix: one token takes 14 ms, two 22, and each more next to nothing."""
    times, alone = StepTimes(ON_CPU), StepFrame(StepWork(1, 1, 1), StepWork(1, 1, 1))
    assert [best_lengths(times, alone, [offer(chance)], 9, math.inf, True) for chance in (0.3, 0.6)] == [[1], [2]]
    for tokens, seconds in ((1, 0.014), (2, 0.022), (5, 0.024)):
        for _ in range(2):
            (times.with_drafts if tokens > 1 else times.plain).learn(StepWork(tokens), 0.0, seconds)

    found = [best_lengths(times, alone, [offer(chance)], 9, math.inf, True) for chance in (0.3, 0.35, 0.5, 0.9)]

    assert found == [[0], [0], [3], [4]]  # forced ones break even at 0.42
    assert times.plain.seconds(StepWork(1)) == pytest.approx(0.014)
    assert times.with_drafts.seconds(StepWork(3)) == pytest.approx(0.0228, rel=0.03)
    assert times.with_drafts.seconds(StepWork(9)) == pytest.approx(
        0.024 + 4 * 0.002 / 3, rel=0.03
    )  # as they grew before


def test_one_step_that_was_held_up_changes_nothing() -> None:
    """Of up to four steps of a size the quickest counts, of five the second; the last five are remembered."""
    times, work = StepTimes(ON_CPU), StepWork(5)
    for seconds in (9.0, 0.024, 0.025, 5.0):
        times.with_drafts.learn(work, 0.0, seconds)
    held_up = times.with_drafts.seconds(work)
    for _ in range(3):
        times.with_drafts.learn(work, 0.0, 0.05)

    assert held_up == pytest.approx(0.024)
    assert times.with_drafts.seconds(work) == pytest.approx(0.05)


def test_a_trial_stretches_no_step() -> None:
    """To find out what drafts take, all are made if each reply is expected to gain by it; else a few."""
    times = StepTimes(ON_CPU)  # eight decodes take 2.6; each draft 0.2 more

    def trial(decodes: int, *offers: Offer) -> int:
        base = StepWork(decodes)
        return sum(trial_lengths(times, StepFrame(base, base), offers, 1000, 1.5))

    assert trial(8, *[offer(0.9)] * 8) == 32
    assert 4 <= trial(8, *[offer(0.1)] * 8) <= 14
    assert trial(8, *[offer(0.9)] * 7) < 28


def test_no_more_is_lost_than_the_allowance_makes_up_for() -> None:
    """Whatever is believed: drafts that always lose half a step are stopped, and tried again now and then."""
    account, lost = DraftAccount(), 0.0
    for _ in range(1000):
        account.earn()
        if not account.is_overdrawn:
            account.book(-0.5)
            lost += 0.5

    assert 0.9 * 1000 * ALLOWANCE < lost <= 1000 * ALLOWANCE + 2 * MOST


def test_drafting_begins_only_where_it_gains_clearly() -> None:
    """Between the two thresholds it stays as it is, off or on."""
    hardly = [offer(0.9, 1)] * 7  # 56 decodes take 1 s; 63 tokens still do, and then a token's time for each
    close = [offer(0.95, 1)] * 64

    assert sum(lengths(56, *hardly, is_on=False)) == 7
    assert sum(lengths(60, *close, is_on=False)) == 4
    assert lengths(50, *[offer(0.86, 1)] * 40, is_on=False) != [0] * 40
