# What the classifiers read of the windows of many texts, counted once for all the models that are fitted on them.

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from scipy.sparse import csr_matrix, vstack  # type: ignore[import-untyped]

from gateway.moderation.classifier.classifier import readings
from gateway.moderation.classifier.features import (
    BUCKETS,
    NO_RUN,
    RUN_BUCKETS,
    hashes_of,
    joined,
    read_runs,
    read_words,
    words_of,
)


class Windows(Struct, frozen=True):
    """The windows of some texts, in order."""

    texts: int
    owner: npt.NDArray[np.int64]  # (windows,): whose each is
    words: csr_matrix  # (windows, buckets): counts of words, pairs and triples
    vocabulary: list[bytes]  # every word
    lexis: csr_matrix  # (windows, vocabulary): counts of words
    runs: csr_matrix  # (vocabulary, run buckets): counts of the runs in each word

    def take(self, texts: npt.NDArray[np.int64]) -> Windows:
        """Return the windows of these texts alone; their numbers rise."""
        kept = np.flatnonzero(np.isin(self.owner, texts))
        owner = np.searchsorted(texts, self.owner[kept])
        return Windows(len(texts), owner, self.words[kept], self.vocabulary, self.lexis[kept], self.runs)

    def first(self, most: int) -> Windows:
        """Return the first windows of each text, at most ``most`` of each."""
        place = np.arange(len(self.owner)) - np.searchsorted(self.owner, self.owner)
        kept = np.flatnonzero(place < most)
        return Windows(self.texts, self.owner[kept], self.words[kept], self.vocabulary, self.lexis[kept], self.runs)


def windows_of(texts: list[str]) -> Windows:
    """Read all windows of texts."""
    found = [readings(text) for text in texts]
    windows = [words_of(window).said() for some in found for window in some]
    owner = np.repeat(np.arange(len(texts)), list(map(len, found)))
    hits = [read_words(hashes_of(words)) for words in windows]
    words = _rows([reading.buckets for reading in hits], [reading.counts for reading in hits], BUCKETS)
    vocabulary: dict[bytes, int] = {}
    spoken = [Counter(vocabulary.setdefault(word, len(vocabulary)) for word in said) for said in windows]
    columns = [np.array(list(counts), np.int64) for counts in spoken]
    lexis = _rows(columns, [np.array(list(counts.values()), np.int64) for counts in spoken], len(vocabulary))
    return Windows(len(texts), owner, words, list(vocabulary), lexis, _runs_of(list(vocabulary)))


def _runs_of(vocabulary: list[bytes]) -> csr_matrix:
    """Return (vocabulary, run buckets): how often each run comes in each word."""
    found = []
    for words in joined(vocabulary):
        runs = read_runs(words, hashes_of(words.said()))
        _, places = np.nonzero(runs.buckets != NO_RUN)
        owner = np.searchsorted(runs.starts, places, side="right") - 1
        hit = runs.buckets[runs.buckets != NO_RUN]
        found.append(csr_matrix((np.ones(len(owner)), (owner, hit)), shape=(len(words.starts), RUN_BUCKETS)))
    return vstack(found, format="csr")


def _rows(columns: list[npt.NDArray], counts: list[npt.NDArray], width: int) -> csr_matrix:
    starts = np.cumsum([0, *map(len, columns)])
    data = np.concatenate(counts).astype(np.float64)
    return csr_matrix((data, np.concatenate(columns), starts), shape=(len(columns), width))
