# Fits the complexity model with scikit-learn, and exports its weights for router.complexity.classifier.

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler

from router.complexity.artifact import write_artifact
from router.complexity.classifier import FORMAT, MANIFEST, WEIGHTS
from router.complexity.text_stats import STATS_LIMIT
from tools.complexity_training.dataset import Outcomes

SEED = 20260
FOLDS = 3  # of the joint step
REGULARISATION = 0.05  # scikit-learn's C
TOPICS = 32  # directions in which prompts differ most by their words
SHARE = 0.3  # of a standard deviation: what a topic or a text statistic counts, before regularisation
OTHER_PAIRS = 0.1  # what a row of another pair of models weighs: it teaches other tasks, and knows other models
OTHER_PAIRS_CALIBRATED = 0.5  # the same in the last step, which learns how often a small model suffices at all
BELIEFS = 0.3  # what a written prompt weighs, in every step: it teaches open chat, of which there are no outcomes
EVEN = 0.5  # 0: each row counts alike; 1: each subject does, however many rows it has
MIX = (-1.0, -0.5)  # of the heads' gap and the trees' gain, each in standard deviations
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


class FittedComplexity:
    """The model as scikit-learn has it: heads on topics and text statistics, trees on these, a joint step out of fold.

    A topic is a weighted sum of words, so that the heads are linear in words and served so.
    """

    def __init__(self) -> None:
        self.tfidf = TfidfTransformer()
        self.topics = TruncatedSVD(TOPICS, n_iter=4, random_state=SEED)
        self.scaler = StandardScaler()
        self.strong = LogisticRegression(C=REGULARISATION, max_iter=2000)
        self.weak = LogisticRegression(C=REGULARISATION, max_iter=2000)
        self.trees = GradientBoostingRegressor(**TREES)
        self.blend = StandardScaler()
        self.calibration = LogisticRegression()

    def fit(self, outcomes: Outcomes, believed: Outcomes | None = None) -> FittedComplexity:
        """Fit all on all rows, and the joint step on what parts fitted on other rows say of each row.

        What is ``believed`` of open chat is fitted beside the outcomes, and lends no topics.
        """
        topics = self.topics.fit_transform(self.tfidf.fit_transform(outcomes.counts.sign()))
        self.topic_share = SHARE / topics.std(axis=0).mean()  # one for all, so that a larger one counts more
        outcomes = outcomes if believed is None else outcomes + believed
        weight = _weights(outcomes, OTHER_PAIRS)
        self.scaler.fit(outcomes.stats, sample_weight=weight)
        signals = np.zeros((len(outcomes), len(MIX)))
        kind = np.char.add(outcomes.benchmark, outcomes.suffices.astype(str))
        for train, test in StratifiedKFold(FOLDS, shuffle=True, random_state=SEED).split(signals, kind):
            self._fit_parts(outcomes.take(train))
            signals[test] = self._signals(outcomes.take(test))
        self.blend.fit(signals, sample_weight=weight)
        weight = _weights(outcomes, OTHER_PAIRS_CALIBRATED)
        self.base = float(np.average(outcomes.suffices, weights=weight))
        self.calibration.fit(self._blended(signals), outcomes.suffices, sample_weight=weight)
        self._fit_parts(outcomes)
        return self

    def scores(self, outcomes: Outcomes) -> Floats:
        """Return the probability that a small model suffices, one per row."""
        return self.calibration.predict_proba(self._blended(self._signals(outcomes)))[:, 1]

    def weights(self) -> dict[str, npt.NDArray]:
        """Return what serving needs, named as ``router.complexity.classifier.Complexity`` reads it."""
        heads = np.vstack([self.strong.coef_, self.weak.coef_]).T
        joint = self.calibration.coef_[0, 0] * np.array(MIX) / self.blend.scale_
        intercept = self.calibration.intercept_[0] - joint @ self.blend.mean_
        feature, threshold, leaf, start = _trees_of(self.trees)
        arrays = {
            "idf": self.tfidf.idf_,
            "words": self.topic_share * self.topics.components_.T @ heads[:TOPICS],
            "form": heads[TOPICS:] * SHARE,
            "mean": self.scaler.mean_,
            "scale": self.scaler.scale_,
            "bias": np.concatenate([self.strong.intercept_, self.weak.intercept_]),
            "tree_leaf": leaf,
            "joint": np.append(joint, intercept + joint[1] * start),
            "base": np.array(self.base),
        }
        exact = {"tree_feature": feature, "tree_threshold": threshold}
        return {name: np.asarray(array, np.float32) for name, array in arrays.items()} | exact

    def _fit_parts(self, outcomes: Outcomes) -> None:
        _, subject, rows = np.unique(outcomes.domain, return_inverse=True, return_counts=True)
        weight = _weights(outcomes, OTHER_PAIRS) * (rows.mean() / rows[subject]) ** EVEN
        features = self._features(outcomes)
        self.strong.fit(features, outcomes.strong > 0.5, sample_weight=weight)
        self.weak.fit(features, outcomes.weak > 0.5, sample_weight=weight)
        self.trees.fit(outcomes.stats, outcomes.gain, sample_weight=weight)

    def _signals(self, outcomes: Outcomes) -> Floats:
        """Return what ``MIX`` weighs, (rows, 2): the gap is that of the chances of strong and weak to be right."""
        features = self._features(outcomes)
        gap = self.strong.predict_proba(features)[:, 1] - self.weak.predict_proba(features)[:, 1]
        return np.column_stack([gap, self.trees.predict(outcomes.stats)])

    def _blended(self, signals: Floats) -> Floats:
        # Fixed weights: those fitted at home served worse abroad.
        return self.blend.transform(signals) @ np.array(MIX)[:, None]

    def _features(self, outcomes: Outcomes) -> Floats:
        topics = self.topics.transform(self.tfidf.transform(outcomes.counts.sign())) * self.topic_share
        stats = np.clip(self.scaler.transform(outcomes.stats), -STATS_LIMIT, STATS_LIMIT) * SHARE
        return np.hstack([topics, stats])


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
