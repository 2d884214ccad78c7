# The chance that a small model's answer is as good as a large one's. Fitted with scikit-learn
# (tools/complexity_training), served from exported weights with numpy: the same scores, without the library in every
# gateway's memory.

from __future__ import annotations

import math
from importlib.resources import files
from importlib.resources.abc import Traversable

import numpy as np
import numpy.typing as npt

from protocol.inference import Request
from router.complexity.artifact import Arrays, digest_of, read_artifact
from router.complexity.features import HEAD, TAIL, Reading, read_text, text_of

WEIGHTS = "complexity.npz"
MANIFEST = "complexity.json"  # {"sha256": of the weights, "format": FORMAT, …}
FORMAT = 7  # of the weights and of the features that they were fitted on
WORDS = 0.5  # what words count beside form, where all of them could be read
MOST_KNOWN = 8192  # scores that are remembered, some 100 bytes each
MOST_FORMS = 1024  # the same with their form, some 700 bytes each

Floats = npt.NDArray[np.float64]
_ONES = np.ones(2 * (HEAD + TAIL), np.float32)  # a sum by ``dot`` is the quickest; for as many as a text has buckets
WARM_UP = ("Warm up, please.", "Which of the following is 12?\nA. ten\nB. 12\nAnswer:")


class Complexity:
    """The fitted model, ready to score.

    Small trees on text statistics say by how much a strong model should do better: what form says. Two linear heads on
    the TF-IDF of words say how likely a strong model is right and a weak one, and so by how much: what words say. Both
    count alike where the words could be read, and form alone where none could; one logistic step turns their sum into
    a calibrated probability: the logistic function of x is (1 + tanh(x / 2)) / 2.
    """

    def __init__(self, weights: Arrays, version: str = "") -> None:
        self.version = version  # of the weights: scores of one version compare
        idf = weights["idf"][:, None]
        # Row by row in memory: of an array that is not, ``take`` copies the whole.
        self._words = np.ascontiguousarray(np.hstack([idf * idf, idf * weights["words"]]))  # (buckets, 1 + heads)
        self._strong, self._weak = weights["bias"].tolist()
        self._trees = Trees(weights)
        self._known: dict[int, float] = {}  # scores by the hash of the text: no word of it is kept
        self._forms: dict[int, tuple[float, Floats]] = {}  # the same with their form, where a team's own scores ask
        self._joint = [float(value) for value in weights["joint"]]  # as ``score`` names it
        self._unread = float(weights["base"])  # how often a small model sufficed over all that was fitted

    @classmethod
    def load(cls, folder: Traversable | None = None) -> Complexity:
        """Read the artefact that ships with the package, or the one in ``folder``, and score to warm it.

        Raises ``ArtifactMismatch`` when weights and manifest do not belong together.
        """
        folder = files("router") / "complexity" / "artifacts" if folder is None else folder
        model = cls(read_artifact(folder / WEIGHTS, folder / MANIFEST, FORMAT), digest_of(folder / MANIFEST))
        for text in WARM_UP * 3:
            model.score(text)
        return model

    def small_suffices(self, request: Request) -> float:
        """Return the probability, 0..1, that a large model would not answer the request better than a small one.

        The newest scores are remembered: a conversation that wavers has its earlier turns judged with every turn. Where
        nothing can be read (images alone, token ids) it is what is known without a prompt.
        """
        text = text_of(request)
        if not text or text.isspace():
            return self._unread
        name = hash((text, len(text)))  # one of another width may have the same bytes, and so the same hash
        score = self._known.get(name)
        if score is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            score = self._known[name] = self.score(text)
        return score

    __call__ = small_suffices

    def with_form(self, request: Request) -> tuple[float, Floats | None]:
        """Return ``small_suffices`` and the text statistics that it rests on, (statistics,); None without a text."""
        text = text_of(request)
        if not text or text.isspace():
            return self._unread, None
        name = hash((text, len(text)))
        found = self._forms.get(name)
        if found is None:
            if len(self._forms) >= MOST_FORMS:
                self._forms.clear()
            reading = read_text(text)
            found = self._forms[name] = self._score(reading), reading.stats
            self._known[name] = found[0]
        return found

    def score(self, text: str) -> float:
        """Return ``small_suffices`` of a text as ``features.text_of`` reads it from a request."""
        return self._score(read_text(text))

    def _score(self, reading: Reading) -> float:
        buckets, is_first, stats, readable = reading
        strong, weak = self._strong, self._weak
        if len(buckets):
            known = buckets[is_first]  # each bucket once, however often it is there
            square, by_strong, by_weak = _ONES[: len(known)].dot(self._words.take(known, axis=0)).tolist()
            norm = math.sqrt(square)
            strong, weak = strong + by_strong / norm, weak + by_weak / norm
        by_gain, gain_mean, by_gap, gap_mean, intercept = self._joint
        form = by_gain * self._trees.gain(stats) + gain_mean
        words = by_gap * (math.tanh(strong / 2) - math.tanh(weak / 2)) / 2 + gap_mean
        share = WORDS * readable
        return 0.5 + math.tanh(((1 - share) * form + share * words + intercept) / 2) / 2


class Trees:
    """Regression trees of one depth. All nodes are compared at once: their answers are the bits of a number, and a
    table says which leaf each number leads to."""

    def __init__(self, weights: Arrays) -> None:
        feature, threshold = weights["tree_feature"], weights["tree_threshold"]  # (trees, inner nodes)
        trees, inner = feature.shape
        # Eight answers to a tree, the last of them always no; in a row, so that they pack into a byte for each tree.
        features, thresholds = np.zeros((trees, 8), np.intp), np.full((trees, 8), np.inf)
        features[:, :inner], thresholds[:, :inner] = feature, _in_float64(threshold)
        self._feature, self._threshold = features.ravel(), thresholds.ravel()
        self._first = np.arange(trees) * 256  # where each tree's part of the table begins
        # Node n leads to 2n + 1 (at or below its threshold) and 2n + 2; the first node's answer is the highest bit.
        goes_right = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)  # (numbers, bits)
        at = np.zeros(256, np.intp)
        while at[0] < inner:
            at = 2 * at + 1 + goes_right[np.arange(256), at]
        self._leaf = weights["tree_leaf"].astype(np.float64)[:, at - inner].ravel()
        self._each = np.ones(trees)

    def gain(self, stats: npt.NDArray[np.float64]) -> float:
        """Return the sum of the leaves that the statistics fall into: how much better a strong model should be."""
        goes_right = stats.take(self._feature) > self._threshold
        return float(self._leaf.take(np.packbits(goes_right) + self._first).dot(self._each))


def _in_float64(threshold: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the largest number whose float32 is not above each threshold: scikit-learn rounds before it compares."""
    rounded = threshold.astype(np.float32)
    below = np.where(rounded > threshold, np.nextafter(rounded, np.float32(-np.inf)), rounded)
    middle = (below.astype(np.float64) + np.nextafter(below, np.float32(np.inf))) / 2  # here rounding turns
    return np.where(middle.astype(np.float32) > below, np.nextafter(middle, -np.inf), middle)
