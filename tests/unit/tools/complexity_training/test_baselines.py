# The baselines of the complexity model, on rows whose answer is known.

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from router.complexity.judging import HeldOut, apgr, apgr_of, calibration_error, interval, redrawn
from tools.complexity_training.dataset import MAIN_PAIR, read_outcomes
from tools.complexity_training.draws import draw_figures
from tools.complexity_training.report import calibration, curves, figures

STRONG = np.ones(100)
WEAK = np.array([0.0 if place % 10 == 0 else 1.0 for place in range(100)])


def test_apgr_rewards_sending_the_right_prompts() -> None:
    """Sending first the tenth that gains recovers nearly all; sending it last nearly nothing; evenly half."""
    first = apgr(np.where(WEAK < STRONG, 0.0, 1.0), STRONG, WEAK)
    last = apgr(np.where(WEAK < STRONG, 1.0, 0.0), STRONG, WEAK)
    evenly = apgr(np.arange(100) / 100, STRONG, WEAK)

    assert [first, last, evenly] == pytest.approx([0.95, 0.05, 0.5])


def test_the_interval_holds_the_figure() -> None:
    """Rows drawn anew give figures on both sides of the one of all rows."""
    scores = np.random.default_rng(1).random(100)
    low, high = interval(scores, STRONG, WEAK)

    assert low < apgr(scores, STRONG, WEAK) < high


def test_draws_of_two_kinds_of_scores_are_paired() -> None:
    """What differs by little differs so in every draw; a prompt is drawn with its rows of all pairs of models."""
    scores = np.random.default_rng(1).random(200)
    gain = np.where(np.arange(200) % 3 == 0, 0.0, 1.0)
    pair = np.repeat(["one", "other"], 100)
    held = HeldOut("both", np.ones(200), gain, scores, scores, scores, pair, np.tile(np.arange(100), 2))
    same, again, reverse = redrawn(held, scores, scores * 2, -scores)

    assert np.array_equal(same, again)
    assert apgr_of(held, scores) == np.mean([apgr(scores[at], np.ones(100), gain[at]) for at in held.by_pair])
    assert np.quantile(same, 0.025) < apgr_of(held, scores) < np.quantile(same, 0.975)
    assert abs(np.mean(same + reverse) - 1) < 0.05


def test_calibration_error_is_the_distance_of_score_and_outcome() -> None:
    """Scores that say how often a small model suffices have none; certainty that fails half the time has a half."""
    suffices = np.array([place % 2 == 0 for place in range(100)])

    assert calibration_error(np.full(100, 0.5), suffices) == pytest.approx(0.0, abs=0.01)
    assert calibration_error(np.full(100, 1.0), suffices) == pytest.approx(0.5, abs=0.01)


def test_rows_of_other_models_and_broken_labels_are_told_apart(tmp_path: Path) -> None:
    """Another pair of models counts for less, and broken labels teach nothing."""
    path = tmp_path / "outcomes.csv.gz"
    with gzip.open(path, "wt", newline="") as file:
        table = csv.writer(file)
        table.writerow(["benchmark", "domain", "prompt", "strong_score", "weak_score", "strong_model", "weak_model"])
        table.writerow(["mmlu", "virology", "Kept?", "1.0", "0.5", MAIN_PAIR, "weak"])
        table.writerow(["mmlu", "high_school_mathematics", "Broken?", "0.0", "1.0", MAIN_PAIR, "weak"])
        table.writerow(["other", "virology", "Other?", "1.0", "0.0", "another-model", "weak"])

    outcomes = read_outcomes(path)

    assert outcomes.take(outcomes.is_sound).prompts == ["Kept?", "Other?"]
    assert outcomes.is_main_pair.tolist() == [True, True, False]
    assert outcomes.suffices.tolist() == [False, True, False]
    assert outcomes.gain.tolist() == [0.5, -1.0, 1.0]


def test_the_report_stands_beside_length_and_chance() -> None:
    """Each kind of rows has its figure with an interval, the baselines', and a line in both pictures."""
    scores = np.where(WEAK < STRONG, 0.2, 0.9)
    held = HeldOut("MMLU other rows", STRONG, WEAK, scores, np.arange(100.0), -np.arange(100.0))

    lines = list(figures([held]))

    assert lines[2].startswith("| MMLU other rows | 100 | 0.950 [")
    assert "| 0.500 |" in lines[2]
    assert "| MMLU other rows | 0.60 | 10% | 1.000 | 0.900 | 1.000 |" in lines
    assert all(picture([held]).count("<polyline") == 1 for picture in (curves, calibration))


def test_draws_show_how_far_a_figure_moves() -> None:
    """The mean of the draws, the least and the most, for each set and for the mean of those asked for."""
    right, wrong = np.where(WEAK < STRONG, 0.0, 1.0), np.where(WEAK < STRONG, 1.0, 0.0)
    length = -np.arange(100.0)
    draws = [
        {name: HeldOut(name, STRONG, WEAK, scores, right, length) for name, scores in (("a", first), ("b", right))}
        for first in (right, wrong)
    ]
    _, _, a, b, mean = draw_figures(draws, ("a", "b"))

    assert a.startswith("| a | 0.500 [0.050, 0.950] | 0.950 [0.950, 0.950] | 0.500 [0.000, 1.000] |")
    assert b == "| b | 0.950 [0.950, 0.950] | 0.950 [0.950, 0.950] | 0.000 [0.000, 0.000] | 0.000 (0.000) | +0.000 |"
    assert mean.startswith("| mean of the four sets | 0.725 [0.500, 0.950] | 0.950 [0.950, 0.950] |")
