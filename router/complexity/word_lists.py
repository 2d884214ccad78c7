# Words whose share of a prompt says something of its kind rather than of its subject: they carry over to unseen
# subjects. Lower case, as bytes; a word may be of several kinds.

from __future__ import annotations

import numpy as np

KINDS = {
    "negations": b"not except never least incorrect false without cannot neither nor no none",
    "conditions": b"if suppose assume assuming given let then unless whether",
    "comparisons": b"more less than each every per total times twice half most greater fewer equal remaining left",
    "tasks": b"calculate compute find solve prove determine evaluate derive simplify approximately value",
    "writing": b"write create generate implement function program code python list string sentence array return",
    "explaining": b"explain describe compare discuss summarize why reason because therefore thus",
    "facts": b"who when where whose name named called known first",
    "amounts": b"many much far long old",
    "questions": b"what which how why who when where",
    "references": b"following above below statement statements passage according refers refer best",
    "people": b"he she his her him they their man woman defendant plaintiff mr mrs boy girl son daughter",
    "speakers": b"i my me you your we our us",
    "grammar": b"the of and to in a is that for as by with on are it was from at an be or",
    "modals": b"can could would should may might must will likely probably usually often always",
}

# The last three letters of words: nouns made of other words, adjectives, and the forms of verbs.
ENDINGS = {
    "abstract_nouns": b"ion ity ism ess ent nce ogy ies",
    "adjectives": b"ous ive cal nal ial ble ary tic",
    "past_forms": b"ted ned red sed ied ked ded led ged ced ved ped med hed",
    "ing_forms": b"ing",
}


# How long words are; and numbers, which are nothing else.
LENGTHS = {"long_words": 9, "longest_words": 13}  # characters at least
NUMBERS = {"numbers": 1, "long_numbers": 3}  # digits at least

NAMES = (*KINDS, *ENDINGS, *LENGTHS, *NUMBERS)
MOST_KNOWN = 20_000  # words that are remembered
LONGEST_KNOWN = 24  # bytes


class _Classes(dict[bytes, int]):
    """Words and which row of ``belongs`` says of what kinds they are; other words are classed as they come."""

    def __init__(self) -> None:
        self._ending = {end: (name,) for name, ends in ENDINGS.items() for end in ends.split()}
        self._rows: dict[tuple[str, ...], int] = {}
        for word in dict.fromkeys(word for words in KINDS.values() for word in words.split()):
            kinds = tuple(name for name, words in KINDS.items() if word in words.split())
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
