# What the classifiers read of a text: its words with pairs and triples of them, and the runs of two to five bytes in
# each word, hashed into buckets. The same code serves requests and prepares the training data: both see the same.
#
# Words are found, and told apart, all at once: a word's key is a difference of sums over all bytes before it, so a text
# costs a fixed number of calls of numpy, whatever its words.

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
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
LONGEST_WORD = 40  # bytes: longer than any language's, and cut there
MOST_BYTES = 1 << 15  # that are read in one go: a passage in which every letter is many, undone, has fewer

# A reading is a vector of TF-IDF divided by its length, and this is added to the length (as at a right angle): of a few
# words nothing is certain, so a short text stays near the bias.
WORDS_AT_LEAST = 25.0
RUNS_AT_LEAST = 25.0

# Words are of lower-case letters (bytes of other scripts count as such) or of digits; each sign is one by itself.
_WORD = re.compile(rb"[a-z\x80-\xff]{1,40}|[0-9]{1,40}|[^\sa-z0-9\x80-\xff]")
_SPACE, _LETTER, _DIGIT, _SIGN = range(4)
_KINDS = np.full(256, _SIGN, np.uint8)
_KINDS[list(b" \t\n\r\f\v")] = _SPACE
_KINDS[[*range(ord("a"), ord("z") + 1), *range(128, 256)]] = _LETTER
_KINDS[list(b"0123456789")] = _DIGIT

# A word's key is the sum of its bytes, each times a power by its place, modulo 2 ** 64, of a base that only this
# process knows.
_BASE = secrets.randbits(64) | 1  # odd: it has an inverse


def _powers(base: int) -> npt.NDArray[np.uint64]:
    powers = np.full(MOST_BYTES, base, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


_POWERS, _BACK = _powers(_BASE), _powers(pow(_BASE, -1, 1 << 64))

# Arrays of one number, which numpy takes faster than numbers.
_NEXT = np.array(2654435761, np.uint32)  # Knuth's multiplicative hash: the order of words matters
_MIX = np.array(0x9E3779B1, np.uint32)
_FNV = np.array(16777619, np.uint32)
_TO_BUCKET = np.array(32 - BITS, np.uint32)
_SHIFT = np.array(15, np.uint32)
_TO_RUN_BUCKET = np.array(32 - RUN_BITS, np.uint32)
_SIZES = np.array(RUNS, np.uint32)[:, None]
_BLANK = ord(" ")
_FIRST, _LAST = np.array([-1], np.int32).view(np.uint32), np.array([(1 << 31) - 1], np.uint32)  # as signed numbers


class Words(NamedTuple):
    """The words of one window, in order."""

    data: npt.NDArray[np.uint8]  # the window in UTF-8, a space before and after it
    starts: npt.NDArray[np.int64]  # (words,): where each begins
    ends: npt.NDArray[np.int64]  # (words,): and where it has ended
    keys: npt.NDArray[np.uint64]  # (words,): what tells them apart, in this process alone; two alike cannot be guessed

    def take(self, places: npt.NDArray[np.int64]) -> Words:
        """Return some of the words."""
        return Words(self.data, self.starts.take(places), self.ends.take(places), self.keys.take(places))

    def said(self) -> list[bytes]:
        """Return the words themselves."""
        data = self.data.tobytes()
        return [data[start:end] for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True)]


class Different(NamedTuple):
    """The different words of a window."""

    firsts: npt.NDArray[np.int64]  # (different words,): where each stands once
    counts: npt.NDArray[np.int64]  # (different words,): how often each comes
    which: npt.NDArray[np.int64]  # (words,): the place of each word of the window in these


class Reading(NamedTuple):
    """The words, pairs and triples of one window."""

    buckets: npt.NDArray[np.int32]  # (hit buckets,), rising, each once
    counts: npt.NDArray[np.int64]  # (hit buckets,), how often each was hit


class Runs(NamedTuple):
    """The runs of bytes in some words, a space before and after each; each word as a whole is one of its runs."""

    buckets: npt.NDArray[np.uint32]  # (sizes + 1, places): of the run that begins there, or NO_RUN
    starts: npt.NDArray[np.int64]  # (words,): the place where each word begins


def words_of(text: str) -> Words:
    """Return the words of a plain, lower-case text of at most ``MOST_BYTES`` less two in UTF-8."""
    data = np.frombuffer(b" %b " % text.encode("utf-8", "replace"), np.uint8)
    kinds = _KINDS.take(data)
    is_edge = kinds[1:] != kinds[:-1]
    is_edge |= kinds[1:] == _SIGN
    edges = is_edge.nonzero()[0]
    edges += 1
    spoken = kinds.take(edges).nonzero()[0]  # the last of all edges is the space after the text, and a word's end
    starts, ends = edges.take(spoken), edges.take(spoken + 1)
    if len(data) > LONGEST_WORD and (ends - starts).max(initial=0) > LONGEST_WORD:
        starts, ends = _cut(starts, ends)
    return Words(data, starts, ends, _keys_of(data, starts, ends))


def joined(words: Sequence[bytes]) -> Iterator[Words]:
    """Yield any number of words, as many at a time as can be read in one go."""
    at_once = MOST_BYTES // (LONGEST_WORD + 1) - 1
    for start in range(0, len(words), at_once):
        some = words[start : start + at_once]
        data = np.frombuffer(b" %b " % b" ".join(some), np.uint8)
        ends = (np.fromiter(map(len, some), np.int64, len(some)) + 1).cumsum()
        starts = np.append(1, ends[:-1] + 1)
        yield Words(data, starts, ends, _keys_of(data, starts, ends))


def is_word(word: bytes) -> bool:
    """Whether bytes are one word."""
    return _WORD.fullmatch(word) is not None


def hashes_of(words: Sequence[bytes]) -> npt.NDArray[np.uint32]:
    """Return what words count as."""
    return np.fromiter(map(crc32, words), np.uint32, len(words))


def read_words(singles: npt.NDArray[np.uint32]) -> Reading:
    """Return the words of a window, by their hashes, and the pairs and triples of neighbours among them."""
    pairs = singles[:-1] * _NEXT
    pairs ^= singles[1:]
    triples = pairs[:-1] * _NEXT
    triples ^= singles[2:]
    hits = np.concatenate((_FIRST, singles, pairs, triples, _LAST))
    words = hits[1:-1]
    words *= _MIX
    words >>= _TO_BUCKET
    # As numpy.unique does, without its fixed costs: what stands first and last has no number beside it like itself.
    found = hits.view(np.int32)
    found.sort()
    ends = (found[1:] != found[:-1]).nonzero()[0]
    return Reading(found.take(ends[1:]), ends[1:] - ends[:-1])


def each_once(keys: npt.NDArray[np.uint64]) -> Different:
    """Return which different ``keys`` there are."""
    order = keys.argsort()
    said = keys.take(order)
    is_last = np.ones(len(said), np.bool_)
    np.not_equal(said[1:], said[:-1], out=is_last[:-1])
    ends = is_last.nonzero()[0]
    counts = ends + 1
    counts[1:] -= counts[:-1].copy()
    which = np.empty_like(order)
    which[order] = np.arange(len(ends)).repeat(counts)
    return Different(order.take(ends), counts, which)


def read_runs(words: Words, hashes: npt.NDArray[np.uint32]) -> Runs:
    """Return the runs of bytes inside each of ``words``, of which there is at least one; ``hashes``: theirs."""
    sizes = words.ends - words.starts
    sizes += 1  # the space after it
    ends = np.add.accumulate(sizes)
    starts = ends - sizes
    places = int(ends[-1])
    data = np.full(places + max(RUNS), _BLANK, np.uint32)  # a space before all words, and some after them
    data[1 : places + 1] = words.data.take(np.arange(places) + (words.starts - starts).repeat(sizes))
    data[ends] = _BLANK
    spaces = np.add.accumulate(data == _BLANK, dtype=np.uint32)
    buckets = np.empty((len(RUNS) + 1, places), np.uint32)
    inside = buckets[:-1]
    said = data[:places]
    for row, size in enumerate(RUNS):
        said = np.multiply(said, _FNV, out=inside[row])
        said ^= data[size - 1 : size - 1 + places]
    inside ^= _SIZES
    _to_buckets(inside)
    # Up to the last sign but one of a run, and after its first, is no space.
    last = np.ndarray((len(RUNS), places), np.uint32, spaces, strides=(4, 4))
    np.putmask(inside, last != spaces[:places], NO_RUN)
    buckets[-1] = NO_RUN
    buckets[-1, starts] = _to_buckets(hashes.copy())
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


def _cut(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> tuple[npt.NDArray, npt.NDArray]:
    """Cut words that are longer than ``LONGEST_WORD``."""
    parts = (ends - starts - 1) // LONGEST_WORD + 1
    number = np.arange(parts.sum()) - (parts.cumsum() - parts).repeat(parts)  # of a part in its word
    starts = starts.repeat(parts) + LONGEST_WORD * number
    return starts, np.minimum(starts + LONGEST_WORD, ends.repeat(parts))


def _keys_of(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    sums = np.add.accumulate(data * _POWERS[: len(data)])
    before = starts - 1
    keys: npt.NDArray[np.uint64] = sums.take(ends - 1) - sums.take(before)
    keys *= _BACK.take(before)  # so that the first byte counts times the base: a place shows in the upper bits
    return keys


def _to_buckets(hashes: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    hashes *= _MIX
    hashes ^= hashes >> _SHIFT
    hashes *= _NEXT
    hashes >>= _TO_RUN_BUCKET
    return hashes
