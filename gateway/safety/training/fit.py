# Fits the safety classifiers and exports their weights:
#   python -m gateway.safety.training.fit --data DATA --out gateway/safety/artifacts

from __future__ import annotations

import argparse
import hashlib
import io
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix  # type: ignore[import-untyped]
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold

from gateway.safety.classifier import FORMAT, HEADS, KINDS, MANIFEST, WEIGHTS, readings
from gateway.safety.features import BUCKETS, read_window
from gateway.safety.training.dataset import Examples, Task, read_examples

SEED = 20261
FOLDS = 5
REGULARISATION = {"attack": 100.0, "harm": 100.0, "any": 10.0}  # scikit-learn's C
KIND_REGULARISATION = 10.0
MOST_WINDOWS = 4  # of one text, in the fit: a long text has no more to say than a short one

# What a head is to find, and what it is to let pass; rows of other tasks are not shown to it.
ASKED: dict[str, tuple[Task, tuple[Task, ...]]] = {
    "attack": ("attack", ("harm", "benign", "everyday", "breaks", "keeps")),
    "harm": ("harm", ("benign", "everyday", "keeps")),
    "any": ("breaks", ("keeps", "benign", "everyday")),
}
# The share of hard benign prompts that each head may flag; together they flag about 5 %.
MAY_FLAG = {"attack": 0.038, "harm": 0.012, "any": 0.005}

Floats = npt.NDArray[np.float64]


class FittedSafety:
    """The classifiers as scikit-learn has them: logistic regression on hashed TF-IDF, one for each head."""

    def __init__(self) -> None:
        self.tfidf = TfidfTransformer(sublinear_tf=True)
        self.heads: dict[str, LogisticRegression] = {}
        self.points = np.zeros(len(HEADS))  # logits from which a head's finding counts

    def fit(self, examples: Examples, heads: tuple[str, ...] = HEADS) -> FittedSafety:
        """Fit ``heads`` on every row that may be fitted."""
        examples = examples.take(examples.may_be_fitted)
        counts, owner = counts_of(examples.texts, most=MOST_WINDOWS)
        features = self.tfidf.fit_transform(counts)
        share = 1 / np.bincount(owner, minlength=len(examples))[owner]  # of its text that a window is
        for name in heads:
            wanted, shown = _targets(examples, name)
            rows = np.flatnonzero(shown[owner])
            self.heads[name] = _fit_head(features[rows], wanted[owner][rows], share[rows], name)
        return self

    def logits(self, texts: list[str]) -> Floats:
        """Return (texts, heads): the highest of any window of each text, the operating points not yet taken off."""
        counts, owner = counts_of(texts)
        features = self.tfidf.transform(counts)
        found = np.full((len(texts), len(HEADS)), -np.inf)
        for place, name in enumerate(HEADS):
            if name in self.heads:
                np.maximum.at(found[:, place], owner, self.heads[name].decision_function(features))
        return found

    def weights(self) -> dict[str, npt.NDArray]:
        """Return what serving needs, named as ``gateway.safety.classifier.Classifier`` reads it."""
        heads = [self.heads[name] for name in HEADS]
        return {
            "idf": self.tfidf.idf_.astype(np.float16),
            "weights": np.vstack([head.coef_[0] for head in heads]).T.astype(np.float16),
            "bias": (np.array([head.intercept_[0] for head in heads]) - self.points).astype(np.float32),
        }


def held_out_logits(examples: Examples) -> Floats:
    """Return the logits by models that never saw the rows; where no row may be fitted, the mean of all of them."""
    fitted = np.flatnonzero(examples.may_be_fitted)
    others = np.flatnonzero(~examples.may_be_fitted)
    found = np.zeros((len(examples), len(HEADS)))
    other_texts = [examples.texts[row] for row in others]
    for train, test in StratifiedKFold(FOLDS, shuffle=True, random_state=SEED).split(fitted, examples.source[fitted]):
        model = FittedSafety().fit(examples.take(fitted[train]))
        found[fitted[test]] = model.logits([examples.texts[row] for row in fitted[test]])
        if other_texts:
            found[others] += model.logits(other_texts) / FOLDS
    return found


def operating_points(logits: Floats, examples: Examples) -> Floats:
    """Return the logits from which findings count: each head flags its share of hard benign prompts."""
    benign = logits[examples.task == "benign"]
    points = {name: float(np.quantile(benign[:, HEADS.index(name)], 1 - share)) for name, share in MAY_FLAG.items()}
    return np.array([points.get(name, 0.0) for name in HEADS])


def counts_of(texts: list[str], most: int | None = None) -> tuple[csr_matrix, npt.NDArray[np.int64]]:
    """Return the hashed counts (windows, buckets) of at most ``most`` windows of each text, and whose each is."""
    found = [readings(text)[:most] for text in texts]
    windows = [read_window(window) for some in found for window in some]
    owner = np.repeat(np.arange(len(texts)), [len(some) for some in found])
    starts = np.cumsum([0, *(len(window.buckets) for window in windows)])
    buckets = np.concatenate([window.buckets for window in windows])
    counts = np.concatenate([window.counts for window in windows]).astype(np.float64)
    return csr_matrix((counts, buckets, starts), shape=(len(windows), BUCKETS)), owner


def _targets(examples: Examples, name: str) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which rows a head is to find, and which it is shown at all."""
    if name in KINDS:
        known = examples.kinds[:, KINDS.index(name)]
        wanted = known == 1
        return wanted, wanted | (known == 0) | np.isin(examples.task, ("keeps", "benign"))
    positive, negatives = ASKED[name]
    wanted = examples.task == positive
    return wanted, wanted | np.isin(examples.task, negatives)


def _fit_head(features: csr_matrix, wanted: npt.NDArray, share: Floats, name: str) -> LogisticRegression:
    weight = share.copy()
    weight[wanted] *= weight[~wanted].sum() / weight[wanted].sum()  # both answers count the same
    weight *= len(weight) / weight.sum()
    c = REGULARISATION.get(name, KIND_REGULARISATION)
    head = LogisticRegression(C=c, solver="liblinear", tol=1e-3, random_state=SEED)
    return head.fit(features, wanted, sample_weight=weight)


def export(model: FittedSafety, folder: Path, facts: dict[str, object]) -> None:
    """Write weights and manifest into ``folder``; ``facts`` say where the model comes from."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **model.weights())  # type: ignore[arg-type]
    (folder / WEIGHTS).write_bytes(buffer.getvalue())
    manifest = {"format": FORMAT, "sha256": hashlib.sha256(buffer.getvalue()).hexdigest(), **facts}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the safety classifiers and export their weights.")
    parser.add_argument("--data", type=Path, required=True, help="folder with safety/ and routing/")
    parser.add_argument("--out", type=Path, required=True, help="folder for the artefact")
    arguments = parser.parse_args()
    examples = read_examples(arguments.data)
    examples = examples.take(examples.may_be_fitted)
    points = operating_points(held_out_logits(examples), examples)
    model = FittedSafety().fit(examples)
    model.points = points
    arguments.out.mkdir(parents=True, exist_ok=True)
    export(model, arguments.out, {"rows": len(examples), "seed": SEED})
    print(f"fitted on {len(examples)} rows; wrote {WEIGHTS} and {MANIFEST} to {arguments.out}")


if __name__ == "__main__":
    main()
