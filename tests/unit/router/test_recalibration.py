# What measured outcomes say of scores: a shift, the quality that keeps what was asked, and a curve.

from __future__ import annotations

import math
import random

import pytest

from router.recalibration import LEAST_OUTCOMES, Outcome, Shift, curve_of, interval_of, recalibrated, shift_of


def outcomes(count: int, shift: float, seed: int = 1) -> list[Outcome]:
    """Outcomes whose true chance lies ``shift`` logits above the score."""
    dice = random.Random(seed)
    scores = [dice.uniform(0.6, 0.95) for _ in range(count)]
    odds = [math.exp(math.log(score / (1 - score)) + shift) for score in scores]
    chances = [each / (1 + each) for each in odds]
    return [Outcome(s, dice.random() < chance, 10, 100) for s, chance in zip(scores, chances, strict=True)]


@pytest.mark.parametrize("true", [-1.0, 0.0, 0.7])
def test_a_shift_is_found_from_outcomes(true: float) -> None:
    """Many outcomes tell by how much scores are wrong, to within the error that is said."""
    shift = shift_of(outcomes(2_000, true))

    assert abs(shift.value - true) < 3 * shift.error < 0.3


def test_without_outcomes_nothing_shifts() -> None:
    """Where nothing was measured the scores are believed; a few outcomes of one kind move them little."""
    few = shift_of([Outcome(0.8, True, 1, 2)] * 3)

    assert shift_of([]).value == 0.0
    assert 0 < few.value < 0.5


def test_the_recalibrated_quality_keeps_the_chance_asked_for() -> None:
    """Scores that are too low need a lower quality, scores that are too high a higher one; the ends stay."""
    too_low, too_high = Shift(0.5, 0.1), Shift(-0.5, 0.1)

    assert Shift(0.0, 0.1).threshold(0.8) == pytest.approx(0.8)
    assert too_low.threshold(0.8) < 0.8 < too_high.threshold(0.8)
    assert too_low.threshold(0.8, -2) < too_low.threshold(0.8) < too_low.threshold(0.8, 2)
    assert [too_low.threshold(edge) for edge in (0.0, 1.0)] == [0.0, 1.0]


def test_a_curve_says_what_a_quality_would_bring() -> None:
    """Of four requests two score above 0.75: they stay small, one of them sufficed, the others cost the large price."""
    four = [Outcome(score, suffices, 10, 100) for score, suffices in ((0.7, False), (0.7, True), (0.8, True), (0.9, 0))]

    below, between, above = curve_of(four, (0.5, 0.75, 0.95))

    assert (below.small, below.share_large, below.suffices, below.nanousd) == (4, 0.0, 0.5, 10.0)
    assert (between.small, between.share_large, between.suffices, between.nanousd) == (2, 0.5, 0.5, 55.0)
    assert (above.small, above.share_large, above.suffices, above.low, above.nanousd) == (0, 1.0, None, None, 100.0)


def test_an_interval_is_never_certain() -> None:
    """Ten of ten is not always (Wilson's interval, known values)."""
    assert interval_of(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert interval_of(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)


def test_a_threshold_moves_only_by_what_was_measured() -> None:
    """Too few outcomes move nothing; what is within the error of what was found stays; else the quality is kept."""
    too_high = outcomes(400, -0.8)
    found = recalibrated(too_high, 0.8, None)

    assert recalibrated(too_high[: LEAST_OUTCOMES - 1], 0.8, None) is None
    assert found == shift_of(too_high).threshold(0.8) > 0.85
    assert recalibrated(too_high, 0.8, found - 0.005) == found - 0.005
    assert recalibrated(too_high, 0.8, 0.8) == found


def test_a_threshold_goes_no_lower_than_what_was_measured() -> None:
    """Scores below those that went to small models are unknown: a step ends at the lowest that was seen."""
    too_low = outcomes(400, 1.5)
    least = min(one.score for one in too_low)

    assert shift_of(too_low).threshold(0.8) < least
    assert recalibrated(too_low, 0.8, None) == least


def test_what_never_sufficed_asks_for_more_and_what_always_did_for_no_more() -> None:
    """Outcomes of one kind move the threshold to one side, and it stays a chance."""
    never, always = ([Outcome(0.9, suffices, 1, 2)] * 200 for suffices in (False, True))

    assert 0.9 < (recalibrated(never, 0.8, None) or 0) < 1
    assert recalibrated(always, 0.8, None) == 0.8
