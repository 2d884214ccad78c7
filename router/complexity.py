# The chance that a small model's answer is as good as a large one's. Fitted with scikit-learn (router/training), served
# from exported weights with numpy: the same scores, without the library in every gateway's memory.

from __future__ import annotations

import math
from importlib.resources import files
from importlib.resources.abc import Traversable

import numpy as np
import numpy.typing as npt

from router.abilities import InferenceRequest
from router.artifact import Arrays, read_artifact
from router.features import read_text, text_of
from router.form import FORM_LIMIT

WEIGHTS = "complexity.npz"
MANIFEST = "complexity.json"  # {"sha256": of the weights, "format": FORMAT, …}
FORMAT = 2  # of the weights and of the features that they were fitted on
MOST_KNOWN = 8192  # scores that are remembered, some 100 bytes each
WARM_UP = ("Warm up, please.", "Which of the following is 12?\nA. ten\nB. 12\nAnswer:")


class Complexity:
    """The fitted model, ready to score.

    Two linear heads on words and form say whether a strong model is right and whether a weak one is; small trees on the
    form alone say by how much the strong one does better. The gap of the heads, the trees and the weak head are
    weighed, and one logistic step turns their sum into a calibrated probability.
    """

    def __init__(self, weights: Arrays) -> None:
        self._idf = weights["idf"].astype(np.float64)  # (buckets,)
        self._words = weights["words"].astype(np.float64)  # (buckets, heads)
        self._mean = weights["mean"].astype(np.float64)  # (form features,)
        self._inverse_scale = 1 / weights["scale"].astype(np.float64)  # (form features,)
        self._form = weights["form"].astype(np.float64)  # (form features, heads), for features standardised and clipped
        self._bias = weights["bias"].astype(np.float64)  # (heads,)
        self._trees = Trees(weights)
        self._known: dict[int, float] = {}  # scores by the hash of the text: no word of it is kept
        self._joint = [float(value) for value in weights["joint"]]  # of gap, trees and weak head, and the intercept

    @classmethod
    def load(cls, folder: Traversable | None = None) -> Complexity:
        """Read the artefact that ships with the package, or the one in ``folder``, and score to warm it.

        Raises ``ArtifactMismatch`` when weights and manifest do not belong together.
        """
        folder = files("router") / "artifacts" if folder is None else folder
        model = cls(read_artifact(folder / WEIGHTS, folder / MANIFEST, FORMAT))
        for text in WARM_UP * 3:
            model.score(text)
        return model

    def small_suffices(self, request: InferenceRequest) -> float:
        """Return the probability, 0..1, that a large model would not answer the request better than a small one.

        The newest scores are remembered, because a thread that wavers has its earlier turns judged with every turn.
        """
        text = text_of(request)
        name = hash(text)
        score = self._known.get(name)
        if score is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            score = self._known[name] = self.score(text)
        return score

    __call__ = small_suffices

    def score(self, text: str) -> float:
        """Return ``small_suffices`` of a text as ``features.text_of`` reads it from a request."""
        buckets, counts, form = read_text(text)
        standard = np.minimum(np.maximum((form - self._mean) * self._inverse_scale, -FORM_LIMIT), FORM_LIMIT)
        logits = standard @ self._form + self._bias
        if len(buckets):
            weight = (np.log(counts) + 1) * self._idf[buckets]
            logits += weight @ self._words[buckets] / math.sqrt(weight @ weight)
        strong, weak = logits.tolist()
        by_gap, by_gain, by_weak, intercept = self._joint
        gap = _sigmoid(strong) - _sigmoid(weak)
        return _sigmoid(by_gap * gap + by_gain * self._trees.gain(form) + by_weak * weak + intercept)


class Trees:
    """Regression trees of one depth, all walked at once: node n of a tree leads to 2n + 1 (at or below) and 2n + 2."""

    def __init__(self, weights: Arrays) -> None:
        feature = weights["tree_feature"]  # (trees, inner nodes)
        self._inner = feature.shape[1]
        self._depth = (self._inner + 1).bit_length() - 1
        self._feature = feature.ravel()
        self._threshold = weights["tree_threshold"].ravel()  # float64, as scikit-learn compares
        self._leaf = weights["tree_leaf"].astype(np.float64).ravel()
        self._nodes = np.arange(feature.shape[0]) * self._inner  # where each tree's nodes begin
        self._leaves = np.arange(feature.shape[0]) * (self._inner + 1)  # and its leaves

    def gain(self, form: npt.NDArray[np.float64]) -> float:
        """Return the sum of the leaves that the form falls into: how much better a strong model is expected to be."""
        goes_right = form.astype(np.float32)[self._feature] > self._threshold
        at = np.zeros(len(self._nodes), np.intp)
        for _ in range(self._depth):
            at = 2 * at + 1 + goes_right[self._nodes + at]
        return float(self._leaf[self._leaves + at - self._inner].sum())


def _sigmoid(logit: float) -> float:
    if logit < 0:
        odds = math.exp(max(logit, -700.0))
        return odds / (1 + odds)
    return 1 / (1 + math.exp(-logit))
