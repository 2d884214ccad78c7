# Judges the complexity model on rows that it was not fitted on, beside a plain baseline, prompt length and chance.

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, KFold

from tools.complexity_training.baselines import Floats, HeldOut
from tools.complexity_training.dataset import Outcomes, believed_outcomes
from tools.complexity_training.fit import SEED, FittedComplexity

FOLDS = 5
SUMS = ("gsm8k", "agentverse-mgsm")  # domains of the other pair that hold the same kind of problems as GSM8K

# Kinds of rows whose figures move with the draw of folds, and the draws beside the card's that show by how much.
DRAWN = ("home", "subjects", "tasks", "known")
OTHER_DRAWS = tuple(range(SEED + 1, SEED + 5))

Rows = npt.NDArray[np.intp]
Folds = list[tuple[Rows, Rows]]  # rows fitted on, rows judged
Plan = tuple[Folds, dict[str, npt.NDArray[np.bool_]]]  # and the kinds of rows that are judged together


def held_out_sets(outcomes: Outcomes, cache: Path | None = None) -> Iterator[HeldOut]:
    """Yield other rows, unseen subjects and another pair of models, each with and without what is near it in the fit.

    Scores are kept in the folder ``cache``, if there is one, so that a long run can be taken up again.
    """
    for name, plan in _plans(outcomes, SEED).items():
        yield from _judged(outcomes, plan, None if cache is None else cache / name)


def drawn_sets(outcomes: Outcomes, seed: int, cache: Path | None = None) -> Iterator[HeldOut]:
    """Yield those sets that another draw of folds changes, by the draw ``seed``."""
    plans = _plans(outcomes, seed)
    for name in DRAWN:
        yield from _judged(outcomes, plans[name], None if cache is None else cache / f"{name}-{seed}")


def _plans(outcomes: Outcomes, seed: int) -> dict[str, Plan]:
    rows = np.arange(len(outcomes))
    main, sound = outcomes.is_main_pair, outcomes.is_sound
    is_mmlu, is_gsm = main & (outcomes.benchmark == "mmlu"), main & (outcomes.benchmark == "gsm8k")
    home, mmlu, others = rows[main], rows[is_mmlu], rows[~main]
    sums = ~main & np.isin(outcomes.domain, SUMS)

    none = rows[:0]

    def folds(of: Rows, count: int = FOLDS, *, before: Rows = none, after: Rows = none) -> Folds:
        splits = KFold(count, shuffle=True, random_state=seed).split(of)
        return [(np.concatenate([before, of[fit], after]), of[test]) for fit, test in splits]

    def groups(of: Rows, *, before: Rows = none, after: Rows = none) -> Folds:
        splits = GroupKFold(FOLDS, shuffle=True, random_state=seed).split(of, groups=outcomes.domain[of])
        return [(np.concatenate([before, of[fit], after]), of[test]) for fit, test in splits]

    subjects = groups(mmlu, after=np.concatenate([rows[is_gsm], others]))
    of_mmlu = {"MMLU other rows": is_mmlu & sound, "MMLU with broken subject": is_mmlu}
    of_subjects = {"MMLU unseen subjects": is_mmlu & sound, "MMLU unseen subjects with broken one": is_mmlu}
    return {
        "home": (folds(home, after=others), of_mmlu | {"GSM8K other rows": is_gsm}),
        "halves": (folds(home, 2, after=others), {"MMLU other half": is_mmlu & sound, "GSM8K other half": is_gsm}),
        "subjects": (subjects, of_subjects),
        "sums": ([(rows[~is_gsm & ~sums], rows[is_gsm])], {"GSM8K no sums fitted": is_gsm}),
        "pair": ([(home, others)], {"another pair never fitted": ~main}),
        "tasks": (groups(others, before=home), {"another pair unseen tasks": ~main}),
        "known": (folds(others, before=home), {"another pair other rows": ~main}),
    }


def _judged(outcomes: Outcomes, plan: Plan, cache: Path | None) -> Iterator[HeldOut]:
    # Broken labels are judged where a kind has them, and never fitted.
    scores, plain = np.full((2, len(outcomes)), np.nan)
    for place, (fit, test) in enumerate(plan[0]):
        file = None if cache is None else cache / f"{place}.npz"
        scores[test], plain[test] = _kept(file, partial(_fold_scores, outcomes, fit, test))
    for kind, chosen in plan[1].items():
        yield _held_out(kind, outcomes, chosen, scores, plain)


def plain_scores(fitted: Outcomes, judged: Outcomes) -> Floats:
    """Return what a plain baseline says: TF-IDF of words, two logistic heads, the gap of their chances."""
    words = TfidfTransformer(sublinear_tf=True).fit(fitted.counts)
    seen, asked = words.transform(fitted.counts), words.transform(judged.counts)
    heads = [
        LogisticRegression(max_iter=1000).fit(seen, right).predict_proba(asked)[:, 1]
        for right in (fitted.strong > 0.5, fitted.weak > 0.5)
    ]
    return heads[1] - heads[0]


def _fold_scores(outcomes: Outcomes, fit: Rows, test: Rows) -> tuple[Floats, Floats]:
    """Return scores of the model and of the plain baseline, which is fitted on the main pair alone, as published."""
    fitted, judged = outcomes.take(fit), outcomes.take(test)
    fitted = fitted.take(fitted.is_sound)
    return FittedComplexity().fit(fitted, believed_outcomes()).scores(judged), plain_scores(
        fitted.take(fitted.is_main_pair), judged
    )


def _held_out(name: str, outcomes: Outcomes, chosen: npt.NDArray[np.bool_], scores: Floats, plain: Floats) -> HeldOut:
    length = -np.array([float(len(prompt)) for prompt in outcomes.prompts])
    return HeldOut(name, outcomes.strong[chosen], outcomes.weak[chosen], scores[chosen], plain[chosen], length[chosen])


def _kept(file: Path | None, make: Callable[[], tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    if file is not None and file.exists():
        with np.load(file) as kept:
            return kept["scores"], kept["plain"]
    scores, plain = make()
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, scores=scores, plain=plain)
    return scores, plain
