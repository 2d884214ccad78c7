# How well scores tell where a small model suffices: the share of the gap that they recover, and how honest they are.
# For the model card (tools/complexity_training) and for a team's own outcomes (`tollgate evaluate`).

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

SEED = 20260  # of rows drawn anew
RESAMPLES = 1000
SHARES = np.linspace(0, 1, 11)  # of strong calls
LEAST = 60  # rows of a pair of models that is judged
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
    pair: npt.NDArray[np.str_] | None = None  # names of both models, where there are several pairs
    prompt: npt.NDArray[np.intp] | None = None  # a number for each, where one may have several rows

    @property
    def suffices(self) -> npt.NDArray[np.bool_]:
        return self.weak >= self.strong

    @property
    def by_pair(self) -> list[npt.NDArray[np.intp]]:
        """Rows of each pair of models, but for pairs of few rows and those whose weak model is the better."""
        if self.pair is None:
            return [np.arange(len(self.scores))]
        gain = self.strong - self.weak
        pairs = [np.flatnonzero(self.pair == pair) for pair in np.unique(self.pair)]
        return [rows for rows in pairs if len(rows) >= LEAST and gain[rows].sum() > 0]


def apgr_of(held: HeldOut, scores: Floats) -> float:
    """Return the APGR of scores for these rows: the mean over pairs of models."""
    return float(np.mean([apgr(scores[rows], held.strong[rows], held.weak[rows]) for rows in held.by_pair]))


def redrawn(held: HeldOut, *kinds: Floats) -> npt.NDArray[np.float64]:
    """Return ``apgr_of`` of each kind of scores over prompts drawn anew, (kinds, ``RESAMPLES``).

    All kinds have the same draws, so that differences of theirs are paired; a prompt is drawn with all its rows.
    """
    gain, pairs = held.strong - held.weak, held.by_pair
    orders = [[rows[np.argsort(scores[rows], kind="stable")] for rows in pairs] for scores in kinds]
    _, prompt = np.unique(np.arange(len(gain)) if held.prompt is None else held.prompt, return_inverse=True)
    count, dice = prompt.max() + 1, np.random.default_rng(SEED)
    draws = np.empty((len(kinds), RESAMPLES))
    for draw in range(RESAMPLES):
        times = np.bincount(dice.integers(0, count, count), minlength=count)[prompt]
        draws[:, draw] = [
            np.mean([_average(_recovered(gain[np.repeat(rows, times[rows])])) for rows in order]) for order in orders
        ]
    return draws


def apgr(scores: Floats, strong: Floats, weak: Floats) -> float:
    """Return the average performance gap recovered: 0.5 is random, 1 would recover all with the first strong calls.

    The trapezoid over ``SHARES`` of strong calls (RouteLLM, arXiv 2406.18665, section 2.2).
    """
    return _average(gap_recovered(scores, strong, weak))


def gap_recovered(scores: Floats, strong: Floats, weak: Floats) -> Floats:
    """Return the share of the gap that is recovered when the lowest scores of each of ``SHARES`` go to the strong."""
    return _recovered((strong - weak)[np.argsort(scores, kind="stable")])


def _recovered(gain: Floats) -> Floats:
    # ``gain`` is in rising order of scores.
    gains = np.concatenate([[0.0], np.cumsum(gain)])
    recovered: Floats = gains[np.round(SHARES * len(gain)).astype(int)] / gains[-1]
    return recovered


def _average(points: Floats) -> float:
    return float(((points[1:] + points[:-1]) / 2).mean())


def interval(scores: Floats, strong: Floats, weak: Floats) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the APGR over rows."""
    low, high = np.quantile(redrawn(HeldOut("", strong, weak, scores, scores, scores), scores), (0.025, 0.975))
    return float(low), float(high)


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
