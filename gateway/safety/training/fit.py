# Fits the safety classifiers and exports their weights:
#   python -m gateway.safety.training.fit --data DATA --vectors FILE --out gateway/safety/artifacts

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix, diags  # type: ignore[import-untyped]
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold

from gateway.safety.classifier import FORMAT, HEADS, KINDS, MANIFEST, OF_RUNS, OF_WORDS, WEIGHTS
from gateway.safety.features import RUNS_AT_LEAST, WORDS_AT_LEAST
from gateway.safety.meaning import MEANT
from gateway.safety.training.dataset import OURS, WRITTEN, Examples, Task, read_examples
from gateway.safety.training.meaning import Nets, Vectors, fit_nets, folded, read_vectors
from gateway.safety.training.windows import Windows, windows_of
from router.artifact import write_artifact

SEED = 20261
SURGE = "surge_toxicity"
FOLDS = 5
REGULARISATION = {"attack": 300.0, "harm": 300.0, "any": 3.0}  # scikit-learn's C
KIND_REGULARISATION = 10.0
SMOOTHING = 0.02  # of the counts behind the log odds
COUNTS = {"attack": 4.0, "harm": 2.0}  # times another text, an everyday prompt: what people type all day must pass
# And what a text counts in the heads of moderation: other prompts are plenty and unlike, surge's texts are unlike too.
OTHERS_COUNT, SURGE_COUNTS = 0.1, 0.5
# Times which a head's logit is served: a text is as bad as its worst category, so of a text to moderate that is neither
# of these, they have to say so firmly. What is above 0 stays so.
FIRMNESS = {"attack": 4.0, "harm": 4.0}
COMMON = 4000  # words that serving knows from its start on
MOST_WINDOWS = 4  # of one text, in the fit: a long text has no more to say than a short one

# What a head is to find, and what it is to let pass; rows of other tasks are not shown to it.
ASKED: dict[str, tuple[Task, tuple[Task, ...]]] = {
    "attack": ("attack", ("harm", "benign", "everyday", "breaks", "keeps")),
    "harm": ("harm", ("benign", "everyday", "keeps")),
    "any": ("breaks", ("keeps", "benign", "everyday")),
}
# What was written for this project and says nothing about what a head is to find.
NOT_SHOWN = {"any": OURS}
# The share of hard benign prompts that each head may flag; together they flag about 5 %.
MAY_FLAG = {"attack": 0.041, "harm": 0.010, "any": 0.002}

Floats = npt.NDArray[np.float64]


class Head(NamedTuple):
    """What one head has learnt."""

    weights: Floats  # (buckets,) of words or of runs
    bias: float


class FittedSafety:
    """The classifiers: logistic regression on hashed TF-IDF, one for each head, and small networks on ``vectors``."""

    def __init__(self, vectors: Vectors) -> None:
        self.heads: dict[str, Head] = {}
        self.points = np.zeros(len(HEADS))  # logits from which a head's finding counts
        self._words = TfidfTransformer(sublinear_tf=True, norm=None)
        self._run_idf: Floats = np.zeros(0)
        self._common: list[bytes] = []  # the words that most texts share
        self._vectors = vectors
        self._nets = folded(vectors, {})

    def fit(self, examples: Examples, windows: Windows, heads: tuple[str, ...] = HEADS) -> FittedSafety:
        """Fit ``heads`` on ``examples``, whose ``windows`` these are. Raises ValueError if a row may not be fitted."""
        if not examples.may_be_fitted.all():
            raise ValueError("the licence of some rows does not allow to fit on them")
        windows = windows.first(MOST_WINDOWS)
        words = _shortened(self._words.fit_transform(windows.words), WORDS_AT_LEAST)
        spread = np.asarray((windows.lexis > 0).sum(axis=0)).ravel()
        self._common = [windows.lexicon[word] for word in np.argsort(-spread, kind="stable")[:COMMON]]
        moderating = windows.lexis[~np.isin(examples.source, OURS)[windows.owner]]
        said = ((moderating @ windows.runs) > 0).sum(axis=0)
        self._run_idf = np.log((1 + moderating.shape[0]) / (1 + np.asarray(said).ravel())) + 1
        runs = self._read_runs(windows)
        pooled = self._vectors.pooled(windows.lexicon, _spoken(windows), self._vectors.rows)
        nets: dict[str, Nets] = {}
        share = 1 / np.bincount(windows.owner, minlength=len(examples))[windows.owner]  # of its text that a window is
        for name in heads:
            wanted, shown = _targets(examples, name)
            rows = np.flatnonzero(shown[windows.owner])
            counts = _counts(examples, name)[windows.owner] * share
            sought = wanted[windows.owner][rows]
            weight = _evened(counts[rows], sought)
            read = words if name in OF_WORDS else runs
            head = _fit_head(read[rows], sought, weight, name)
            if name in MEANT:
                nets[name] = fit_nets(pooled[rows], sought, weight, name, SEED)
                head = head._replace(bias=head.bias + nets[name].at)
            firmness = FIRMNESS.get(name, 1.0)
            self.heads[name] = Head(firmness * head.weights, firmness * head.bias)
        self._nets = folded(self._vectors, nets)
        self._nets.out[:] *= [FIRMNESS.get(name, 1.0) for name in MEANT]
        return self

    def logits(self, windows: Windows) -> Floats:
        """Return (texts, heads): the highest of any window of each text, the operating points not yet taken off."""
        words = _shortened(self._words.transform(windows.words), WORDS_AT_LEAST)
        runs = self._read_runs(windows)
        rows = self._nets.rows * self._nets.steps
        hidden = self._vectors.pooled(windows.lexicon, _spoken(windows), rows) + self._nets.bias
        meant = np.maximum(hidden, 0) @ self._nets.out
        found = np.full((windows.texts, len(HEADS)), -np.inf)
        for place, name in enumerate(HEADS):
            if (head := self.heads.get(name)) is not None:
                said = (words if name in OF_WORDS else runs) @ head.weights + head.bias
                if name in MEANT:
                    said += meant[:, MEANT.index(name)]
                np.maximum.at(found[:, place], windows.owner, said)
        return found

    def _read_runs(self, windows: Windows) -> csr_matrix:
        """Return (windows, run buckets): a word's runs count as often as the word, and as its length's square says."""
        spoken = _spoken(windows)
        squares = spoken.multiply(spoken) @ (windows.runs @ self._run_idf**2)
        return (diags(1 / np.sqrt(squares + RUNS_AT_LEAST**2)) @ spoken @ windows.runs @ diags(self._run_idf)).tocsr()

    def weights(self) -> dict[str, npt.NDArray]:
        """Return what serving needs, named as ``gateway.safety.classifier.Classifier`` reads it."""

        def of(names: tuple[str, ...]) -> npt.NDArray[np.float16]:
            return np.vstack([self.heads[name].weights for name in names]).T.astype(np.float16)

        return {
            "idf": self._words.idf_.astype(np.float16),
            "words": of(OF_WORDS),
            "run_idf": self._run_idf.astype(np.float16),
            "runs": of(OF_RUNS),
            "meant_words": self._vectors.hashes,
            "meant_rows": self._nets.rows,
            "meant_steps": self._nets.steps,
            "hidden_bias": self._nets.bias,
            "hidden_said": self._nets.out,
            "common": np.frombuffer(b" ".join(self._common), np.uint8),
            "bias": (np.array([self.heads[name].bias for name in HEADS]) - self.points).astype(np.float32),
        }


def held_out_logits(examples: Examples, windows: Windows, vectors: Vectors) -> Floats:
    """Return the logits of the heads that flag, by models that never saw the rows; where no row may be fitted, the mean
    of all of them. The kinds have none, nor has what was written to be fitted."""
    ours = np.isin(examples.source, OURS)  # which every model sees
    fitted = np.flatnonzero(examples.may_be_fitted & ~ours)
    others = np.flatnonzero(~examples.may_be_fitted)
    found = np.zeros((len(examples), len(HEADS)))
    for train, test in StratifiedKFold(FOLDS, shuffle=True, random_state=SEED).split(fitted, examples.source[fitted]):
        known = np.union1d(fitted[train], np.flatnonzero(ours))
        model = FittedSafety(vectors).fit(examples.take(known), windows.take(known), tuple(MAY_FLAG))
        found[fitted[test]] = model.logits(windows.take(fitted[test]))
        if len(others):
            found[others] += model.logits(windows.take(others)) / FOLDS
    return found


def operating_points(logits: Floats, examples: Examples) -> Floats:
    """Return the logits from which findings count: each head flags its share of hard benign prompts that are there to
    choose on."""
    benign = logits[(examples.task == "benign") & ~examples.is_judged]
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
    others = np.isin(examples.task, negatives)
    return wanted, wanted | (others & ~np.isin(examples.source, NOT_SHOWN.get(name, ())))


def _spoken(windows: Windows) -> csr_matrix:
    """Return (windows, lexicon): how much each word counts, the more the oftener it comes, but ever less so."""
    spoken = windows.lexis.copy()
    spoken.data = 1 + np.log(spoken.data)
    return spoken


def _evened(counts: Floats, wanted: npt.NDArray[np.bool_]) -> Floats:
    """Return the counts so that both answers count the same, and one row 1 in the mean."""
    weight = counts.copy()
    weight[wanted] *= weight[~wanted].sum() / weight[wanted].sum()
    weight *= len(weight) / weight.sum()
    return weight


def _fit_head(features: csr_matrix, wanted: npt.NDArray, weight: Floats, name: str) -> Head:
    scale = np.ones(features.shape[1])
    if name in OF_RUNS:  # few texts: what a feature says by itself is where the regression begins (NB-SVM, Wang 2012)
        scale = _log_odds(features, wanted, weight)
        features = features @ diags(scale)
    c = REGULARISATION.get(name, KIND_REGULARISATION)
    fitted = LogisticRegression(C=c, solver="liblinear", tol=1e-3, random_state=SEED)
    fitted.fit(features, wanted, sample_weight=weight)
    return Head(fitted.coef_[0] * scale, float(fitted.intercept_[0]))


def _counts(examples: Examples, name: str) -> Floats:
    """Return how much each text counts in the fit of a head."""
    if name in OF_WORDS:
        often = (examples.task == "everyday") & (examples.source != WRITTEN)
        return np.where(often, COUNTS[name], 1.0)
    is_other = ~np.isin(examples.task, ("breaks", "keeps"))
    counts: Floats = np.where(is_other, OTHERS_COUNT, np.where(examples.source == SURGE, SURGE_COUNTS, 1.0))
    return counts


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
    parser.add_argument("--vectors", type=Path, required=True, help="GloVe's vectors of words, text or .npz")
    parser.add_argument("--out", type=Path, required=True, help="folder for the artefact")
    arguments = parser.parse_args()
    vectors = read_vectors(arguments.vectors)
    examples = read_examples(arguments.data)
    examples = examples.take(examples.may_be_fitted)
    windows = windows_of(examples.texts)
    points = operating_points(held_out_logits(examples, windows, vectors), examples)
    model = FittedSafety(vectors).fit(examples, windows)
    model.points = points
    arguments.out.mkdir(parents=True, exist_ok=True)
    export(model, arguments.out, {"rows": len(examples), "seed": SEED})
    print(f"fitted on {len(examples)} rows; wrote {WEIGHTS} and {MANIFEST} to {arguments.out}")


if __name__ == "__main__":
    main()
