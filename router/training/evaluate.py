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

from router.training.dataset import Outcomes
from router.training.fit import SEED, FittedComplexity
from router.training.yardsticks import Floats, HeldOut

FOLDS = 5
SUMS = ("gsm8k", "agentverse-mgsm")  # domains of the other pair that hold the same kind of problems as GSM8K

Rows = npt.NDArray[np.intp]
Folds = list[tuple[Rows, Rows]]  # rows fitted on, rows judged


def held_out_sets(outcomes: Outcomes, cache: Path | None = None) -> Iterator[HeldOut]:
    """Yield other rows, unseen subjects and another pair of models, each with and without what is near it in the fit.

    Scores are kept in the folder ``cache``, if there is one, so that a long run can be taken up again.
    """
    rows = np.arange(len(outcomes))
    main, sound = outcomes.is_main_pair, outcomes.is_sound
    is_mmlu, is_gsm = main & (outcomes.benchmark == "mmlu"), main & (outcomes.benchmark == "gsm8k")
    others = rows[~main]
    sums = ~main & np.isin(outcomes.domain, SUMS)

    def judged(name: str, plan: Folds, **kinds: npt.NDArray[np.bool_]) -> Iterator[HeldOut]:
        # Broken labels are judged where a kind has them, and never fitted.
        scores, plain = np.full((2, len(outcomes)), np.nan)
        for place, (fit, test) in enumerate(plan):
            file = None if cache is None else cache / f"{name}-{place}.npz"
            scores[test], plain[test] = _kept(file, partial(_fold_scores, outcomes, fit, test))
        for kind, chosen in kinds.items():
            yield _held_out(kind.replace("_", " "), outcomes, chosen, scores, plain)

    home = [(np.concatenate([rows[main][fit], others]), rows[main][test]) for fit, test in _folds(rows[main])]
    yield from judged(
        "home", home, MMLU_other_rows=is_mmlu & sound, MMLU_with_broken_subject=is_mmlu, GSM8K_other_rows=is_gsm
    )
    halves = [(np.concatenate([rows[main][fit], others]), rows[main][test]) for fit, test in _folds(rows[main], 2)]
    yield from judged("halves", halves, MMLU_other_half=is_mmlu & sound, GSM8K_other_half=is_gsm)
    mmlu = rows[is_mmlu]
    subjects = [
        (np.concatenate([mmlu[fit], rows[is_gsm], others]), mmlu[test])
        for fit, test in GroupKFold(FOLDS, shuffle=True, random_state=SEED).split(mmlu, groups=outcomes.domain[mmlu])
    ]
    yield from judged(
        "subjects", subjects, MMLU_unseen_subjects=is_mmlu & sound, MMLU_unseen_subjects_with_broken_one=is_mmlu
    )
    yield from judged("sums", [(rows[~is_gsm & ~sums], rows[is_gsm])], GSM8K_no_sums_fitted=is_gsm)
    yield from judged("pair", [(rows[main], others)], another_pair_never_fitted=~main)
    tasks = [
        (np.concatenate([rows[main], others[fit]]), others[test])
        for fit, test in GroupKFold(FOLDS, shuffle=True, random_state=SEED).split(others, groups=outcomes.domain[~main])
    ]
    yield from judged("tasks", tasks, another_pair_unseen_tasks=~main)
    known = [(np.concatenate([rows[main], others[fit]]), others[test]) for fit, test in _folds(others)]
    yield from judged("known", known, another_pair_other_rows=~main)


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
    return FittedComplexity().fit(fitted).scores(judged), plain_scores(fitted.take(fitted.is_main_pair), judged)


def _folds(rows: Rows, folds: int = FOLDS) -> Folds:
    return list(KFold(folds, shuffle=True, random_state=SEED).split(rows))


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
