# The chance that a small model's answer is as good as a large one's. Fitted with scikit-learn (router/training), served
# from exported weights with numpy: the same scores, without the library in every gateway's memory.

from __future__ import annotations

import hashlib
import io
import json
import math
from importlib.resources import files
from importlib.resources.abc import Traversable

import numpy as np
import numpy.typing as npt

from protocol.chat import ChatRequest, Message
from router.abilities import InferenceRequest
from router.errors import ArtifactMismatch
from router.features import FORM_LIMIT, LENGTH, read_text, text_of

WEIGHTS = "complexity.npz"
MANIFEST = "complexity.json"  # {"sha256": of the weights, "format": FORMAT, …}
FORMAT = 1  # of the weights and of the features that they were fitted on

Floats = npt.NDArray[np.float32]


class Complexity:
    """The fitted model, ready to score.

    Three linear heads read the same features: whether a strong model is right, whether a weak one is, and by how much
    the strong one does better. The gap of the first two, the third and the length of the text count the same; one
    logistic step turns them into a calibrated probability.
    """

    def __init__(self, weights: dict[str, Floats]) -> None:
        self._idf = weights["idf"].astype(np.float64)  # (buckets,)
        self._words = weights["words"].astype(np.float64)  # (buckets, heads)
        self._mean = weights["mean"].astype(np.float64)  # (form features,)
        self._inverse_scale = 1 / weights["scale"].astype(np.float64)  # (form features,)
        self._form = weights["form"].astype(np.float64)  # (form features, heads), for features standardised and clipped
        self._bias = weights["bias"].astype(np.float64)  # (heads,)
        self._joint = [float(value) for value in weights["joint"]]  # of the three, and the intercept

    @classmethod
    def load(cls, folder: Traversable | None = None) -> Complexity:
        """Read the artefact that ships with the package, or the one in ``folder``, and score once to warm it.

        Raises ``ArtifactMismatch`` when weights and manifest do not belong together.
        """
        folder = files("router") / "artifacts" if folder is None else folder
        data = (folder / WEIGHTS).read_bytes()
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
            raise ArtifactMismatch(f"{WEIGHTS} does not match the checksum in {MANIFEST}; restore both or fit again.")
        if manifest["format"] != FORMAT:
            raise ArtifactMismatch(f"{WEIGHTS} has format {manifest['format']}; this version reads {FORMAT}.")
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            model = cls({name: arrays[name] for name in arrays.files})
        model.small_suffices(ChatRequest(model="auto", messages=(Message(role="user", content="Warm up, please."),)))
        return model

    def small_suffices(self, request: InferenceRequest) -> float:
        """Return the probability, 0..1, that a large model would not answer the request better than a small one."""
        return self.score(text_of(request))

    __call__ = small_suffices

    def score(self, text: str) -> float:
        """Return ``small_suffices`` of a text as ``features.text_of`` reads it from a request."""
        buckets, counts, form = read_text(text)
        standard = np.minimum(np.maximum((form - self._mean) * self._inverse_scale, -FORM_LIMIT), FORM_LIMIT)
        logits = standard @ self._form + self._bias
        if len(buckets):
            weight = (np.log(counts) + 1) * self._idf[buckets]
            logits += weight @ self._words[buckets] / math.sqrt(weight @ weight)
        strong, weak, gain = logits.tolist()
        by_gap, by_gain, by_length, intercept = self._joint
        gap = _sigmoid(strong) - _sigmoid(weak)
        return _sigmoid(by_gap * gap + by_gain * gain + by_length * float(standard[LENGTH]) + intercept)


def _sigmoid(logit: float) -> float:
    if logit < 0:
        odds = math.exp(max(logit, -700.0))
        return odds / (1 + odds)
    return 1 / (1 + math.exp(-logit))
