# Fits the classifiers of what breaks the content policy, and exports them; those of attacks and requests for harm are
# fitted by requests.py, and of suffixes by suffixes.py:
#   python -m tools.moderation_training.fit --data DATA --vectors FILE... --out gateway/moderation/classifier/artifacts

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix, diags  # type: ignore[import-untyped]
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold

from gateway.moderation.classifier.classifier import ANY, FORMAT, HEADS, MANIFEST, OF_RUNS, OF_WORDS, WEIGHTS
from gateway.moderation.classifier.features import BUCKETS, RUNS_AT_LEAST
from gateway.moderation.classifier.meaning import KINDS, MEANT
from gateway.moderation.classifier.surprise import FEATURES, SYMBOLS
from gateway.moderation.reading.encoder import DIMENSIONS
from router.complexity.artifact import Arrays, write_artifact
from tools.moderation_training.dataset import OURS, TO_MODERATE, WORK, Examples, read_examples
from tools.moderation_training.meaning import RECIPES, Nets, Vectors, fit_nets, folded, pooled, read_vectors
from tools.moderation_training.windows import Windows, windows_of

SEED = 20261
MODERATION, SURGE = "openai_moderation", "surge_toxicity"
FOLDS = 5
REGULARISATION, KIND_REGULARISATION = 3.0, 10.0  # scikit-learn's C
SMOOTHING = 0.02  # of the counts behind the log odds
# What a text counts in the head `any`: other prompts are plenty and unlike, surge's and Tollgate's are unlike too.
OTHERS_COUNT, SURGE_COUNTS, OURS_COUNT = 0.1, 0.5, 0.1
OURS_COUNT_OF_KIND = 0.3  # and a text of Tollgate's where kinds are told apart, among texts that break the policy alone
MOST_WINDOWS = 4  # of one text, in the fit: a long text has no more to say than a short one

# Beside what breaks the policy, what `any` is shown; but for what was written for this project and says nothing of it.
PASSES, NOT_SHOWN = ("keeps", "benign", "everyday"), (WORK,)
MAY_FLAG = 0.002  # of hard benign prompts, by `any`
NOTHING_FOUND = [-100.0] * len(OF_WORDS)  # biases of the heads that are fitted elsewhere
LEAST_OF_KIND = -2.0  # logit below which no kind is told of: of some kinds few texts are known

Floats = npt.NDArray[np.float64]


class Head(NamedTuple):
    """What one head has learnt."""

    weights: Floats  # (run buckets,)
    bias: float


class FittedSafety:
    """The classifiers: logistic regression on hashed TF-IDF, one for each head of ``OF_RUNS``, and small networks on
    ``vectors``."""

    def __init__(self, vectors: Vectors) -> None:
        self.heads: dict[str, Head] = {}
        self.points = np.zeros(len(HEADS))  # logits from which a head's finding counts
        self._run_idf: Floats = np.zeros(0)
        self._vectors = vectors
        self._nets = folded(vectors, {})

    def fit(self, examples: Examples, windows: Windows) -> FittedSafety:
        """Fit on ``examples``, whose ``windows`` these are. Raises ValueError if a row may not be fitted."""
        if not examples.may_be_fitted.all():
            raise ValueError("the licence of some rows does not allow to fit on them")
        windows = windows.first(MOST_WINDOWS)
        moderating = windows.lexis[~np.isin(examples.source, OURS)[windows.owner]]
        said = ((moderating @ windows.runs) > 0).sum(axis=0)
        self._run_idf = np.log((1 + moderating.shape[0]) / (1 + np.asarray(said).ravel())) + 1
        runs = self._read_runs(windows)
        mean = self._vectors.pooled(windows.vocabulary, _spoken(windows))
        nets: dict[str, Nets] = {}
        share = 1 / np.bincount(windows.owner, minlength=len(examples))[windows.owner]  # of its text that a window is
        for name in OF_RUNS:
            wanted, shown = _targets(examples, name)
            rows = np.flatnonzero(shown[windows.owner])
            counts = _counts(examples, name)[windows.owner] * share
            sought = wanted[windows.owner][rows]
            weight = _evened(counts[rows], sought)
            head = _fit_head(runs[rows], sought, weight, name)
            if name in RECIPES:
                nets[name] = fit_nets(mean[rows], sought, weight, name, SEED)
                head = head._replace(bias=head.bias + float(nets[name].at[0]))
            self.heads[name] = head
        nets["kinds"] = self._fit_kinds(examples, windows, mean, share)
        self._nets = folded(self._vectors, nets)
        return self

    def _fit_kinds(self, examples: Examples, windows: Windows, mean: Floats, share: Floats) -> Nets:
        """Fit one network for all kinds, and add its bias to their heads. A kind that is unknown is taken for a no."""
        is_some = (examples.task == "breaks") & ~np.isnan(examples.kinds).all(axis=1)
        rows = np.flatnonzero(is_some[windows.owner])
        weight = (_counts(examples, KINDS[0])[windows.owner] * share)[rows]
        net = fit_nets(mean[rows], examples.kinds[windows.owner[rows]] == 1, weight / weight.mean(), "kinds", SEED)
        for name, at in zip(KINDS, net.at.tolist(), strict=True):
            self.heads[name] = self.heads[name]._replace(bias=self.heads[name].bias + at)
        return net

    def logits(self, windows: Windows) -> Floats:
        """Return (texts, heads): the highest of any window of each text, the operating points not yet taken off."""
        runs = self._read_runs(windows)
        rows = self._nets.rows * self._nets.steps
        hidden = pooled(self._nets.hashes, rows, windows.vocabulary, _spoken(windows)) + self._nets.bias
        meant = np.maximum(hidden, 0) @ self._nets.out
        found = np.full((windows.texts, len(HEADS)), -np.inf)
        for name, head in self.heads.items():
            said = runs @ head.weights + head.bias + meant[:, MEANT.index(name)]
            np.maximum.at(found[:, HEADS.index(name)], windows.owner, said)
        return found

    def _read_runs(self, windows: Windows) -> csr_matrix:
        """Return (windows, run buckets): a word's runs count as often as the word, and as its length's square says."""
        spoken = _spoken(windows)
        squares = spoken.multiply(spoken) @ (windows.runs @ self._run_idf**2)
        return (diags(1 / np.sqrt(squares + RUNS_AT_LEAST**2)) @ spoken @ windows.runs @ diags(self._run_idf)).tocsr()

    def weights(self) -> dict[str, npt.NDArray]:
        """Return what serving needs, named as ``gateway.moderation.classifier.classifier.Classifier`` reads it."""
        runs = np.vstack([self.heads[name].weights for name in OF_RUNS]).T
        biases = [self.heads[name].bias for name in OF_RUNS]
        steps = np.abs(runs).max(axis=0).clip(1e-9) / 127**2  # most weights are small, and some a hundred times that
        return {
            "idf": np.zeros(BUCKETS, np.float16),  # requests.py fits what reads words
            "words": np.zeros((BUCKETS, len(OF_WORDS)), np.float16),
            "run_idf": self._run_idf.astype(np.float16),
            "runs": (np.sign(runs) * np.rint(np.sqrt(np.abs(runs) / steps))).astype(np.int8),
            "run_steps": steps.astype(np.float32),
            "meant_words": np.diff(self._nets.hashes, prepend=np.uint32(0)),  # smaller, once compressed
            "meant_rows": self._nets.rows,
            "meant_steps": self._nets.steps,
            "hidden_bias": self._nets.bias,
            "hidden_said": self._nets.out,
            "bias": (bias := (np.array([*NOTHING_FOUND, *biases]) - self.points).astype(np.float32)),
            **without_encoder(bias),
            **without_suffixes(),
        }


def without_encoder(bias: npt.NDArray[np.float32]) -> dict[str, npt.NDArray]:
    """Return what serving needs of networks on the encoder's vectors: none, for requests.py fits them."""
    hidden, heads = 1, ANY + 1
    return {
        "read_in": np.zeros((DIMENSIONS, hidden), np.float16),
        "read_hidden": np.zeros(hidden, np.float32),
        "read_out": np.zeros((hidden, heads), np.float32),
        "read_bias": bias[:heads],
    }


def without_suffixes() -> Arrays:
    """Return what serving needs to know of improbable text: nothing, for suffixes.py fits it."""
    return {
        "surprise_pairs": np.zeros(SYMBOLS**2, np.uint8),
        "surprise_contexts": np.zeros(SYMBOLS**2, np.uint8),
        "surprise_gaps": np.zeros(0, np.uint32),
        "surprise_steps": np.zeros(0, np.uint8),
        "surprise_in": np.zeros((FEATURES, 1), np.float32),
        "surprise_hidden": np.zeros(1, np.float32),
        "surprise_out": np.zeros(1, np.float32),
        "surprise_bias": np.array(-100, np.float32),
    }


def held_out_logits(examples: Examples, windows: Windows, vectors: Vectors) -> Floats:
    """Return the logits of the heads that flag, by models that never saw the rows; where no row may be fitted, the mean
    of all of them. What was written to be fitted has none."""
    ours = np.isin(examples.source, OURS)  # which every model sees
    fitted = np.flatnonzero(examples.may_be_fitted & ~ours)
    others = np.flatnonzero(~examples.may_be_fitted)
    found = np.zeros((len(examples), len(HEADS)))
    for train, test in StratifiedKFold(FOLDS, shuffle=True, random_state=SEED).split(fitted, examples.source[fitted]):
        known = np.union1d(fitted[train], np.flatnonzero(ours))
        model = FittedSafety(vectors).fit(examples.take(known), windows.take(known))
        found[fitted[test]] = model.logits(windows.take(fitted[test]))
        if len(others):
            found[others] += model.logits(windows.take(others)) / FOLDS
    return found


def operating_points(logits: Floats, examples: Examples) -> Floats:
    """Return the logits from which findings count, by rows that are there to choose on: `any` flags its share of hard
    benign prompts, and each kind is told of as many texts that are flagged as are of it."""
    points = np.zeros(len(HEADS))
    points[ANY] = np.quantile(logits[(examples.task == "benign") & ~examples.is_judged, ANY], 1 - MAY_FLAG)
    flagged = (logits[:, ANY] > points[ANY]) & (examples.source == MODERATION) & ~examples.is_judged
    for place, asked in enumerate(examples.kinds[flagged].T, ANY + 1):
        said = logits[flagged, place][~np.isnan(asked)]
        points[place] = max(LEAST_OF_KIND, float(np.quantile(said, 1 - np.nanmean(asked))))
    return points


def _targets(examples: Examples, name: str) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which rows a head is to find, and which it is shown at all."""
    if name in KINDS:
        known = examples.kinds[:, KINDS.index(name)]
        return known == 1, ~np.isnan(known) & (examples.task == "breaks")
    wanted = examples.task == "breaks"
    return wanted, wanted | (np.isin(examples.task, PASSES) & ~np.isin(examples.source, NOT_SHOWN))


def _spoken(windows: Windows) -> csr_matrix:
    """Return (windows, vocabulary): how much each word counts, the more the oftener it comes, but ever less so."""
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
    # Few texts: what a feature says by itself is where the regression begins (NB-SVM, Wang 2012).
    scale = _log_odds(features, wanted, weight)
    c = KIND_REGULARISATION if name in KINDS else REGULARISATION
    fitted = LogisticRegression(C=c, solver="liblinear", tol=1e-3, random_state=SEED)
    fitted.fit(features @ diags(scale), wanted, sample_weight=weight)
    return Head(fitted.coef_[0] * scale, float(fitted.intercept_[0]))


def _counts(examples: Examples, name: str) -> Floats:
    """Return how much each text counts in the fit of a head."""
    ours = examples.source == TO_MODERATE
    if name in KINDS:
        return np.where(ours, OURS_COUNT_OF_KIND, 1.0)
    is_other = ~np.isin(examples.task, ("breaks", "keeps"))
    counts: Floats = np.where(is_other, OTHERS_COUNT, np.where(examples.source == SURGE, SURGE_COUNTS, 1.0))
    counts[ours] = OURS_COUNT
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
    parser.add_argument("--vectors", type=Path, nargs="+", required=True, help="vectors of words, text or .npz")
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
