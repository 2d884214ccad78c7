# What a text is about, as far as the content policy asks: attacks on the model, requests for harm, and the categories
# of OpenAI's moderation API. Fitted with scikit-learn (tools/moderation_training), served from exported weights with
# numpy.
#
# Texts repeat their words: what the runs of bytes inside a word come to is worked out once, and found again by its key.
# What is new is worked out for all words of a text at once.

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.resources import files
from importlib.resources.abc import Traversable
from operator import add

import numpy as np
import numpy.typing as npt

from gateway.moderation.classifier.features import (
    LONGEST,
    RUNS_AT_LEAST,
    WORDS_AT_LEAST,
    Runs,
    Words,
    each_once,
    hashes_of,
    read_runs,
    read_words,
    windows,
    words_of,
)
from gateway.moderation.classifier.findings import Finding
from gateway.moderation.classifier.hidden import hidden, with_letters
from gateway.moderation.classifier.meaning import KINDS, Meaning
from gateway.moderation.classifier.plain import plain, visible
from gateway.moderation.classifier.surprise import Surprise
from router.complexity.artifact import read_artifact

WEIGHTS = "safety.npz"
MANIFEST = "safety.json"  # {"sha256": of the weights, "format": FORMAT, …}
FORMAT = 7  # of the weights and of the features that they were fitted on
FLAGGED = 0.5  # a score from here on is a finding: the operating point that the model card tells of
PLACE_BITS = 17
PLACES = 1 << PLACE_BITS  # of remembered words: each has one, by its key, and keeps it until another comes there
_TO_PLACE = np.array(64 - PLACE_BITS, np.uint64)

# What the columns of the weights stand for. "any": whether a text is of any of the kinds after it.
OF_WORDS = ("attack", "harm")  # they read words, pairs and triples; the others the runs of bytes inside words
OF_RUNS = ("any", *KINDS)
HEADS = (*OF_WORDS, *OF_RUNS)
ATTACK, HARM, ANY = map(HEADS.index, ("attack", "harm", "any"))

# How far below a finding a text may be, as an attack or as a request for harm, for its form to make it an attack: by
# words alone, and where the encoder has read it, which knows the two from other texts by far more. What an optimiser
# appends stands by a request, which is near; code and lists, as improbable, are further away.
NEAR_BY_WORDS, NEAR = 1.0, 4.0

Floats = npt.NDArray[np.float32]


class Classifier:
    """The fitted model, ready to score. A score of 0.5 is the operating point of its category, not a probability."""

    def __init__(self, weights: dict[str, npt.NDArray]) -> None:
        roots = weights["runs"].astype(np.float32)  # of weights, in steps, with their signs
        runs = roots * np.abs(roots) * weights["run_steps"]
        self._words = _table(weights["idf"], weights["words"])  # (buckets + 1, heads of words + 1)
        self._runs = _table(weights["run_idf"], runs[:, :1])  # (run buckets + 1, "any" and 1)
        self._kind_runs = _table(weights["run_idf"], runs[:, 1:])[:, :-1].copy()  # (run buckets + 1, kinds)
        self._bias: list[float] = weights["bias"].tolist()  # of each head, the operating points taken off
        log = np.log(np.arange(4 * LONGEST, dtype=np.float32).clip(1)) + 1
        self._scales = np.stack((log, log * log))  # by how often a feature comes: of weights, and of squares
        self._meaning = Meaning(weights)
        # What small networks make of the encoder's vector of a window, for the heads up to "any"; and the biases of
        # these where there is one, the operating points taken off.
        self._read_in = weights["read_in"].astype(np.float32)  # (dimensions, hidden)
        self._read_hidden = weights["read_hidden"].astype(np.float32)  # (hidden,)
        self._read_out = weights["read_out"].astype(np.float32)  # (hidden, heads)
        self._read_bias: list[float] = weights["read_bias"].tolist()
        self._surprise = Surprise(weights)
        # Of the words that are remembered, by their places. By keys, since what was said is not kept.
        self._keys = np.zeros(PLACES, np.uint64)
        self._keys[0] = ~np.uint64(0)  # no word has its place here and this key, nor is there one of 0 elsewhere
        self._hashes = np.zeros(PLACES, np.uint32)
        self._sums = np.zeros((PLACES, self._runs.shape[1]), np.float32)
        self._meant = np.zeros(PLACES, np.int32)

    @classmethod
    def load(cls, folder: Traversable | None = None) -> Classifier:
        """Read the artefact that ships with the package, or the one in ``folder``, and score once to warm it.

        Raises ``ArtifactMismatch`` when weights and manifest do not belong together.
        """
        folder = files("gateway") / "moderation" / "classifier" / "artifacts" if folder is None else folder
        model = cls(read_artifact(folder / WEIGHTS, folder / MANIFEST, FORMAT))
        model.score("Warm up, please.")
        return model

    def score(self, text: str, encode: Callable[[list[str]], Floats] | None = None) -> dict[str, float]:
        """Return the score of every category, 0..1: the highest that any window of the text has. ``encode``: the
        sentence encoder, where it reads them too."""
        said = readings(text)
        vectors = [None] * len(said) if encode is None else encode(said)
        read = [self.logits(window, read=vector, fully=True) for window, vector in zip(said, vectors, strict=True)]
        return scores_of(self.with_form(np.max(read, axis=0), visible(text), is_read=encode is not None))

    def with_form(self, logits: Floats, text: str, *, is_read: bool) -> Floats:
        """Return the logits of a text with what its form says: one that is near an attack or a request for harm is an
        attack where a passage of it is improbable. Of a text that is far from both nothing is worked out. ``is_read``:
        whether the encoder has read it."""
        near = float(max(logits[ATTACK], logits[HARM])) + (NEAR if is_read else NEAR_BY_WORDS)
        if near > 0 >= logits[ATTACK]:
            logits[ATTACK] = max(float(logits[ATTACK]), min(near, self._surprise.logit(text)))
        return logits

    def logits(self, window: str, *, read: Floats | None = None, fully: bool = False) -> Floats:
        """Return the logit of every head for one of a text's ``readings``: above 0 is a finding. ``read``: the vector
        that the encoder has for it, where there is one. Unless asked for ``fully``, a kind has the logit of "any" where
        that is none; it can have no higher one."""
        words = words_of(window)
        firsts, counts, which = each_once(words.keys)
        scales = self._scales.take(counts, axis=1)
        hashes, known, meant = self._known(words, firsts)
        hits, counts = read_words(hashes.take(which))
        sums, squares = self._scales.take(counts, axis=1).dot(self._words.take(hits, axis=0)).tolist()
        shorter = _shorter(squares, WORDS_AT_LEAST)
        attack, harm = shorter * sums[0], shorter * sums[1]
        sums, squares = scales.dot(known).tolist()
        shorter = _shorter(squares, RUNS_AT_LEAST)
        meanings = self._meaning.logits(meant, scales[0])
        said = (attack, harm, shorter * sums[0] + meanings[0])
        if read is None:
            found = list(map(add, self._bias, said))
        else:
            hidden = read.dot(self._read_in)
            hidden += self._read_hidden
            by_vector = np.maximum(hidden, 0, out=hidden).dot(self._read_out).tolist()
            found = list(map(sum, zip(self._read_bias, said, by_vector, strict=True)))
        is_any = found[ANY]
        kinds = [is_any] * len(KINDS)
        if is_any > 0 or fully:
            # "any" knows whether there is something, and the kinds, fitted on nothing but texts that break the policy,
            # what it is: the likeliest in any case, and every other that is likely of itself.
            likely = list(map(add, self._bias[ANY + 1 :], meanings[1:]))
            if len(firsts):
                of_runs = scales[0].dot(_sums_of(read_runs(words.take(firsts), hashes), self._kind_runs))
                likely = list(map(add, likely, (shorter * of_runs).tolist()))
            kinds = [min(is_any, kind) for kind in likely]
            kinds[likely.index(max(likely))] = is_any
        return np.array(found + kinds, np.float32)

    def _known(
        self, words: Words, firsts: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint32], Floats, npt.NDArray[np.int32]]:
        """Return what different words count as, what their runs come to for "any" (``_table``), and the places of
        their meanings."""
        keys = words.keys.take(firsts)
        places = (keys >> _TO_PLACE).astype(np.int64)
        hashes, sums, meant = self._hashes.take(places), self._sums.take(places, axis=0), self._meant.take(places)
        if len(fresh := (self._keys.take(places) != keys).nonzero()[0]):
            unheard = words.take(firsts.take(fresh))
            hashes[fresh] = theirs = hashes_of(unheard.said())
            sums[fresh] = heard = _sums_of(read_runs(unheard, theirs), self._runs)
            meant[fresh] = means = self._meaning.places_of(theirs)
            # Of two that have the same place the later one is remembered, and both are right here.
            at = places.take(fresh)
            self._keys[at], self._hashes[at], self._sums[at], self._meant[at] = unheard.keys, theirs, heard, means
        return hashes, sums, meant


def _sums_of(runs: Runs, table: Floats) -> Floats:
    """Return (words, columns): what the runs of each word come to in a ``_table``."""
    sums: Floats = np.add.reduceat(table.take(runs.buckets, axis=0).sum(axis=0), runs.starts, axis=0)
    return sums


def _table(idf: npt.NDArray, weights: npt.NDArray) -> Floats:
    """Return (buckets + 1, heads + 1): what a hit adds to each head and to the square of the reading's length. The last
    bucket is of what is no feature, and adds nothing."""
    scale = idf.astype(np.float32)[:, None]
    table = np.zeros((len(idf) + 1, weights.shape[1] + 1), np.float32)
    table[:-1, :-1] = weights.astype(np.float32) * scale
    table[:-1, -1:] = scale * scale
    return table


def _shorter(squares: list[float], at_least: float) -> float:
    """Return what a reading is multiplied by: 1 by its length, the square of which comes last in ``squares``."""
    return 1 / math.sqrt(at_least * at_least + squares[-1])


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
