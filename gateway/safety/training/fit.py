# Fits the safety classifiers and exports their weights:
#   python -m gateway.safety.training.fit --data DATA --out gateway/safety/artifacts

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix, diags, hstack  # type: ignore[import-untyped]
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold

from gateway.safety.classifier import FORMAT, HEADS, KINDS, MANIFEST, WEIGHTS
from gateway.safety.features import BUCKETS, RUNS_AT_LEAST, WORDS_AT_LEAST
from gateway.safety.training.dataset import Examples, Task, read_examples
from gateway.safety.training.windows import Windows, windows_of
from router.artifact import write_artifact

SEED = 20261
FOLDS = 5
REGULARISATION = {"attack": 300.0, "harm": 300.0, "any": 10.0}  # scikit-learn's C
KIND_REGULARISATION = 10.0
SMOOTHING = 1.0  # of the counts behind "any"
EVERYDAY_COUNTS = {"attack": 4.0, "harm": 2.0}  # times another text: what people type all day must pass
MOST_WINDOWS = 4  # of one text, in the fit: a long text has no more to say than a short one

# What a head is to find, and what it is to let pass; rows of other tasks are not shown to it.
ASKED: dict[str, tuple[Task, tuple[Task, ...]]] = {
    "attack": ("attack", ("harm", "benign", "everyday", "breaks", "keeps")),
    "harm": ("harm", ("benign", "everyday", "keeps")),
    "any": ("breaks", ("keeps", "benign", "everyday")),
}
# The share of hard benign prompts that each head may flag; together they flag about 5 %.
MAY_FLAG = {"attack": 0.040, "harm": 0.012, "any": 0.002}

Floats = npt.NDArray[np.float64]


class Head(NamedTuple):
    """What one head has learnt."""

    words: Floats  # (buckets,)
    runs: Floats | None  # (run buckets,); None: it does not read them
    bias: float


class FittedSafety:
    """The classifiers: logistic regression on hashed TF-IDF, one for each head."""

    def __init__(self) -> None:
        self.heads: dict[str, Head] = {}
        self.points = np.zeros(len(HEADS))  # logits from which a head's finding counts
        self._words = TfidfTransformer(sublinear_tf=True, norm=None)
        self._runs = TfidfTransformer(sublinear_tf=True, norm=None)

    def fit(self, examples: Examples, windows: Windows, heads: tuple[str, ...] = HEADS) -> FittedSafety:
        """Fit ``heads`` on ``examples``, whose ``windows`` these are. Raises ValueError if a row may not be fitted."""
        if not examples.may_be_fitted.all():
            raise ValueError("the licence of some rows does not allow to fit on them")
        windows = windows.first(MOST_WINDOWS)
        words = _shortened(self._words.fit_transform(windows.words), WORDS_AT_LEAST)
        runs = _shortened(self._runs.fit_transform(windows.runs), RUNS_AT_LEAST)
        share = 1 / np.bincount(windows.owner, minlength=len(examples))[windows.owner]  # of its text that a window is
        for name in heads:
            wanted, shown = _targets(examples, name)
            rows = np.flatnonzero(shown[windows.owner])
            counts = np.where(examples.task == "everyday", EVERYDAY_COUNTS.get(name, 1.0), 1.0)[windows.owner] * share
            read = hstack((words[rows], runs[rows])).tocsr() if name == "any" else words[rows]
            self.heads[name] = _fit_head(read, wanted[windows.owner][rows], counts[rows], name)
        return self

    def logits(self, windows: Windows) -> Floats:
        """Return (texts, heads): the highest of any window of each text, the operating points not yet taken off."""
        words = _shortened(self._words.transform(windows.words), WORDS_AT_LEAST)
        runs = _shortened(self._runs.transform(windows.runs), RUNS_AT_LEAST)
        found = np.full((windows.texts, len(HEADS)), -np.inf)
        for place, name in enumerate(HEADS):
            if (head := self.heads.get(name)) is not None:
                said = words @ head.words + head.bias
                said += 0 if head.runs is None else runs @ head.runs
                np.maximum.at(found[:, place], windows.owner, said)
        return found

    def weights(self) -> dict[str, npt.NDArray]:
        """Return what serving needs, named as ``gateway.safety.classifier.Classifier`` reads it."""
        heads = [self.heads[name] for name in HEADS]
        runs = self.heads["any"].runs
        assert runs is not None
        return {
            "idf": self._words.idf_.astype(np.float16),
            "weights": np.vstack([head.words for head in heads]).T.astype(np.float16),
            "bias": (np.array([head.bias for head in heads]) - self.points).astype(np.float32),
            "run_idf": self._runs.idf_.astype(np.float16),
            "run_weights": runs.astype(np.float16),
        }


def held_out_logits(examples: Examples, windows: Windows) -> Floats:
    """Return the logits by models that never saw the rows; where no row may be fitted, the mean of all of them."""
    fitted = np.flatnonzero(examples.may_be_fitted)
    others = np.flatnonzero(~examples.may_be_fitted)
    found = np.zeros((len(examples), len(HEADS)))
    for train, test in StratifiedKFold(FOLDS, shuffle=True, random_state=SEED).split(fitted, examples.source[fitted]):
        model = FittedSafety().fit(examples.take(fitted[train]), windows.take(fitted[train]))
        found[fitted[test]] = model.logits(windows.take(fitted[test]))
        if len(others):
            found[others] += model.logits(windows.take(others)) / FOLDS
    return found


def operating_points(logits: Floats, examples: Examples) -> Floats:
    """Return the logits from which findings count: each head flags its share of hard benign prompts."""
    benign = logits[examples.task == "benign"]
    points = {name: float(np.quantile(benign[:, HEADS.index(name)], 1 - share)) for name, share in MAY_FLAG.items()}
    return np.array([points.get(name, 0.0) for name in HEADS])


def _shortened(features: csr_matrix, at_least: float) -> csr_matrix:
    """Divide each row by its length and ``at_least``, as serving does."""
    squares = np.asarray(features.multiply(features).sum(axis=1)).ravel()
    return diags(1 / np.sqrt(squares + at_least**2)) @ features


def _targets(examples: Examples, name: str) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which rows a head is to find, and which it is shown at all."""
    if name in KINDS:
        known = examples.kinds[:, KINDS.index(name)]
        wanted = known == 1
        return wanted, wanted | (known == 0) | np.isin(examples.task, ("keeps", "benign"))
    positive, negatives = ASKED[name]
    wanted = examples.task == positive
    return wanted, wanted | np.isin(examples.task, negatives)


def _fit_head(features: csr_matrix, wanted: npt.NDArray, share: Floats, name: str) -> Head:
    weight = share.copy()
    weight[wanted] *= weight[~wanted].sum() / weight[wanted].sum()  # both answers count the same
    weight *= len(weight) / weight.sum()
    scale = np.ones(features.shape[1])
    if name == "any":  # few texts: what a feature says by itself is where the regression begins (NB-SVM, Wang 2012)
        scale = _log_odds(features, wanted, weight)
        features = features @ diags(scale)
    c = REGULARISATION.get(name, KIND_REGULARISATION)
    fitted = LogisticRegression(C=c, solver="liblinear", tol=1e-3, random_state=SEED)
    fitted.fit(features, wanted, sample_weight=weight)
    learnt = fitted.coef_[0] * scale
    return Head(learnt[:BUCKETS], learnt[BUCKETS:] if name == "any" else None, float(fitted.intercept_[0]))


def _log_odds(features: csr_matrix, wanted: npt.NDArray, weight: Floats) -> Floats:
    """Return how much more of each feature the wanted rows have than the others, as naive Bayes counts."""
    for_it = SMOOTHING + features.T @ (weight * wanted)
    against = SMOOTHING + features.T @ (weight * ~wanted)
    odds: Floats = np.log(for_it / for_it.sum()) - np.log(against / against.sum())
    return odds


def export(model: FittedSafety, folder: Path, facts: dict[str, object]) -> None:
    """Write weights and manifest into ``folder``; ``facts`` say where the model comes from."""
    write_artifact(folder / WEIGHTS, folder / MANIFEST, FORMAT, model.weights(), facts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the safety classifiers and export their weights.")
    parser.add_argument("--data", type=Path, required=True, help="folder with safety/ and routing/")
    parser.add_argument("--out", type=Path, required=True, help="folder for the artefact")
    arguments = parser.parse_args()
    examples = read_examples(arguments.data)
    examples = examples.take(examples.may_be_fitted)
    windows = windows_of(examples.texts)
    points = operating_points(held_out_logits(examples, windows), examples)
    model = FittedSafety().fit(examples, windows)
    model.points = points
    arguments.out.mkdir(parents=True, exist_ok=True)
    export(model, arguments.out, {"rows": len(examples), "seed": SEED})
    print(f"fitted on {len(examples)} rows; wrote {WEIGHTS} and {MANIFEST} to {arguments.out}")


if __name__ == "__main__":
    main()
