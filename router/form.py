# The form of a prompt in numbers: what it is made of and how it is laid out, whatever it speaks of. Shares rather than
# counts, so that they carry over to any length. Made of few steps that each run in C, for every request waits for it.

from __future__ import annotations

import re
from math import log, log1p, sqrt
from string import ascii_lowercase, ascii_uppercase, digits, whitespace

import numpy as np
import numpy.typing as npt

from router import lexicon

FORM_LIMIT = 4.0  # standard deviations: beyond, a number says no more, so that odd texts get no absurd scores

_FOREIGN = bytes(range(128, 256))  # bytes of UTF-8 beyond ASCII; they count as letters
# In lower case, whatever is neither letter nor digit parts words.
_WORDS = bytes(byte if byte in (ascii_lowercase + digits).encode() + _FOREIGN else 32 for byte in range(256))
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
    words, characters = lexicon.KINDS_OF_CLASS, np.array(classes)
    kinds = np.zeros((len(words) + len(characters), len(_CHARACTERS) + len(lexicon.NAMES)))
    kinds[: len(words), len(_CHARACTERS) :] = words
    kinds[len(words) :, : len(_CHARACTERS)] = characters
    return bytes(len(words) + classes.index(kinds) for kinds in kinds_of_byte), kinds


_CLASS_OF_BYTE, _KINDS_OF_CLASS = _classes()

FORM_NAMES = (
    *_CHARACTERS,
    *lexicon.NAMES,
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
    "numerals",
    "code_marks",
    "question_marks",
    "ends_with_question",
    "ends_with_full_stop",
    "ends_with_colon",
    "how_many",
    "which_of",
    "of_the_above",
    "options",
    "option_length",
    "option_spread",
    "option_digits",
    "log_stem",
)
LENGTH = FORM_NAMES.index("log_characters")
_OF_CHARACTERS = len(_CHARACTERS)  # the first of these, before those of words
_OF_LAYOUT = _OF_CHARACTERS + len(lexicon.NAMES)  # where those of the layout begin
_NUMBERS = _OF_CHARACTERS + lexicon.NAMES.index("numbers")


def words_of(lower: bytes) -> list[bytes]:
    """Return the words and numbers of a lower-case text, in order."""
    return lower.translate(_WORDS).split()


def form_of(data: bytes, lower: bytes, words: list[bytes]) -> npt.NDArray[np.float64]:
    """Return the numbers of ``FORM_NAMES`` for a text, the same in lower case, and its words."""
    size, count = len(data) or 1, len(words) or 1
    classes = np.frombuffer(lexicon.classes_of(words) + data.translate(_CLASS_OF_BYTE), np.uint8)
    kinds = np.bincount(classes, minlength=len(_KINDS_OF_CLASS)).dot(_KINDS_OF_CLASS)
    lines = data.count(b"\n") + 1
    form = np.empty(len(FORM_NAMES))
    np.divide(kinds[:_OF_CHARACTERS], size, form[:_OF_CHARACTERS])
    np.divide(kinds[_OF_CHARACTERS:], count, form[_OF_CHARACTERS:_OF_LAYOUT])
    form[_OF_LAYOUT:] = _layout(data, lower, words, size, count, lines, kinds[_NUMBERS]) + _options(lower, size, lines)
    return form


def _layout(
    data: bytes, lower: bytes, words: list[bytes], size: int, count: int, lines: int, numbers: float
) -> tuple[float, ...]:
    shape = data.translate(_SHAPES)
    found, shaped = data.count, shape.count
    sentences = shaped(b". ") + shape.endswith(b".")
    end = data.rstrip()[-1:]
    return (
        log(size),
        log(count),
        log1p(numbers),
        shaped(b"0.0") / count,
        shaped(b"0/0") / count,
        len(set(words)) / count,
        log(count / (sentences or 1)),
        log1p(sentences),
        log(lines),
        log(size / lines),
        shaped(b"a A") / count,
        found(b" II") / count,
        (found(b"def ") + found(b"return") + found(b"```") + found(b"();") + found(b"import ")) / lines,
        min(3, found(b"?")),
        end == b"?",
        end == b".",
        end == b":",
        b"how many" in lower or b"how much" in lower,
        b"which of" in lower,
        b"of the above" in lower or b"none of" in lower,
    )


def _options(lower: bytes, size: int, lines: int) -> tuple[float, ...]:
    """Return how many answers the text offers, how long they are and how unlike, and the length of what is asked."""
    options = _OPTION.findall(lower) if lines > 1 else ()
    if not options:
        return (0.0, 0.0, 0.0, 0.0, log(size))
    lengths = list(map(len, options))
    total = sum(lengths)
    mean = total / len(lengths)
    spread = sqrt(sum((length - mean) ** 2 for length in lengths) / len(lengths))
    digits = sum(len(option) - len(option.translate(None, b"0123456789")) for option in options)
    return (
        min(10, len(options)),
        log1p(mean),
        log1p(spread),
        digits / (total or 1),
        log(max(1, size - total)),
    )
