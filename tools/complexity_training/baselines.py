# How well scores tell where a small model suffices: the share of the gap that they recover, and how honest they are.
# Free of scikit-learn, which takes a second to import.

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

SEED = 20260  # of rows drawn anew
RESAMPLES = 1000
SHARES = np.linspace(0, 1, 11)  # of strong calls
BINS = 10  # of equal numbers of rows, for the calibration error

Floats = npt.NDArray[np.float64]


class HeldOut(Struct, frozen=True):
    """Rows of one kind, with scores of models that never saw them. Scores rise with the chance that small suffices."""

    name: str
    strong: Floats
    weak: Floats
    scores: Floats
    plain: Floats  # of the plain baseline
    length: Floats  # minus the characters of the prompt

    @property
    def suffices(self) -> npt.NDArray[np.bool_]:
        return self.weak >= self.strong


def apgr(scores: Floats, strong: Floats, weak: Floats) -> float:
    """Return the average performance gap recovered: 0.5 is random, 1 would recover all with the first strong calls.

    The trapezoid over ``SHARES`` of strong calls (RouteLLM, arXiv 2406.18665, section 2.2).
    """
    points = gap_recovered(scores, strong, weak)
    return float(((points[1:] + points[:-1]) / 2).mean())


def gap_recovered(scores: Floats, strong: Floats, weak: Floats) -> Floats:
    """Return the share of the gap that is recovered when the lowest scores of each of ``SHARES`` go to the strong."""
    gains = np.concatenate([[0.0], np.cumsum((strong - weak)[np.argsort(scores, kind="stable")])])
    return gains[np.round(SHARES * len(scores)).astype(int)] / gains[-1]


def interval(scores: Floats, strong: Floats, weak: Floats) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the APGR over rows."""
    low, high = np.quantile(resampled(scores, strong, weak), (0.025, 0.975))
    return float(low), float(high)


def resampled(scores: Floats, strong: Floats, weak: Floats) -> Floats:
    """Return the APGR over rows drawn anew, ``RESAMPLES`` times; sets of the same rows are drawn alike."""
    dice = np.random.default_rng(SEED)
    draws = (dice.integers(0, len(scores), len(scores)) for _ in range(RESAMPLES))
    return np.array([apgr(scores[drawn], strong[drawn], weak[drawn]) for drawn in draws])


def calibration_error(scores: Floats, suffices: npt.NDArray[np.bool_]) -> float:
    """Return the expected calibration error: the mean distance of score and outcome over bins of equal size."""
    bins = np.array_split(np.argsort(scores, kind="stable"), BINS)
    return float(sum(len(b) * abs(scores[b].mean() - suffices[b].mean()) for b in bins) / len(scores))


def calibration_noise(scores: Floats) -> float:
    """Return the calibration error that chance alone gives this many rows, were every score exactly right."""
    return float(errors_by_chance(scores).mean())


def errors_by_chance(scores: Floats) -> Floats:
    """Return calibration errors of outcomes that are drawn as the scores say."""
    dice = np.random.default_rng(SEED)
    draws = (dice.random(len(scores)) < scores for _ in range(RESAMPLES // 10))
    return np.array([calibration_error(scores, drawn) for drawn in draws])
