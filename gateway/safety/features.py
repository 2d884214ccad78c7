# What the classifiers read of a text: its words with pairs and triples of them, and the runs of two to five bytes in
# each word, hashed into buckets. The same code serves requests and prepares the training data: both see the same.

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

LONGEST = 2000  # characters of one window; a longer text is read in several
PASSAGE = 400  # characters, of which the next passage has half
BITS = 17
BUCKETS = 1 << BITS  # of words, pairs and triples
RUN_BITS = 17
RUN_BUCKETS = 1 << RUN_BITS
RUNS = (2, 3, 4, 5)  # bytes
NO_RUN = RUN_BUCKETS  # the bucket of what is no run

# A reading is a vector of TF-IDF divided by its length, and this is added to the length (as at a right angle): of a few
# words nothing is certain, so a short text stays near the bias.
WORDS_AT_LEAST = 25.0
RUNS_AT_LEAST = 25.0

# Over lower-case UTF-8: words (bytes of other scripts count as letters), numbers, and signs one by one. A word is cut
# where it is longer than any language's.
_WORD = re.compile(rb"[a-z\x80-\xff]{1,40}|[0-9]{1,40}|[^\sa-z0-9\x80-\xff]")
# Arrays of one number, which numpy takes faster than numbers.
_NEXT = np.array(2654435761, np.uint32)  # Knuth's multiplicative hash: the order of words matters
_MIX = np.array(0x9E3779B1, np.uint32)
_FNV = np.array(16777619, np.uint32)
_TO_BUCKET = np.array(32 - BITS, np.uint32)
_SHIFT = np.array(15, np.uint32)
_TO_RUN_BUCKET = np.array(32 - RUN_BITS, np.uint32)
_SIZES = np.array(RUNS, np.uint32)[:, None]
_NOTHING = np.array([], np.uint32)
_FIRST, _LAST = np.array([-1], np.int32).view(np.uint32), np.array([(1 << 31) - 1], np.uint32)  # as signed numbers
_SPACE = 32


class Reading(NamedTuple):
    """The words, pairs and triples of one window."""

    buckets: npt.NDArray[np.int32]  # (hit buckets,), rising, each once
    counts: npt.NDArray[np.int64]  # (hit buckets,), how often each was hit


class Runs(NamedTuple):
    """The runs of bytes in some words, a space before and after each; each word as a whole is one of its runs."""

    buckets: npt.NDArray[np.uint32]  # (sizes + 1, places): of the run that begins there, or NO_RUN
    starts: npt.NDArray[np.int64]  # (words,): the place where each word begins


def words_of(text: str) -> list[bytes]:
    """Return the words of a plain, lower-case text of at most ``LONGEST`` characters, in order."""
    return words_in(text.encode("utf-8", "replace"))


def words_in(data: bytes) -> list[bytes]:
    """Return the words of a plain, lower-case text in UTF-8, in order. Space parts them as it does for bytes.split."""
    return _WORD.findall(data)


def hashes_of(words: Sequence[bytes]) -> npt.NDArray[np.uint32]:
    """Return what the words are told apart by."""
    return np.fromiter(map(crc32, words), np.uint32, len(words))


def read_words(singles: npt.NDArray[np.uint32], others: npt.NDArray[np.uint32] = _NOTHING) -> Reading:
    """Return the words of a window, by their hashes, and the pairs and triples of neighbours among them; and how often
    each of ``others`` comes, numbers from ``BUCKETS`` on, counted in the same go."""
    pairs = singles[:-1] * _NEXT
    pairs ^= singles[1:]
    triples = pairs[:-1] * _NEXT
    triples ^= singles[2:]
    hits = np.concatenate((_FIRST, singles, pairs, triples, others, _LAST))
    words = hits[1 : len(hits) - 1 - len(others)]
    words *= _MIX
    words >>= _TO_BUCKET
    # As numpy.unique does, without its fixed costs: what stands first and last has no number beside it like itself.
    found = hits.view(np.int32)
    found.sort()
    ends = (found[1:] != found[:-1]).nonzero()[0]
    return Reading(found.take(ends[1:]), ends[1:] - ends[:-1])


def read_runs(words: Sequence[bytes]) -> Runs:
    """Return the runs of bytes inside each of ``words``, all words at once."""
    data = np.frombuffer(b" %b %b" % (b" ".join(words), b" " * max(RUNS)), np.uint8).astype(np.uint32)
    is_space = data == _SPACE
    places = len(data) - max(RUNS) + 1
    starts = np.flatnonzero(is_space)[: len(words)]
    buckets = np.empty((len(RUNS) + 1, places), np.uint32)
    is_none = np.empty((len(RUNS), places), np.bool_)
    runs, has_space = data, is_space[:-1] & is_space[1:]  # between two words
    for row, size in enumerate(RUNS):
        runs = runs[:-1] * _FNV
        runs ^= data[size - 1 :]
        buckets[row] = runs[:places]
        if row:  # no space inside
            has_space = has_space[:-1] | is_space[size - 2 : -1]
        is_none[row] = has_space[:places]
    inside = buckets[:-1]
    inside ^= _SIZES
    _to_buckets(inside)
    inside[is_none] = NO_RUN
    buckets[-1] = NO_RUN
    buckets[-1, starts] = _to_buckets(hashes_of(words))
    return Runs(buckets, starts)


def windows(text: str) -> list[str]:
    """Cut a text into windows of at most ``LONGEST`` characters, each overlapping the next by a quarter."""
    if len(text) <= LONGEST:
        return [text]
    step = LONGEST * 3 // 4
    return [text[start : start + LONGEST] for start in range(0, len(text) - LONGEST // 4, step)]


def passages(text: str) -> list[str]:
    """Cut a text into passages of ``PASSAGE`` characters, each overlapping the next by half."""
    step = PASSAGE // 2
    return [text[start : start + PASSAGE] for start in range(0, max(1, len(text) - step), step)]


def _to_buckets(hashes: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    hashes *= _MIX
    hashes ^= hashes >> _SHIFT
    hashes *= _NEXT
    hashes >>= _TO_RUN_BUCKET
    return hashes
