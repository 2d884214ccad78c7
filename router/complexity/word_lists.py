# Words that tell what kind of prompt this is, by word_lists.toml; and how long words and numbers are. Words are bytes.

from __future__ import annotations

import tomllib
from importlib.resources import files

import numpy as np

_LISTS = tomllib.loads((files("router") / "complexity" / "word_lists.toml").read_text())
KINDS: dict[str, list[bytes]] = {kind: words.encode().split() for kind, words in _LISTS["kinds"].items()}
ENDINGS: dict[str, list[bytes]] = {kind: ends.encode().split() for kind, ends in _LISTS["endings"].items()}
# How long words are; and numbers, which are nothing else.
LENGTHS = {"long_words": 9, "longest_words": 13}  # characters at least
NUMBERS = {"numbers": 1, "long_numbers": 3}  # digits at least

NAMES = (*KINDS, *ENDINGS, *LENGTHS, *NUMBERS)
MOST_KNOWN = 20_000  # words that are remembered
LONGEST_KNOWN = 24  # bytes


class _Classes(dict[bytes, int]):
    """Words and which row of ``belongs`` says of what kinds they are; other words are classed as they come."""

    def __init__(self) -> None:
        self._ending = {end: (name,) for name, ends in ENDINGS.items() for end in ends}
        self._rows: dict[tuple[str, ...], int] = {}
        for word in dict.fromkeys(word for words in KINDS.values() for word in words):
            kinds = tuple(name for name, words in KINDS.items() if word in words)
            self[word] = self._row(word, kinds)
        for end in self._ending:
            for length in (3, *LENGTHS.values()):
                self._row(end.rjust(length), ())
        for length in NUMBERS.values():
            self._row(b"1" * length, ())
        for length in (1, *LENGTHS.values()):
            self._row(b" " * length, ())
        self.belongs = np.array([[float(name in kinds) for name in NAMES] for kinds in self._rows])

    def __missing__(self, word: bytes) -> int:
        row = self._row(word, ())
        if len(word) <= LONGEST_KNOWN and len(self) < MOST_KNOWN:
            self[word] = row
        return row

    def _row(self, word: bytes, kinds: tuple[str, ...]) -> int:
        if word.isdigit():
            kinds = tuple(name for name, least in NUMBERS.items() if len(word) >= least)
        else:
            kinds += self._ending.get(word[-3:], ())
            if len(word) >= 9:
                kinds += tuple(name for name, least in LENGTHS.items() if len(word) >= least)
        return self._rows.setdefault(kinds, len(self._rows))


_CLASSES = _Classes()
_class_of = _CLASSES.__getitem__
KINDS_OF_CLASS = _CLASSES.belongs  # (classes, names), 1 where the words of a class are of a kind


def classes_of(words: list[bytes]) -> bytes:
    """Return the class of each word, in a byte."""
    return bytes(map(_class_of, words))
