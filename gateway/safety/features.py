# What the classifiers read of a text: its words, and pairs and triples of them, and its runs of three to five bytes,
# hashed into buckets. The same code serves requests and prepares the training data, so that both see the same.

from __future__ import annotations

import re
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

LONGEST = 2000  # characters of one window; a longer text is read in several
BITS = 17
BUCKETS = 1 << BITS  # of words
RUN_BITS = 18
RUN_BUCKETS = 1 << RUN_BITS
RUNS = (3, 5)  # bytes: the shortest and the longest

# A reading is a vector of TF-IDF divided by its length, and this is added to the length (as at a right angle): of a few
# words nothing is certain, so a short text stays near the bias.
WORDS_AT_LEAST = 25.0
RUNS_AT_LEAST = 40.0

# Over lower-case UTF-8: words (bytes of other scripts count as letters), numbers, and signs one by one.
_WORD = re.compile(rb"[a-z\x80-\xff]+|[0-9]+|[^\sa-z0-9\x80-\xff]")
_NEXT = np.uint32(2654435761)  # Knuth's multiplicative hash: the order of words matters
_MIX = np.uint32(0x9E3779B1)
_FNV = np.uint32(16777619)


class Reading(NamedTuple):
    """What one window looks like to the classifiers."""

    buckets: npt.NDArray[np.uint32]  # (hit buckets,), rising, each once
    counts: npt.NDArray[np.int64]  # (hit buckets,), how often each was hit


def read_words(text: str) -> Reading:
    """Return the words of a plain, lower-case text of at most ``LONGEST`` characters, with single spaces."""
    data = text.encode("utf-8", "replace")
    words = _WORD.findall(data)
    singles = np.fromiter(map(crc32, words), np.uint32, len(words))
    pairs = singles[:-1] * _NEXT ^ singles[1:]
    triples = pairs[:-1] * _NEXT ^ singles[2:]
    hits = np.concatenate((singles, pairs, triples))
    hits *= _MIX
    hits >>= np.uint32(32 - BITS)
    return Reading(*_counted(hits))


def read_runs(text: str) -> Reading:
    """Return the runs of bytes of the same, with a space before and after it."""
    data = np.frombuffer(b" %b " % text.encode("utf-8", "replace"), np.uint8).astype(np.uint32)
    shortest, longest = RUNS
    found: list[npt.NDArray[np.uint32]] = []
    runs = data
    for size in range(2, min(longest, len(data)) + 1):
        runs = runs[:-1] * _FNV
        runs ^= data[size - 1 :]
        if size >= shortest:
            found.append(runs ^ np.uint32(size))
    hits = np.concatenate(found or [data[:0]])
    hits *= _MIX
    hits ^= hits >> np.uint32(15)
    hits *= _NEXT
    hits >>= np.uint32(32 - RUN_BITS)
    return Reading(*_counted(hits))


def windows(text: str) -> list[str]:
    """Cut a text into windows of at most ``LONGEST`` characters, each overlapping the next by a quarter."""
    if len(text) <= LONGEST:
        return [text]
    step = LONGEST * 3 // 4
    return [text[start : start + LONGEST] for start in range(0, len(text) - LONGEST // 4, step)]


def _counted(hits: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    # What numpy.unique does, without its fixed costs.
    hits.sort()
    is_first = np.empty(len(hits) + 1, np.bool_)
    is_first[:1] = is_first[-1:] = True
    np.not_equal(hits[1:], hits[:-1], out=is_first[1:-1])
    edges = is_first.nonzero()[0]
    return hits[edges[:-1]], edges[1:] - edges[:-1]
