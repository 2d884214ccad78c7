# Judges the complexity model on rows that it was not fitted on, beside a plain baseline, prompt length and chance:
# other rows of the benchmarks of the main pair, subjects not fitted, and every benchmark left out with its kin.

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, KFold

from router.complexity.judging import Floats, HeldOut
from tools.complexity_training.dataset import Outcomes, believed_outcomes
from tools.complexity_training.fit import SEED, FittedComplexity

FOLDS = 5
# Kinds of rows whose figures move with the draw of folds, and the draws beside the card's that show by how much.
DRAWN = ("home", "subjects")
OTHER_DRAWS = tuple(range(SEED + 1, SEED + 5))
SUMS = ("gsm8k", "agentverse-mgsm")  # domains that hold such problems in another benchmark
# Benchmarks of the second file that are judged by themselves, with those that are left out beside them.
ALONE = {
    "MMLU-Pro left out": ("mmlu_pro", ("mmlu", "mmlu_pro")),
    "CRUXEval left out": ("cruxeval_zeroeval", ("cruxeval_zeroeval",)),
    "MATH left out": ("math_l5_zeroeval", ("math_l5_zeroeval",)),
    "open chat left out": ("oasst_qlora", ("oasst_qlora", "vicuna_qlora")),
    "Vicuna's chat left out": ("vicuna_qlora", ("oasst_qlora", "vicuna_qlora")),
}

Rows = npt.NDArray[np.intp]
Chosen = npt.NDArray[np.bool_]


class Plan(NamedTuple):
    """Which rows are judged, and of what nothing is fitted meanwhile, beside all of their prompts."""

    folds: list[tuple[Rows, Chosen]]  # rows judged by one model, rows left out of its fit
    kinds: dict[str, Chosen]  # rows that are judged together


def held_out_sets(
    outcomes: Outcomes, more: Outcomes, cache: Path | None = None, seed: int = SEED, names: Container[str] | None = None
) -> Iterator[HeldOut]:
    """Yield sets of rows with the scores of models that saw neither them nor any of their prompts.

    Folds are drawn by ``seed``, and only the plans of these ``names`` are judged, if there are any. Scores are kept in
    the folder ``cache``, if there is one, so that a long run can be taken up again.
    """
    rows = outcomes + more
    is_more = np.arange(len(rows)) >= len(outcomes)
    _, prompt = np.unique(np.array(rows.prompts), return_inverse=True)
    for name, plan in _plans(rows, seed).items():
        if names is not None and name not in names:
            continue
        # Broken labels are judged where a kind has them, and never fitted.
        scores, plain = np.full((2, len(rows)), np.nan)
        for place, (test, left_out) in enumerate(plan.folds):
            is_fitted = rows.is_sound & ~left_out & ~np.isin(prompt, prompt[test])
            file = None if cache is None else cache / f"{name}-{seed}-{place}.npz"
            scores[test], plain[test] = _kept(file, partial(_fold_scores, rows, is_fitted, is_more, test))
        for kind, chosen in plan.kinds.items():
            length = -np.array([float(len(prompt)) for prompt in rows.take(chosen).prompts])
            scored = (scores[chosen], plain[chosen], length)
            yield HeldOut(kind, rows.strong[chosen], rows.weak[chosen], *scored, rows.pair[chosen], prompt[chosen])


def _plans(rows: Outcomes, seed: int) -> dict[str, Plan]:
    at, main, sound = np.arange(len(rows)), rows.is_main_pair, rows.is_sound
    is_mmlu, is_gsm = main & (rows.benchmark == "mmlu"), main & (rows.benchmark == "gsm8k")
    like_mmlu, like_gsm = rows.benchmark == "mmlu_pro", rows.benchmark == "gsm8k_zeroeval"
    home, mmlu = at[main], at[is_mmlu]
    folds = KFold(FOLDS, shuffle=True, random_state=seed).split(home)
    groups = GroupKFold(FOLDS, shuffle=True, random_state=seed).split(mmlu, groups=rows.domain[mmlu])
    another = np.isin(rows.benchmark, ("ulab", "ulab_pairs"))
    sums = is_gsm | like_gsm
    of_mmlu = {"MMLU other rows": is_mmlu & sound, "MMLU with broken subject": is_mmlu}
    of_subjects = {"MMLU unseen subjects": is_mmlu & sound, "MMLU unseen subjects with broken one": is_mmlu}
    of_another = {
        "another pair never fitted": rows.benchmark == "ulab",
        "a panel never fitted": another & ~(rows.benchmark == "ulab"),
    }
    of_sums = {"GSM8K no sums fitted": is_gsm, "GSM8K of later models, no sums fitted": like_gsm}
    plans = {
        "home": Plan([(home[test], like_mmlu | like_gsm) for _, test in folds], of_mmlu | {"GSM8K other rows": is_gsm}),
        "subjects": Plan(
            [(mmlu[test], like_mmlu | (is_mmlu & np.isin(rows.domain, rows.domain[mmlu[test]]))) for _, test in groups],
            of_subjects,
        ),
        "sums": Plan([(at[sums], sums | np.isin(rows.domain, SUMS))], of_sums),
        "pair": Plan([(at[another], another)], of_another),
    }
    for name, (benchmark, kin) in ALONE.items():
        chosen = rows.benchmark == benchmark
        plans[benchmark] = Plan([(at[chosen], np.isin(rows.benchmark, kin))], {name: chosen})
    return plans


def plain_scores(fitted: Outcomes, judged: Outcomes) -> Floats:
    """Return what a plain baseline says: TF-IDF of words, two logistic heads, the gap of their chances."""
    words = TfidfTransformer(sublinear_tf=True).fit(fitted.counts)
    seen, asked = words.transform(fitted.counts), words.transform(judged.counts)
    heads = [
        LogisticRegression(max_iter=1000).fit(seen, right).predict_proba(asked)[:, 1]
        for right in (fitted.strong > 0.5, fitted.weak > 0.5)
    ]
    return heads[1] - heads[0]


def _fold_scores(rows: Outcomes, is_fitted: Chosen, is_more: Chosen, test: Rows) -> tuple[Floats, Floats]:
    """Return scores of the model and of the plain baseline, which is fitted on the main pair alone, as published."""
    fitted, more, judged = rows.take(is_fitted & ~is_more), rows.take(is_fitted & is_more), rows.take(test)
    scores = FittedComplexity().fit(fitted, believed_outcomes(), more).scores(judged)
    return scores, plain_scores(fitted.take(fitted.is_main_pair), judged)


def _kept(file: Path | None, make: Callable[[], tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    if file is not None and file.exists():
        with np.load(file) as kept:
            return kept["scores"], kept["plain"]
    scores, plain = make()
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, scores=scores, plain=plain)
    return scores, plain
