# The form of a prompt in numbers: what it is made of and how it is laid out, whatever it speaks of. Shares rather than
# counts, so that they carry over to any length.

from __future__ import annotations

import math
import re

import numpy as np
import numpy.typing as npt

from router import lexicon

FORM_LIMIT = 4.0  # standard deviations: beyond, a number says no more, so that odd texts get no absurd scores

# Over lower-case UTF-8: words (bytes of other scripts count as letters), numbers, and signs one by one.
_WORD = re.compile(rb"[a-z\x80-\xff]+|[0-9]+|[^\sa-z0-9\x80-\xff]")
# Every expression here takes time in proportion to the text: none can begin at one place and fail at many.
_OPTION = re.compile(rb"^[ \t]{0,8}\(?[a-j][.):]([^\n]*)", re.MULTILINE)
_SENTENCE_END = re.compile(rb"[.!?](?=\s|$)")
_NAME = re.compile(rb"[a-z,;] [A-Z]")  # a capital inside a sentence
_NUMERAL = re.compile(rb"\b(?:I{1,3}|IV)[.,) ]")
_FRACTION = re.compile(rb"[0-9]/[0-9]")
_DECIMAL = re.compile(rb"[0-9]\.[0-9]")
_CODE_MARKS = (b"def ", b"return", b"```", b"();", b"import ")

# Kinds of characters, as columns of a table that is indexed by byte.
_CHARACTERS = {
    "digits": b"0123456789",
    "capitals": b"ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "punctuation": b";-",
    "commas": b",",
    "colons": b":",
    "math_signs": b"=+*/^<>$%",
    "brackets": b"()[]{}",
    "bars": b"|",
    "underscores": b"_",
    "backslashes": b"\\",
    "quotes": b"\"'",
    "foreign": bytes(range(128, 256)),
}
_KIND_OF_BYTE = np.array([[float(byte in kind) for kind in _CHARACTERS.values()] for byte in range(256)])

FORM_NAMES = (
    *_CHARACTERS,
    *lexicon.NAMES,
    "log_characters",
    "log_words",
    "word_length",
    "long_words",
    "longest_words",
    "numbers",
    "log_numbers",
    "distinct_numbers",
    "longest_number",
    "decimals",
    "fractions",
    "money",
    "percents",
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


def words_of(lower: bytes) -> list[bytes]:
    """Return the words, numbers and signs of a lower-case text, in order."""
    return _WORD.findall(lower)


def form_of(data: bytes, lower: bytes, words: list[bytes]) -> npt.NDArray[np.float64]:
    """Return the numbers of ``FORM_NAMES`` for a text, the same in lower case, and its words."""
    size, count = max(1, len(data)), max(1, len(words))
    characters = np.bincount(np.frombuffer(data, np.uint8), minlength=256) @ _KIND_OF_BYTE / size
    others = (*_layout(data, lower, words, size, count), *_options(lower))
    return np.concatenate((characters, lexicon.shares_of(words), others))


def _layout(data: bytes, lower: bytes, words: list[bytes], size: int, count: int) -> tuple[float, ...]:
    lengths = list(map(len, words))
    numbers = list(filter(bytes.isdigit, words))
    sentences = len(_SENTENCE_END.findall(data))
    lines = data.count(b"\n") + 1
    end = lower.rstrip()[-1:]
    return (
        math.log(size),
        math.log(count),
        sum(lengths) / count,
        sum(map((8).__lt__, lengths)) / count,
        sum(map((12).__lt__, lengths)) / count,
        len(numbers) / count,
        math.log1p(len(numbers)),
        len(set(numbers)) / max(1, len(numbers)),
        float(min(8, max(map(len, numbers), default=0))),
        len(_DECIMAL.findall(data)) / count,
        len(_FRACTION.findall(data)) / count,
        data.count(b"$") / count,
        data.count(b"%") / count,
        len(set(words)) / count,
        math.log(count / max(1, sentences)),
        math.log1p(sentences),
        math.log(lines),
        math.log(size / lines),
        len(_NAME.findall(data)) / count,
        len(_NUMERAL.findall(data)) / count,
        sum(map(data.count, _CODE_MARKS)) / lines,
        float(min(3, data.count(b"?"))),
        float(end == b"?"),
        float(end == b"."),
        float(end == b":"),
        float(b"how many" in lower or b"how much" in lower),
        float(b"which of" in lower),
        float(b"of the above" in lower or b"none of" in lower),
    )


def _options(lower: bytes) -> tuple[float, ...]:
    """Return how many answers the text offers, how long they are and how unlike, and the length of what is asked."""
    options = _OPTION.findall(lower)
    if not options:
        return (0.0, 0.0, 0.0, 0.0, math.log(max(1, len(lower))))
    lengths = list(map(len, options))
    mean = sum(lengths) / len(lengths)
    spread = math.sqrt(sum((length - mean) ** 2 for length in lengths) / len(lengths))
    digits = sum(len(option) - len(option.translate(None, b"0123456789")) for option in options)
    return (
        float(min(10, len(options))),
        math.log1p(mean),
        math.log1p(spread),
        digits / max(1, sum(lengths)),
        math.log(max(1, len(lower) - sum(lengths))),
    )
