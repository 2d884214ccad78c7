# A prompt in numbers: what it is made of and how it is laid out, whatever it speaks of. So many to a word
# rather than counts, so that they carry over to any length. Few steps, each in C: every request waits for it.

from __future__ import annotations

import re
from math import log, log1p, sqrt
from string import ascii_lowercase, ascii_uppercase, digits, whitespace

import numpy as np
import numpy.typing as npt

from router.complexity import word_lists

# A text is read as bytes, so that a script or a keyboard changes little: typographic marks become plain ones, a letter
# of another alphabet is about a byte, as a Latin one is, and Chinese and Japanese have words.
_MARKS = (
    ("‘’‚‛´′", "'"),
    ("“”„«»″", '"'),
    ("‐‑‒–—−", "-"),
    ("…", "..."),
    ("\u00a0\u2009\u202f\u3000", " "),
    ("。．", ". "),
    ("，、", ", "),
    ("？؟", "?"),
    ("！", "!"),
    ("：", ":"),
    ("；", ";"),
    ("（", "("),
    ("）", ")"),
)
_REPLACED = tuple((mark, plain) for marks, plain in _MARKS for mark in marks)
# First bytes in UTF-8 of letters beyond ASCII: of two bytes (Latin with accents, Greek, Cyrillic, Arabic) or of three
# (Devanagari, Hangul). Without them a letter counts about as much as a Latin one.
_FIRST = bytes((*range(0xC2, 0xE1), *range(0xEA, 0xF5)))
# First bytes of Chinese characters. Each is taken for a word, as it says about as much as a short one; kana go with the
# one before them, as its endings.
WORD_MARKS = bytes(range(0xE4, 0xEA))

_FOREIGN = bytes(range(128, 256))  # bytes of UTF-8 beyond ASCII; they count as letters
# In lower case, whatever is neither letter nor digit parts words.
_LETTERS = set((ascii_lowercase + digits).encode() + _FOREIGN).difference(WORD_MARKS)
_WORDS = bytes(byte if byte in _LETTERS else 32 for byte in range(256))
# Every expression here takes time in proportion to the text: none can begin at one place and fail at many.
_OPTION = re.compile(rb"\n[ \t]{0,8}\(?[a-j][.):]([^\n]*)")


def _shapes() -> bytes:
    """Return a table that writes "a", "A", "0", " " and "." for small letters, capitals, digits, spaces and stops."""
    kinds = {"a": ascii_lowercase + ",;", "A": ascii_uppercase, "0": digits, " ": whitespace, ".": "!?"}
    table = list(range(256))
    for kind, members in kinds.items():
        for member in members:
            table[ord(member)] = ord(kind)
    return bytes(table)


_SHAPES = _shapes()

# Kinds of characters, as columns of a table that is indexed by byte.
_CHARACTERS = {
    "digits": b"0123456789",
    "capitals": b"ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "punctuation": b";-",
    "commas": b",",
    "colons": b":",
    "math_signs": b"=+*/^<>$%",
    "money": b"$",
    "percents": b"%",
    "brackets": b"()[]{}",
    "bars": b"|",
    "underscores": b"_",
    "backslashes": b"\\",
    "quotes": b"\"'",
    "foreign": _FOREIGN,
}


def _classes() -> tuple[bytes, npt.NDArray[np.float64]]:
    """Return a table that writes each byte as its class, above those of words, and the kinds of all classes.

    The kinds (classes, kinds of characters and of words) are counted in one step for both.
    """
    kinds_of_byte = [tuple(float(byte in kind) for kind in _CHARACTERS.values()) for byte in range(256)]
    classes = list(dict.fromkeys(kinds_of_byte))
    words, characters = word_lists.KINDS_OF_CLASS, np.array(classes)
    kinds = np.zeros((len(words) + len(characters), len(_CHARACTERS) + len(word_lists.NAMES)))
    kinds[: len(words), len(_CHARACTERS) :] = words
    kinds[len(words) :, : len(_CHARACTERS)] = characters
    return bytes(len(words) + classes.index(kinds) for kinds in kinds_of_byte), kinds


_CLASS_OF_BYTE, _KINDS_OF_CLASS = _classes()

STATS_NAMES = (
    *_CHARACTERS,
    *word_lists.NAMES,
    "log_characters",
    "log_words",
    "log_numbers",
    "decimals",
    "fractions",
    "distinct_words",
    "sentence_length",
    "log_sentences",
    "log_lines",
    "line_length",
    "names",
    "question_marks",
    "ends_with_question",
    "ends_with_full_stop",
    "ends_with_colon",
    "how_many",
    "which_of",
    "numerals",
    "code_marks",
    "of_the_above",
    "options",
    "option_length",
    "option_spread",
    "option_digits",
    "log_stem",
)
_OF_LAYOUT = STATS_NAMES.index("log_characters")  # before it: kinds of characters and of words
_NUMBERS = STATS_NAMES.index("numbers")


def plain_bytes(text: str) -> bytes:
    """Return a text as the model reads it, without white space around it. ASCII stays as it is, but for line ends."""
    text = text.strip().replace("\r\n", "\n")
    if text.isascii():
        return text.encode()
    for mark, plain in _REPLACED:
        text = text.replace(mark, plain)
    return text.encode("utf-8", "replace").translate(None, _FIRST)


def words_of(lower: bytes) -> list[bytes]:
    """Return the words and numbers of a lower-case text, in order."""
    return lower.translate(_WORDS).split()


def stats_of(data: bytes, lower: bytes, words: list[bytes]) -> npt.NDArray[np.float64]:
    """Return the numbers of ``STATS_NAMES`` for a text, the same in lower case, and its words."""
    count = len(words) or 1
    classes = np.frombuffer(word_lists.classes_of(words) + data.translate(_CLASS_OF_BYTE), np.uint8)
    kinds = np.bincount(classes, minlength=len(_KINDS_OF_CLASS)).dot(_KINDS_OF_CLASS)
    stats = np.empty(len(STATS_NAMES))
    np.divide(kinds, count, stats[:_OF_LAYOUT])
    stats[_OF_LAYOUT:] = _layout(data, lower, len(data) or 1, len(set(words)), count, kinds[_NUMBERS])
    return stats


def _layout(data: bytes, lower: bytes, size: int, distinct: int, count: int, numbers: float) -> tuple[float, ...]:
    shape = data.translate(_SHAPES)
    shaped = shape.count
    sentences = shaped(b". ") + shape.endswith(b".")
    end = data.rstrip()[-1:]
    lines = data.count(b"\n") + 1
    return (
        log(size),
        log(count),
        log1p(numbers),
        shaped(b"0.0") / count if numbers else 0.0,
        shaped(b"0/0") / count if numbers else 0.0,
        distinct / count,
        log(count / (sentences or 1)),
        log1p(sentences),
        log(lines),
        log(size / lines),
        shaped(b"a A") / count,
        min(3, data.count(b"?")),
        end == b"?",
        end == b".",
        end == b":",
        b"how many" in lower or b"how much" in lower,
        b"which of" in lower,
        *(_parts(data, lower, size, lines, count) if lines > 1 else (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, log(size))),
    )


def _parts(data: bytes, lower: bytes, size: int, lines: int, count: int) -> tuple[float, ...]:
    """Return what only a text of several lines has: statements, code, answers to choose from, and the question."""
    found = data.count
    code = found(b"def ") + found(b"return") + found(b"```") + found(b"();") + found(b"import ")
    parts = found(b" II") / count, code / lines, b"of the above" in lower or b"none of" in lower
    options = _OPTION.findall(lower)
    if not options:
        return (*parts, 0.0, 0.0, 0.0, 0.0, log(size))
    lengths = list(map(len, options))
    total = sum(lengths)
    mean = total / len(lengths)
    spread = sqrt(sum((length - mean) ** 2 for length in lengths) / len(lengths))
    digits = sum(len(option) - len(option.translate(None, b"0123456789")) for option in options)
    return (
        *parts,
        min(10, len(options)),
        log1p(mean),
        log1p(spread),
        digits / (total or 1),
        log(max(1, size - total)),
    )
