# Fits the complexity model with scikit-learn, and exports its weights for router.complexity.classifier.

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix, hstack  # type: ignore[import-untyped]
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler

from router.complexity.artifact import write_artifact
from router.complexity.classifier import FORMAT, MANIFEST, WEIGHTS, WORDS
from tools.complexity_training.dataset import Outcomes

SEED = 20260
FOLDS = 3  # of the joint step
OTHER_PAIRS = (
    0.1  # what a row of another pair of models weighs for form: it teaches other tasks, and knows other models
)
OTHER_PAIRS_CALIBRATED = 0.5  # the same in the last step, which learns how often a small model suffices at all
BELIEFS = 0.3  # what a written prompt weighs there: it teaches open chat, of which there are no outcomes
EVEN = 0.5  # 0: each row counts alike; 1: each subject does, however many rows it has
MORE = 0.2  # what a row of ``more`` weighs for words: there are two or three of each prompt
WORDS_BELIEFS = 2.0  # what a written prompt weighs for words
LEVEL = 3.0  # what the level of a benchmark and a pair counts for words, before regularisation: it is hardly held back
DEPTH = 3
TREES: dict[str, Any] = {
    "n_estimators": 80,
    "learning_rate": 0.06,
    "max_depth": DEPTH,
    "min_samples_leaf": 30,
    "subsample": 0.5,
    "max_features": 0.3,
    "random_state": SEED,
}

Floats = npt.NDArray[np.float64]


class WordHeads:
    """Logistic heads on the TF-IDF of words: how likely a strong model is right, and a weak one.

    What is peculiar to a benchmark and a pair of models is a level of its own, so that it is not learned as words.
    """

    def fit(self, words: csr_matrix, outcomes: Outcomes, weight: Floats) -> WordHeads:
        """Fit on rows of TF-IDF values (rows, buckets)."""
        _, group = np.unique(np.char.add(outcomes.benchmark, outcomes.pair), return_inverse=True)
        levels = csr_matrix((np.full(len(group), LEVEL), (np.arange(len(group)), group)))
        used = np.flatnonzero(words.getnnz(axis=0))  # of all buckets; what is never there is worth nothing
        both = hstack([words[:, used], levels]).tocsr()
        weights, biases = np.zeros((words.shape[1], 2), np.float16), []  # as they ship: there are many
        for place, is_right in enumerate((outcomes.strong > 0.5, outcomes.weak > 0.5)):
            head = LogisticRegression(max_iter=100, tol=1e-3).fit(both, is_right, sample_weight=weight)
            of_words, of_levels = np.split(head.coef_[0], [len(used)])
            weights[used, place] = of_words
            biases.append(head.intercept_[0] + LEVEL * of_levels[group].mean())  # of any benchmark
        self.weights, self.biases = weights, np.array(biases)
        return self

    def gap(self, words: csr_matrix) -> Floats:
        """Return by how much a strong model is likelier right, one per row."""
        strong, weak = (1 / (1 + np.exp(-(words @ self.weights.astype(np.float64) + self.biases)))).T
        gap: Floats = strong - weak
        return gap


class FittedComplexity:
    """The model as scikit-learn has it: trees on form, heads on words, and a joint step out of fold."""

    def __init__(self) -> None:
        self.tfidf = TfidfTransformer()
        self.heads = WordHeads()
        self.trees = GradientBoostingRegressor(**TREES)
        self.blend = StandardScaler()  # of both signals
        self.calibration = LogisticRegression()

    def fit(
        self, outcomes: Outcomes, believed: Outcomes | None = None, more: Outcomes | None = None
    ) -> FittedComplexity:
        """Fit both on all rows, and the joint step on what both fitted on other rows say of each row.

        What is ``believed`` of open chat is fitted beside the outcomes. ``more`` outcomes, of models and benchmarks far
        from these, are for words alone.
        """
        self.tfidf.fit(outcomes.counts.sign())
        outcomes = outcomes if believed is None else outcomes + believed
        signals = np.zeros((len(outcomes), 2))
        kind = np.char.add(outcomes.benchmark, outcomes.suffices.astype(str))
        for train, test in StratifiedKFold(FOLDS, shuffle=True, random_state=SEED).split(signals, kind):
            judged = outcomes.take(test)
            self._fit_parts(outcomes.take(train), None if more is None else without_prompts(more, judged))
            signals[test] = self._signals(judged)
        self.blend.fit(signals, sample_weight=_weights(outcomes, OTHER_PAIRS))
        weight = _weights(outcomes, OTHER_PAIRS_CALIBRATED)
        self.base = float(np.average(outcomes.suffices, weights=weight))
        self.calibration.fit(self._blended(signals, outcomes), outcomes.suffices, sample_weight=weight)
        self._fit_parts(outcomes, more)
        return self

    def scores(self, outcomes: Outcomes) -> Floats:
        """Return the probability that a small model suffices, one per row."""
        return self.calibration.predict_proba(self._blended(self._signals(outcomes), outcomes))[:, 1]

    def weights(self) -> dict[str, npt.NDArray]:
        """Return what serving needs, named as ``router.complexity.classifier.Complexity`` reads it."""
        feature, threshold, leaf, start = _trees_of(self.trees)
        slope = -self.calibration.coef_[0, 0] / self.blend.scale_
        gain_mean, gap_mean = slope * ([start, 0] - self.blend.mean_)
        arrays = {
            "idf": self.tfidf.idf_,
            "bias": self.heads.biases,
            "tree_leaf": leaf,
            "joint": np.array([slope[0], gain_mean, slope[1], gap_mean, self.calibration.intercept_[0]]),
            "base": np.array(self.base),
        }
        exact = {"words": self.heads.weights, "tree_feature": feature, "tree_threshold": threshold}
        return {name: np.asarray(array, np.float32) for name, array in arrays.items()} | exact

    def _fit_parts(self, outcomes: Outcomes, more: Outcomes | None) -> None:
        _, subject, rows = np.unique(outcomes.domain, return_inverse=True, return_counts=True)
        weight = _weights(outcomes, OTHER_PAIRS) * (rows.mean() / rows[subject]) ** EVEN
        self.trees.fit(outcomes.stats, outcomes.gain, sample_weight=weight)
        weight = np.where(outcomes.is_believed, WORDS_BELIEFS, 1.0)
        if more is not None:
            outcomes, weight = outcomes + more, np.append(weight, np.full(len(more), MORE))
        self.heads.fit(self.tfidf.transform(outcomes.counts.sign()), outcomes, weight)

    def _signals(self, outcomes: Outcomes) -> Floats:
        """Return by how much a strong model does better, (rows, 2): as form says it, and as words do."""
        words = self.tfidf.transform(outcomes.counts.sign())
        return np.column_stack([self.trees.predict(outcomes.stats), self.heads.gap(words)])

    def _blended(self, signals: Floats, outcomes: Outcomes) -> Floats:
        # Fixed weights: those fitted at home served worse abroad. Where words cannot be read, form alone is left.
        share = WORDS * outcomes.readable
        form, words = -self.blend.transform(signals).T
        return ((1 - share) * form + share * words)[:, None]


def without_prompts(outcomes: Outcomes, others: Outcomes) -> Outcomes:
    """Return the outcomes of prompts that the others do not have."""
    theirs = set(others.prompts)
    return outcomes.take(np.array([prompt not in theirs for prompt in outcomes.prompts]))


def _weights(outcomes: Outcomes, of_other_pairs: float) -> Floats:
    """Return what each row weighs, where one of the main pair weighs 1."""
    return np.select([outcomes.is_main_pair, outcomes.is_believed], [1.0, BELIEFS], of_other_pairs)


def _trees_of(model: GradientBoostingRegressor) -> tuple[npt.NDArray, npt.NDArray, npt.NDArray, float]:
    """Return features, thresholds (trees, inner nodes) and leaves (trees, leaves) of full trees, and the initial score.

    A branch that ends early goes on with the same leaf on both sides.
    """
    inner = 2**DEPTH - 1
    feature = np.zeros((len(model.estimators_), inner), np.int16)
    threshold = np.full(feature.shape, np.inf)
    leaf = np.zeros((len(model.estimators_), inner + 1))
    for place, [estimator] in enumerate(model.estimators_):
        tree = estimator.tree_
        nodes = [0]  # of the tree, for each node of the full one
        for at in range(2 * inner + 1):
            node = nodes[at]
            is_leaf = tree.children_left[node] < 0
            if at >= inner:
                leaf[place, at - inner] = tree.value[node, 0, 0] * model.learning_rate
                continue
            if not is_leaf:
                feature[place, at], threshold[place, at] = tree.feature[node], tree.threshold[node]
            nodes += [node, node] if is_leaf else [tree.children_left[node], tree.children_right[node]]
    return feature, threshold, leaf, float(model.init_.constant_[0, 0])


def export(model: FittedComplexity, folder: Path, facts: dict[str, object]) -> None:
    """Write weights and manifest into ``folder``; ``facts`` say where the model comes from."""
    write_artifact(folder / WEIGHTS, folder / MANIFEST, FORMAT, model.weights(), facts)
