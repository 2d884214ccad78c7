# Judges the complexity model on rows that it was not fitted on, beside random routing and prompt length, and prints the
# tables of the model card:
#   python -m router.training.evaluate OUTCOMES.csv.gz

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from sklearn.model_selection import GroupKFold, KFold

from router.training.dataset import BROKEN_SUBJECT, Outcomes, read_outcomes
from router.training.fit import SEED, STRONG_MODEL, FittedComplexity, fitted_rows

FOLDS = 5
RESAMPLES = 500
SHARES = np.linspace(0, 1, 11)  # of strong calls
BINS = 10  # of equal numbers of rows, for the calibration error

Floats = npt.NDArray[np.float64]


class HeldOut(Struct, frozen=True):
    """Rows of one kind, with scores of models that never saw them."""

    name: str
    rows: Outcomes
    scores: Floats


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate the complexity model on held-out rows.")
    parser.add_argument("outcomes", type=Path, help="gzipped CSV of outcomes")
    arguments = parser.parse_args()
    print("\n".join(report_lines(list(held_out_sets(read_outcomes(arguments.outcomes))))))


def held_out_sets(outcomes: Outcomes) -> Iterator[HeldOut]:
    """Yield other rows of the fitted benchmarks, subjects and a benchmark never seen, and another pair of models."""
    pair = outcomes.take(outcomes.strong_model == STRONG_MODEL)
    rows = np.arange(len(pair))
    at_home = _cross_scores(pair, list(KFold(FOLDS, shuffle=True, random_state=SEED).split(rows)))
    is_mmlu = pair.benchmark == "mmlu"
    is_sound = pair.domain != BROKEN_SUBJECT
    yield HeldOut("MMLU, other rows", pair.take(is_mmlu & is_sound), at_home[is_mmlu & is_sound])
    yield HeldOut("MMLU, other rows, with the broken subject", pair.take(is_mmlu), at_home[is_mmlu])
    yield HeldOut("GSM8K, other rows", pair.take(~is_mmlu), at_home[~is_mmlu])

    unseen = _cross_scores(pair, list(GroupKFold(FOLDS).split(rows, groups=pair.domain)))
    yield HeldOut("MMLU, unseen subjects", pair.take(is_mmlu & is_sound), unseen[is_mmlu & is_sound])
    yield HeldOut("GSM8K, unseen benchmark", pair.take(~is_mmlu), unseen[~is_mmlu])

    others = outcomes.take(outcomes.strong_model != STRONG_MODEL)
    yield HeldOut("another pair of models", others, FittedComplexity().fit(fitted_rows(pair)).scores(others.prompts))


def report_lines(sets: list[HeldOut]) -> Iterator[str]:
    """Yield the report as Markdown: one table of figures, one of the cost-quality curve at home."""
    dice = np.random.default_rng(SEED)
    yield "| rows | n | APGR [95 %] | by length | random | calibration error | small suffices |"
    yield "|---|---|---|---|---|---|---|"
    for held in sets:
        low, high = interval(held, dice)
        length = apgr(-np.array([len(prompt) for prompt in held.rows.prompts]), held.rows)
        yield (
            f"| {held.name} | {len(held.rows)} | {apgr(held.scores, held.rows):.3f} [{low:.3f}, {high:.3f}] "
            f"| {length:.3f} | 0.500 | {calibration_error(held.scores, held.rows):.3f} "
            f"| {held.rows.suffices.mean():.3f} |"
        )
    yield ""
    yield "| rows | quality asked | calls to the large model | share right | small alone | large alone |"
    yield "|---|---|---|---|---|---|"
    for held in (sets[0], sets[-1]):
        for quality in (0.6, 0.7, 0.75, 0.8, 0.85, 0.9):
            is_large = held.scores < quality
            right = np.where(is_large, held.rows.strong, held.rows.weak).mean()
            yield (
                f"| {held.name} | {quality:.2f} | {is_large.mean():.0%} | {right:.3f} "
                f"| {held.rows.weak.mean():.3f} | {held.rows.strong.mean():.3f} |"
            )


def apgr(scores: Floats, rows: Outcomes) -> float:
    """Return the average performance gap recovered: 0.5 is random, 1 would recover all with the first strong calls.

    The prompts of the lowest scores go to the strong model; the gap recovered is averaged over ``SHARES`` of strong
    calls by the trapezoid rule (RouteLLM, arXiv 2406.18665, section 2.2).
    """
    gains = np.concatenate([[0.0], np.cumsum((rows.strong - rows.weak)[np.argsort(scores, kind="stable")])])
    points = gains[np.round(SHARES * len(rows)).astype(int)] / gains[-1]
    return float(((points[1:] + points[:-1]) / 2).mean())


def interval(held: HeldOut, dice: np.random.Generator) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the APGR over rows."""
    values = []
    for _ in range(RESAMPLES):
        drawn = dice.integers(0, len(held.rows), len(held.rows))
        values.append(apgr(held.scores[drawn], held.rows.take(drawn)))
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def calibration_error(scores: Floats, rows: Outcomes) -> float:
    """Return the expected calibration error: the mean distance of score and outcome over bins of equal size."""
    bins = np.array_split(np.argsort(scores, kind="stable"), BINS)
    return float(sum(len(b) * abs(scores[b].mean() - rows.suffices[b].mean()) for b in bins) / len(rows))


def _cross_scores(rows: Outcomes, folds: list[tuple[npt.NDArray, npt.NDArray]]) -> Floats:
    scores = np.zeros(len(rows))
    for train, test in folds:
        model = FittedComplexity().fit(fitted_rows(rows.take(train)))
        scores[test] = model.scores(rows.take(test).prompts)
    return scores


if __name__ == "__main__":
    main()
