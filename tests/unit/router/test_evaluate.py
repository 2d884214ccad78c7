# The yardsticks of the complexity model, on rows whose answer is known.

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from router.training.dataset import Outcomes, read_outcomes
from router.training.evaluate import apgr, calibration_error
from router.training.fit import STRONG_MODEL, fitted_rows


def rows(strong: list[float], weak: list[float]) -> Outcomes:
    words = np.array(["x"] * len(strong))
    return Outcomes(list(words), words, words, np.array(strong), np.array(weak), words)


def test_apgr_rewards_sending_the_right_prompts() -> None:
    """Sending first the tenth that gains recovers nearly all; sending it last nearly nothing; evenly half."""
    outcomes = rows([1.0] * 100, [0.0 if i % 10 == 0 else 1.0 for i in range(100)])
    gains = outcomes.strong > outcomes.weak

    first = apgr(np.where(gains, 0.0, 1.0), outcomes)
    last = apgr(np.where(gains, 1.0, 0.0), outcomes)
    evenly = apgr(np.arange(100) / 100, outcomes)

    assert [first, last, evenly] == pytest.approx([0.95, 0.05, 0.5])


def test_calibration_error_is_the_distance_of_score_and_outcome() -> None:
    """Scores that say how often a small model suffices have none; certainty that fails half the time has a half."""
    outcomes = rows([1.0] * 100, [float(i % 2) for i in range(100)])

    assert calibration_error(np.full(100, 0.5), outcomes) == pytest.approx(0.0, abs=0.01)
    assert calibration_error(np.full(100, 1.0), outcomes) == pytest.approx(0.5, abs=0.01)


def test_rows_of_other_models_and_broken_labels_are_not_fitted(tmp_path: Path) -> None:
    """Another pair of models is kept for evaluation, and broken labels teach nothing."""
    path = tmp_path / "outcomes.csv.gz"
    with gzip.open(path, "wt", newline="") as file:
        table = csv.writer(file)
        table.writerow(["benchmark", "domain", "prompt", "strong_score", "weak_score", "strong_model"])
        table.writerow(["mmlu", "virology", "Kept?", "1.0", "0.5", STRONG_MODEL])
        table.writerow(["mmlu", "high_school_mathematics", "Broken?", "0.0", "1.0", STRONG_MODEL])
        table.writerow(["other", "virology", "Other?", "1.0", "0.0", "another-model"])

    outcomes = read_outcomes(path)

    assert len(outcomes) == 3
    assert fitted_rows(outcomes).prompts == ["Kept?"]
    assert outcomes.suffices.tolist() == [False, True, False]
