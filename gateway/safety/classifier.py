# What a text is about, as far as the content policy asks: attacks on the model, requests for harm, and the categories
# of OpenAI's moderation API. Fitted with scikit-learn (training/), served from exported weights with numpy.

from __future__ import annotations

import math
from importlib.resources import files
from importlib.resources.abc import Traversable

import numpy as np
import numpy.typing as npt

from gateway.safety.features import LONGEST, RUNS_AT_LEAST, WORDS_AT_LEAST, read_runs, read_words, windows
from gateway.safety.findings import Finding
from gateway.safety.plain import hidden, plain
from router.artifact import read_artifact

WEIGHTS = "safety.npz"
MANIFEST = "safety.json"  # {"sha256": of the weights, "format": FORMAT, …}
FORMAT = 2  # of the weights and of the features that they were fitted on
FLAGGED = 0.5  # a score from here on is a finding: the operating point that the model card tells of

# What the columns of the weights stand for. "any": whether a text is of any of the categories after it; it alone reads
# runs of bytes as well.
KINDS = (
    *("sexual", "hate", "harassment", "violence", "self-harm", "sexual/minors", "hate/threatening", "violence/graphic"),
)
HEADS = ("attack", "harm", "any", *KINDS)
ANY = HEADS.index("any")

Floats = npt.NDArray[np.float32]


class Classifier:
    """The fitted model, ready to score. A score of 0.5 is the operating point of its category, not a probability."""

    def __init__(self, weights: dict[str, npt.NDArray]) -> None:
        self._idf = weights["idf"].astype(np.float32)  # (buckets,)
        self._weights = np.ascontiguousarray(
            weights["weights"], np.float32
        )  # (buckets, heads); else ``take`` copies all
        self._bias = weights["bias"].astype(np.float32)  # (heads,), the operating points taken off
        self._run_idf = weights["run_idf"].astype(np.float32)  # (run buckets,)
        self._run_weights = weights["run_weights"].astype(np.float32)  # (run buckets,), of "any"
        self._log = (np.log(np.arange(1, 40 * LONGEST)) + 1).astype(np.float32)  # of how often a feature comes

    @classmethod
    def load(cls, folder: Traversable | None = None) -> Classifier:
        """Read the artefact that ships with the package, or the one in ``folder``, and score once to warm it.

        Raises ``ArtifactMismatch`` when weights and manifest do not belong together.
        """
        folder = files("gateway") / "safety" / "artifacts" if folder is None else folder
        model = cls(read_artifact(folder / WEIGHTS, folder / MANIFEST, FORMAT))
        model.score("Warm up, please.")
        return model

    def score(self, text: str) -> dict[str, float]:
        """Return the score of every category, 0..1: the highest that any window of the text has."""
        found = [self.logits(window) for window in readings(text)]
        return scores_of(found[0] if len(found) == 1 else np.max(found, axis=0))

    def logits(self, window: str) -> Floats:
        """Return the logit of every head for one of a text's ``readings``: above 0 is a finding."""
        buckets, counts = read_words(window)
        features = self._log.take(counts - 1) * self._idf.take(buckets)
        features *= np.float32(1 / math.hypot(WORDS_AT_LEAST, math.sqrt(features @ features)))
        found: Floats = (features @ self._weights.take(buckets, axis=0)).astype(np.float32, copy=False)
        found += self._bias
        buckets, counts = read_runs(window)
        features = self._log.take(counts - 1) * self._run_idf.take(buckets)
        runs = float(features @ self._run_weights.take(buckets))
        found[ANY] += runs / math.hypot(RUNS_AT_LEAST, math.sqrt(features @ features))
        # The head "any" knows best whether there is something, the others know what it is.
        kinds = found[3:]
        kinds += found[ANY] - kinds.max()
        return found


def readings(text: str) -> list[str]:
    """Return the windows in which a text is read: as its reader sees it, and what is hidden in it."""
    shown = plain(text)
    return [window for one in (shown, *hidden(shown)) for window in windows(" ".join(one.lower().split()))]


def scores_of(logits: Floats) -> dict[str, float]:
    """Return the scores of every category of the policy, 0..1, for the logits of a text."""
    by_head = dict(zip(HEADS, (1 / (1 + math.exp(-logit)) for logit in logits.tolist()), strict=True))
    violence, harm, self_harm = by_head["violence"], by_head["harm"], by_head["self-harm"]
    return {
        "attack": by_head["attack"],
        "harm": harm,
        "harassment": by_head["harassment"],
        "harassment/threatening": min(by_head["harassment"], violence),
        "hate": by_head["hate"],
        "hate/threatening": by_head["hate/threatening"],
        "illicit": harm,
        "illicit/violent": min(harm, violence),
        "self-harm": self_harm,
        "self-harm/intent": self_harm,
        "self-harm/instructions": min(self_harm, harm),
        "sexual": by_head["sexual"],
        "sexual/minors": by_head["sexual/minors"],
        "violence": violence,
        "violence/graphic": by_head["violence/graphic"],
    }


def findings_of(logits: Floats, kinds: tuple[str, ...] | None = None) -> list[Finding]:
    """Return the categories that the logits of a text stand for; ``kinds``: of these alone."""
    if not (logits > 0).any():  # as nearly always
        return []
    scores = scores_of(logits)
    return [Finding(name, "category", scores[name]) for name in kinds or scores if scores[name] >= FLAGGED]
