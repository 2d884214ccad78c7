# What a text is about, as far as the content policy asks: attacks on the model, requests for harm, and the categories
# of OpenAI's moderation API. Fitted with scikit-learn (training/), served from exported weights with numpy.
#
# Texts repeat their words: what the runs of bytes inside a word come to is worked out once, and found again by the hash
# of what stands between two spaces, so that a text costs one look-up a word and one product.

from __future__ import annotations

import math
from importlib.resources import files
from importlib.resources.abc import Traversable
from operator import add
from sys import byteorder

import numpy as np
import numpy.typing as npt

from gateway.safety.features import (
    BUCKETS,
    LONGEST,
    RUNS_AT_LEAST,
    WORDS_AT_LEAST,
    hashes_of,
    read_runs,
    read_words,
    windows,
    words_in,
)
from gateway.safety.findings import Finding
from gateway.safety.hidden import hidden, with_letters
from gateway.safety.meaning import KINDS, Meaning
from gateway.safety.plain import plain
from router.artifact import read_artifact

WEIGHTS = "safety.npz"
MANIFEST = "safety.json"  # {"sha256": of the weights, "format": FORMAT, …}
FORMAT = 5  # of the weights and of the features that they were fitted on
FLAGGED = 0.5  # a score from here on is a finding: the operating point that the model card tells of
REMEMBERED = 1 << 15  # words whose runs are known; at least as many as a window can have
PLACES = range(BUCKETS, BUCKETS + REMEMBERED)  # where they stand: after the buckets, so that both are counted in one go
LONG = 64  # bytes: what is longer between two spaces is remembered by its words alone

# What the columns of the weights stand for. "any": whether a text is of any of the kinds after it.
OF_WORDS = ("attack", "harm")  # they read words, pairs and triples; the others the runs of bytes inside words
OF_RUNS = ("any", *KINDS)
HEADS = (*OF_WORDS, *OF_RUNS)
ANY = HEADS.index("any")
HARM = HEADS.index("harm")

Floats = npt.NDArray[np.float32]


class Classifier:
    """The fitted model, ready to score. A score of 0.5 is the operating point of its category, not a probability."""

    def __init__(self, weights: dict[str, npt.NDArray]) -> None:
        roots = weights["runs"].astype(np.float32)  # of weights, in steps, with their signs
        runs = roots * np.abs(roots) * weights["run_steps"]
        self._runs = _table(weights["run_idf"], runs)  # (run buckets + 1, heads of runs + 1)
        # What a word, pair or triple adds to the heads of words, and a word at its place to the heads of runs: with
        # either a line, one product does for both.
        self._adds = np.zeros((PLACES.stop, len(HEADS) + 2), np.float32)
        self._adds[:BUCKETS, : ANY + 1] = _table(weights["idf"], weights["words"])[:-1]
        self._bias: list[float] = weights["bias"].tolist()  # of each head, the operating points taken off
        log = np.log(np.arange(4 * LONGEST, dtype=np.float32).clip(1)) + 1
        self._scales = np.stack((log, log * log))  # by how often a feature comes: of weights, and of squares
        # The place of each word, and the places of those that are between two spaces, four bytes each. By hashes, since
        # what was said is not kept; of bytes, since texts of another width may share theirs.
        self._place: dict[int, bytes] = {}
        self._free = PLACES.start
        self._hashes = np.zeros(PLACES.stop, np.uint32)
        self._meaning = Meaning(weights)
        self._meant = np.zeros((PLACES.stop, self._meaning.columns), np.float32)
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
        hits, counts = read_words(self._hashes.take(places), places)
        scales = self._scales.take(counts, axis=1)
        sums, squares = scales.dot(self._adds.take(hits, axis=0)).tolist()
        sums = [
            *_weighed(sums[: ANY + 1], squares[ANY], WORDS_AT_LEAST),
            *_weighed(sums[ANY + 1 :], squares[-1], RUNS_AT_LEAST),
        ]
        found = list(map(add, sums, self._bias))
        first = hits.searchsorted(BUCKETS)  # from here on they are places of words
        meant = self._meaning.logits(scales[0, first:].dot(self._meant.take(hits[first:], axis=0)))
        found[HARM:] = map(add, found[HARM:], meant)
        # "any" knows whether there is something, and the kinds, fitted on nothing but texts that break the policy, what
        # it is: the likeliest in any case, and every other that is likely of itself.
        is_any, kinds = found[ANY], found[ANY + 1 :]
        likeliest = kinds.index(max(kinds))
        kinds = [min(is_any, kind) for kind in kinds]
        kinds[likeliest] = is_any
        return np.array(found[: ANY + 1] + kinds, np.float32)

    def _places(self, pieces: list[bytes]) -> npt.NDArray[np.uint32]:
        """Return the place of each word of a text that was split at its spaces."""
        place = self._place
        try:
            places = b"".join(map(place.__getitem__, map(hash, pieces)))
        except KeyError:
            pieces = [part for piece in pieces for part in ((piece,) if len(piece) <= LONG else words_in(piece))]
            self._learn(pieces)
            places = b"".join(map(place.__getitem__, map(hash, pieces)))
        return np.frombuffer(places, np.uint32)

    def _learn(self, pieces: list[bytes]) -> None:
        place, first = self._place, self._free
        fresh = {key: piece for key, piece in zip(map(hash, pieces), pieces, strict=True) if key not in place}
        words = words_in(b" ".join(fresh.values()))
        unheard = {key: word for key, word in zip(map(hash, words), words, strict=True) if key not in place}
        end = first + len(unheard)
        if first > PLACES.start and (end > PLACES.stop or len(place) + len(fresh) > 2 * REMEMBERED):
            place.clear()
            self._free = PLACES.start
            self._learn(pieces)
            return
        if unheard:
            words = list(unheard.values())
            runs = read_runs(words)
            known = self._runs.take(runs.buckets, axis=0).sum(axis=0)  # (places, heads of runs + 1)
            self._adds[first:end, ANY + 1 :] = np.add.reduceat(known, runs.starts, axis=0)
            self._hashes[first:end] = hashes_of(words)
            self._meant[first:end] = self._meaning.rows_of(self._hashes[first:end])
            for at, key in enumerate(unheard, first):
                place[key] = at.to_bytes(4, byteorder)
            self._free = end
        for key in fresh.keys() - unheard.keys():
            place[key] = b"".join([place[hash(word)] for word in words_in(fresh[key])])


def _table(idf: npt.NDArray, weights: npt.NDArray) -> Floats:
    """Return (buckets + 1, heads + 1): what a hit adds to each head and to the square of the reading's length. The last
    bucket is of what is no feature, and adds nothing."""
    scale = idf.astype(np.float32)[:, None]
    table = np.zeros((len(idf) + 1, weights.shape[1] + 1), np.float32)
    table[:-1, :-1] = weights.astype(np.float32) * scale
    table[:-1, -1:] = scale * scale
    return table


def _weighed(sums: list[float], square: float, at_least: float) -> list[float]:
    """Return the heads' sums divided by the reading's length, of which ``square`` is the square; it comes last in
    ``sums``, where it means nothing."""
    shorter = 1 / math.sqrt(at_least * at_least + square)
    return [shorter * one for one in sums[:-1]]


def readings(text: str, *, hides: bool = True) -> list[str]:
    """Return the windows in which a text is read: as its reader sees it, and what is hidden in it. ``hides``: False
    where it is known that nothing is."""
    shown = plain(text)
    said = [shown, *hidden(shown)] if hides else [shown]
    if (lettered := with_letters(shown)) is not shown:
        said.append(lettered)
    return [window for one in said for window in windows(evened(one.lower()))]


def evened(text: str) -> str:
    """Return a text with single spaces; or as it is, where one window holds it all and its words are the same."""
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
