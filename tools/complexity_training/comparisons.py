# How many comparisons a pair of models needs that was not fitted, until its scores are calibrated: drawn from its rows
# as shadow traffic draws them, and judged on the others, by the code that serves.

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from router.complexity.judging import SEED, Floats, HeldOut, calibration_error, calibration_noise
from router.recalibration import Comparison, calibration_of

COUNTS = (0, 50, 100, 200, 400, 800)
DRAWS = 200
ROUTED = 0.8  # the quality that a route has unless it says another: what scores less is not asked of a small model


def comparison_figures(held: HeldOut) -> Iterator[str]:
    """Yield a table: the calibration error of the rows that were not compared, after so many were."""
    routed = np.flatnonzero(held.scores >= ROUTED)
    yield (
        "| comparisons | calibration error of the other rows [95 % of draws] | by chance "
        f"| of {ROUTED:.1f} and more, compared among themselves | by chance |"
    )
    yield "|---|---|---|---|---|"
    for count in COUNTS:
        cells = [cell for rows in (np.arange(len(held.scores)), routed) for cell in _cells(held, rows, count)]
        yield f"| {count} | {' | '.join(cells)} |"


def _cells(held: HeldOut, rows: np.ndarray, count: int) -> tuple[str, str]:
    dice = np.random.default_rng(SEED)
    errors: list[float] = []
    noise: list[float] = []
    for _ in range(DRAWS):
        order = dice.permutation(rows)  # what has one score falls into bins by chance
        compared, others = order[:count], order[count:]
        scores = held.scores[others] if count == 0 else _recalibrated(held, compared, others)
        errors.append(calibration_error(scores, held.suffices[others]))
        if len(noise) < 5:
            noise.append(calibration_noise(scores))
    low, high = np.quantile(errors, (0.025, 0.975))
    return f"{np.mean(errors):.3f} [{low:.3f}, {high:.3f}]", f"{np.mean(noise):.3f}"


def _recalibrated(held: HeldOut, compared: np.ndarray, others: np.ndarray) -> Floats:
    found = zip(held.scores[compared].tolist(), held.suffices[compared].tolist(), strict=True)
    calibration = calibration_of([Comparison(score, suffices, 0, 0) for score, suffices in found])
    return np.array([calibration.chance(score) for score in held.scores[others].tolist()])
