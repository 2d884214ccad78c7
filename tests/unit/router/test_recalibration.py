# What measured comparisons say of scores: a shift, the quality that keeps what was asked, and a curve.

from __future__ import annotations

import math
import random

import pytest

from router.recalibration import LEAST_COMPARISONS, Comparison, calibration_of, curve_of, interval_of, recalibrated


def comparisons(count: int, shift: float, seed: int = 1) -> list[Comparison]:
    """Outcomes whose true chance lies ``shift`` logits above the score."""
    dice = random.Random(seed)
    scores = [dice.uniform(0.6, 0.95) for _ in range(count)]
    odds = [math.exp(math.log(score / (1 - score)) + shift) for score in scores]
    chances = [each / (1 + each) for each in odds]
    return [Comparison(s, dice.random() < chance, 10, 100) for s, chance in zip(scores, chances, strict=True)]


@pytest.mark.parametrize("true", [-1.0, 0.0, 0.7])
def test_what_was_found_is_what_scores_then_mean(true: float) -> None:
    """Many comparisons tell the chance of every score that they cover, to within a few hundredths."""
    calibration = calibration_of(comparisons(2_000, true))

    for score in (0.65, 0.75, 0.85, 0.92):
        odds = score / (1 - score) * math.exp(true)
        assert abs(calibration.chance(score) - odds / (1 + odds)) < 0.06


def test_scores_that_mislead_in_the_middle_are_mended() -> None:
    """No shift and no slope mends scores that are right at the ends and wrong between; steps do."""
    dice = random.Random(3)
    scores = [dice.uniform(0.6, 0.95) for _ in range(1_500)]
    calibration = calibration_of([Comparison(s, dice.random() < (0.5 if s < 0.8 else 0.9), 1, 2) for s in scores])

    assert max(abs(calibration.chance(score) - 0.5) for score in (0.65, 0.7, 0.77)) < 0.1
    assert max(abs(calibration.chance(score) - 0.9) for score in (0.82, 0.87, 0.93)) < 0.1


@pytest.mark.parametrize("kind", [False, True])
def test_few_comparisons_of_one_kind_change_little(kind: bool) -> None:
    """Without comparisons the scores are believed, a few move them a little, and none makes anything certain."""
    nothing, few = calibration_of([]), calibration_of([Comparison(0.8, kind, 1, 2)] * 5)

    for score in (0.015, 0.3, 0.805, 0.985):
        assert abs(nothing.chance(score) - score) < 0.006
    assert 0.03 < abs(few.chance(0.8) - 0.8) < 0.3
    assert all(0 < step.chance < 1 for step in few.steps)


def test_a_chance_never_falls_with_the_score() -> None:
    """Whatever is found, also the opposite of what was said: a higher score is never the worse one."""
    dice = random.Random(5)
    upside_down = [Comparison(score, dice.random() > score, 1, 2) for score in (dice.random() for _ in range(500))]
    chances = [step.chance for step in calibration_of(upside_down).steps]

    assert chances == sorted(chances)


def test_the_recalibrated_quality_keeps_the_chance_asked_for() -> None:
    """Scores that are too low need a lower quality, scores that are too high a higher one; the ends stay."""
    right, too_low, too_high = (calibration_of(comparisons(1_000, shift)) for shift in (0.0, 0.5, -0.5))

    assert calibration_of([]).threshold(0.8) == pytest.approx(0.8, abs=0.01)
    assert too_low.threshold(0.8) < right.threshold(0.8) < too_high.threshold(0.8)
    assert too_low.threshold(0.8, -2) <= too_low.threshold(0.8) <= too_low.threshold(0.8, 2)
    assert [too_low.threshold(edge) for edge in (0.0, 1.0)] == [0.0, 1.0]
    for calibration in (right, too_low, too_high):
        from_here = calibration.threshold(0.8)
        assert calibration.chance(from_here) >= 0.8 > calibration.chance(from_here - 1e-6)


def test_a_curve_says_what_a_quality_would_bring() -> None:
    """Of four requests two score above 0.75: they stay small, one of them sufficed, the others cost the large price."""
    four = [
        Comparison(score, suffices, 10, 100) for score, suffices in ((0.7, False), (0.7, True), (0.8, True), (0.9, 0))
    ]

    below, between, above = curve_of(four, (0.5, 0.75, 0.95))

    assert (below.small, below.share_large, below.suffices, below.nanousd) == (4, 0.0, 0.5, 10.0)
    assert (between.small, between.share_large, between.suffices, between.nanousd) == (2, 0.5, 0.5, 55.0)
    assert (above.small, above.share_large, above.suffices, above.low, above.nanousd) == (0, 1.0, None, None, 100.0)


def test_an_interval_is_never_certain() -> None:
    """Ten of ten is not always (Wilson's interval, known values)."""
    assert interval_of(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert interval_of(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)


def test_a_threshold_moves_only_by_what_was_measured() -> None:
    """Too few comparisons move nothing, and undo what rested on others that are forgotten; what is within the error of
    what was found stays; else the quality is kept."""
    too_high = comparisons(400, -0.8)
    found = recalibrated(too_high, 0.8, None)

    assert recalibrated(too_high[: LEAST_COMPARISONS - 1], 0.8, None) is None
    assert found == calibration_of(too_high).threshold(0.8) > 0.85
    assert recalibrated(too_high, 0.8, found - 0.001) == found - 0.001
    assert recalibrated(too_high, 0.8, 0.8) == found
    assert recalibrated(too_high[: LEAST_COMPARISONS - 1], 0.8, found) == 0.8


def test_a_threshold_goes_no_lower_than_what_was_measured() -> None:
    """Scores below those that went to small models are unknown: a step ends at the lowest that was seen."""
    too_low = comparisons(400, 3.0)
    least = min(one.score for one in too_low)

    assert calibration_of(too_low).threshold(0.8) < least
    assert recalibrated(too_low, 0.8, None) == least


def test_what_never_sufficed_asks_for_more_and_what_always_did_for_no_more() -> None:
    """Outcomes of one kind move the threshold to one side; at 1 nothing is left to small models."""
    never, always = ([Comparison(0.9, suffices, 1, 2)] * 200 for suffices in (False, True))

    assert 0.9 < (recalibrated(never, 0.8, None) or 0) <= 1
    assert recalibrated(always, 0.8, None) == 0.8


def test_comparisons_of_one_score_count_together() -> None:
    """The same request asked often has one score and one chance, whatever each outcome was."""
    half = [Comparison(0.8125, place % 2 == 0, 1, 2) for place in range(400)]

    assert calibration_of(half).chance(0.8125) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("explores", [False, True])
def test_only_a_route_that_explores_comes_back(explores: bool) -> None:
    """A small model that fails sends the threshold above all scores. When a better one has come under the same name,
    only what is asked of it aside can show that, and then the threshold falls again."""
    dice, newest = random.Random(6), 2_000
    found: list[Comparison] = []
    applied: float | None = None
    thresholds = []
    for chance in [0.3] * 10 + [0.97] * 40:
        threshold = 0.8 if applied is None else applied
        scores = [dice.uniform(0.6, 0.95) for _ in range(200)]
        seen = [score for score in scores if explores or score >= threshold]
        found = [*found, *(Comparison(score, dice.random() < chance, 10, 100) for score in seen)][-newest:]
        applied = recalibrated(found, 0.8, applied)
        thresholds.append(threshold)

    assert thresholds[0] == 0.8 and thresholds[9] > 0.95
    assert (thresholds[-1] < 0.8) if explores else (thresholds[-1] == thresholds[9])
