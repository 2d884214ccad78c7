# Judges the classifiers of what breaks the content policy on rows that they were not fitted on, with intervals, and
# prints the model card's tables of them. Thresholds, and everything else that was chosen, were chosen on two thirds of
# the rows; the other third judges.
#   python -m tools.moderation_training.evaluate --data DATA --vectors FILE...

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sklearn.metrics import average_precision_score

from gateway.moderation.classifier.classifier import ANY
from gateway.moderation.classifier.meaning import KINDS
from tools.moderation_training.dataset import OURS, Examples, read_examples
from tools.moderation_training.fit import MODERATION, SURGE, Floats, held_out_logits, operating_points
from tools.moderation_training.meaning import read_vectors
from tools.moderation_training.windows import windows_of

RESAMPLES = 500
SEED = 20262


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate the classifiers of the content policy on held-out rows.")
    parser.add_argument("--data", type=Path, required=True, help="folder with safety/ and routing/")
    parser.add_argument("--vectors", type=Path, nargs="+", required=True, help="vectors of words, text or .npz")
    arguments = parser.parse_args()
    examples = read_examples(arguments.data)
    logits = held_out_logits(examples, windows_of(examples.texts), read_vectors(arguments.vectors))
    theirs = ~np.isin(examples.source, OURS)  # what we wrote to be fitted proves nothing
    print("\n".join(report_lines(examples.take(theirs), logits[theirs])), flush=True)


def report_lines(examples: Examples, logits: Floats) -> Iterator[str]:
    """Yield the tables for logits of models that never saw the rows."""
    above = (logits - operating_points(logits, examples)).astype(np.float64)
    yield "| moderation | rows | AUPRC [95 %] | of which break the policy | chosen on | all rows [95 %] |"
    yield "|---|---|---|---|---|---|"
    for source in (MODERATION, SURGE):
        yield _auprc_row(f"{source}, head `any`", examples, above[:, ANY], examples.source == source)
    yield ""
    yield from _kind_lines(examples, above)


def _auprc_row(name: str, examples: Examples, scores: Floats, chosen: npt.NDArray) -> str:
    judged = examples.is_judged
    rows, others = np.flatnonzero(chosen & judged), np.flatnonzero(chosen & ~judged)
    breaks = examples.task[rows] == "breaks"

    def told(rows: npt.NDArray) -> str:
        breaks = examples.task[rows] == "breaks"
        low, high = _interval(lambda drawn: average_precision_score(breaks[drawn], scores[rows[drawn]]), len(rows))
        return f"{average_precision_score(breaks, scores[rows]):.3f} [{low:.3f}, {high:.3f}]"

    known = average_precision_score(examples.task[others] == "breaks", scores[others])
    every = told(np.flatnonzero(chosen))
    return f"| {name} | {len(rows)} | {told(rows)} | {breaks.mean():.3f} | {known:.3f} | {every} |"


def _kind_lines(examples: Examples, above: Floats) -> Iterator[str]:
    """Yield, of the texts that the head `any` flags, which kinds are said of them as they are served."""
    kinds = above[:, ANY + 1 :]
    said = (kinds > 0) | (kinds == kinds.max(axis=1, keepdims=True))
    is_known, is_so = ~np.isnan(examples.kinds), examples.kinds == 1
    theirs = examples.source == MODERATION
    flagged = theirs & (above[:, ANY] > 0)
    broken = theirs & (examples.task == "breaks")
    yield f"| kind, of {flagged.sum()} texts flagged | of it | said | rightly [95 %] | AUPRC of all that break it |"
    yield "|---|---|---|---|---|"

    def row(name: str, rows: npt.NDArray, kinds: slice, ranked: str) -> str:
        so = is_so[rows, kinds]
        told = said[rows, kinds] & is_known[rows, kinds]
        low, high = wilson(so[told])
        return f"| {name} | {so.sum()} | {told.sum()} | {so[told].mean():.3f} [{low:.3f}, {high:.3f}] | {ranked} |"

    for place, name in enumerate(KINDS):
        known = broken & is_known[:, place]
        ranked = average_precision_score(is_so[known, place], kinds[known, place])
        yield row(name, flagged, slice(place, place + 1), f"{ranked:.3f}")
    yield row("all", flagged, slice(None), "")
    yield row("all, judging third", flagged & examples.is_judged, slice(None), "")


def wilson(found: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """Return the 95 % interval of a share, which has a width where nothing or everything was found as well."""
    share, size, z = float(found.mean()), len(found), 1.96
    middle = share + z * z / (2 * size)
    spread = z * math.sqrt(share * (1 - share) / size + z * z / (4 * size * size))
    return (max(0.0, middle - spread) / (1 + z * z / size), (middle + spread) / (1 + z * z / size))


def _interval(measure: Callable[[npt.NDArray], float], size: int) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a measure over rows."""
    dice = np.random.default_rng(SEED)
    values = [measure(dice.integers(0, size, size)) for _ in range(RESAMPLES)]
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


if __name__ == "__main__":
    main()
