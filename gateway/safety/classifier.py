# What a text is about, as far as the content policy asks: attacks on the model, requests for harm, and the categories
# of OpenAI's moderation API. Fitted with scikit-learn (training/), served from exported weights with numpy.
#
# Texts repeat their words: what the runs of bytes inside a word come to is worked out once, and found again by the hash
# of what stands between two spaces, so that a text costs one look-up a word and one product.

from __future__ import annotations

import math
from importlib.resources import files
from importlib.resources.abc import Traversable

import numpy as np
import numpy.typing as npt

from gateway.safety.features import (
    LONGEST,
    RUNS_AT_LEAST,
    WORDS_AT_LEAST,
    counted,
    hashes_of,
    read_runs,
    read_words,
    windows,
    words_in,
)
from gateway.safety.findings import Finding
from gateway.safety.hidden import hidden, with_letters
from gateway.safety.plain import plain
from router.artifact import read_artifact

WEIGHTS = "safety.npz"
MANIFEST = "safety.json"  # {"sha256": of the weights, "format": FORMAT, …}
FORMAT = 3  # of the weights and of the features that they were fitted on
FLAGGED = 0.5  # a score from here on is a finding: the operating point that the model card tells of
REMEMBERED = 1 << 15  # words whose runs are known; at least as many as a window can have, and less than 1 << 16
LONG = 64  # bytes: what is longer between two spaces is remembered by its words alone

# What the columns of the weights stand for. "any": whether a text is of any of the categories after it.
KINDS = (
    *("sexual", "hate", "harassment", "violence", "self-harm", "sexual/minors", "hate/threatening", "violence/graphic"),
)
OF_WORDS = ("attack", "harm")  # they read words, pairs and triples; the others the runs of bytes inside words
OF_RUNS = ("any", *KINDS)
HEADS = (*OF_WORDS, *OF_RUNS)
ANY = HEADS.index("any")

Floats = npt.NDArray[np.float32]


class Classifier:
    """The fitted model, ready to score. A score of 0.5 is the operating point of its category, not a probability."""

    def __init__(self, weights: dict[str, npt.NDArray]) -> None:
        self._words = _table(weights["idf"], weights["words"])  # (buckets, heads of words + 1)
        self._runs = _table(weights["run_idf"], weights["runs"])  # (run buckets + 1, heads of runs + 1)
        self._bias = weights["bias"].astype(np.float32)  # (heads,), the operating points taken off
        self._log = np.log(np.arange(4 * LONGEST, dtype=np.float32).clip(1)) + 1  # of how often a feature comes
        # Where each word stands in ``_known``, and where those stand that are between two spaces, two bytes each. By
        # hashes, since what was said is not kept; of bytes, since texts of another width may share theirs.
        self._place: dict[int, bytes] = {}
        self._words_known = 0
        self._hashes = np.zeros(REMEMBERED, np.uint32)
        self._known = np.zeros((REMEMBERED, len(OF_RUNS) + 1), np.float32)  # sums of ``_runs`` over a word's runs
        self._places(weights["common"].tobytes().split())

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
        places = self._places(window.encode("utf-8", "replace").split())
        found = self._bias.copy()
        buckets, counts = read_words(self._hashes.take(places))
        found[:ANY] += _weighed(self._words.take(buckets, axis=0), self._log.take(counts), WORDS_AT_LEAST)
        distinct, counts = counted(places)
        found[ANY:] += _weighed(self._known.take(distinct, axis=0), self._log.take(counts), RUNS_AT_LEAST)
        # The head "any" knows best whether there is something, the others know what it is.
        kinds = found[ANY + 1 :]
        kinds += found[ANY] - np.maximum.reduce(kinds)
        return found

    def _places(self, pieces: list[bytes]) -> npt.NDArray[np.intp]:
        """Return where each word of a text, split at its spaces, stands in ``_known``."""
        place = self._place
        try:
            places = b"".join(map(place.__getitem__, map(hash, pieces)))
        except KeyError:
            pieces = [part for piece in pieces for part in ((piece,) if len(piece) <= LONG else words_in(piece))]
            self._learn(pieces)
            places = b"".join(map(place.__getitem__, map(hash, pieces)))
        return np.frombuffer(places, np.uint16).astype(np.intp)

    def _learn(self, pieces: list[bytes]) -> None:
        place, first = self._place, self._words_known
        fresh = {key: piece for key, piece in zip(map(hash, pieces), pieces, strict=True) if key not in place}
        unheard = {key: word for word in words_in(b" ".join(fresh.values())) if (key := hash(word)) not in place}
        end = first + len(unheard)
        if first and (end > REMEMBERED or len(place) + len(fresh) > 2 * REMEMBERED):
            place.clear()
            self._words_known = 0
            self._learn(pieces)
            return
        if unheard:
            words = list(unheard.values())
            runs = read_runs(words)
            known = self._runs.take(runs.buckets, axis=0).sum(axis=0)  # (places, heads of runs + 1)
            self._known[first:end] = np.add.reduceat(known, runs.starts, axis=0)
            self._hashes[first:end] = hashes_of(words)
            places = np.arange(first, end, dtype=np.uint16).tobytes()
            place.update(zip(unheard, map(bytes, zip(places[::2], places[1::2], strict=True)), strict=True))
            self._words_known = end
        for key, piece in fresh.items():
            if key not in place:
                place[key] = b"".join([place[hash(word)] for word in words_in(piece)])


def _table(idf: npt.NDArray, weights: npt.NDArray) -> Floats:
    """Return (buckets + 1, heads + 1): what a hit adds to each head and to the square of the reading's length. The last
    bucket is of what is no feature, and adds nothing."""
    scale = idf.astype(np.float32)[:, None]
    table = np.zeros((len(idf) + 1, weights.shape[1] + 1), np.float32)
    table[:-1, :-1] = weights.astype(np.float32) * scale
    table[:-1, -1:] = scale * scale
    return table


def _weighed(rows: Floats, scale: Floats, at_least: float) -> Floats:
    """Return the heads' sums over features, each scaled, divided by the reading's length."""
    length = math.hypot(at_least, math.sqrt((scale * scale).dot(rows[:, -1])))
    sums: Floats = scale.dot(rows)[:-1]
    sums *= np.float32(1 / length)
    return sums


def readings(text: str) -> list[str]:
    """Return the windows in which a text is read: as its reader sees it, and what is hidden in it."""
    shown = plain(text)
    said = [shown, *hidden(shown)]
    if (lettered := with_letters(shown)) is not shown:
        said.append(lettered)
    return [window for one in said for window in windows(_evened(one.lower()))]


def _evened(text: str) -> str:
    # Where one window holds it all, the words are the same.
    return text if len(text) <= LONGEST and text.isascii() else " ".join(text.split())


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
