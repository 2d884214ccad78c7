# What the complexity model reads of a request: the numbers of its form, and its words hashed into buckets. The same
# code serves requests and prepares the training data, so that both see the same.

from __future__ import annotations

import math
import re
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from protocol.chat import ChatRequest, Message, TextPart
from protocol.completions import CompletionRequest
from router.abilities import InferenceRequest

BUCKETS = 1 << 14  # of hashed words and pairs of words
HEAD = TAIL = 1000  # characters looked at from either end: what a decision costs does not grow with the prompt
SHORT_TURN = 80  # characters; a shorter turn ("and in Python?") leans on the one before it
FORM_LIMIT = 4.0  # standard deviations: beyond, a form feature says no more, so that odd texts get no absurd scores

# Over lower-case UTF-8: words (bytes of other scripts count as letters), numbers, and signs one by one.
_WORD = re.compile(rb"[a-z\x80-\xff]+|[0-9]+|[^\sa-z0-9\x80-\xff]")
_OPTION = re.compile(rb"^\(?[a-j][.):]\s", re.MULTILINE)
_SENTENCE_END = re.compile(rb"[.!?](?=\s|$)")
_CODE_MARKS = (b"def ", b"return", b"```", b"();", b"import ")
_PAIR = np.uint32(2654435761)  # Knuth's multiplicative hash: the order of a pair matters

# Kinds of characters whose share of the text is a feature, as columns of a table that is indexed by byte.
_KINDS = {
    "digits": b"0123456789",
    "capitals": b"ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "punctuation": b",;:-",
    "math_signs": b"=+*/^<>$%",
    "brackets": b"()[]{}",
    "backslashes": b"\\",
    "quotes": b"\"'",
    "foreign": bytes(range(128, 256)),
}
_KIND_OF_BYTE = np.array([[float(byte in kind) for kind in _KINDS.values()] for byte in range(256)])

FORM_NAMES = (
    *_KINDS,
    "log_characters",
    "log_words",
    "word_length",
    "long_words",
    "numbers",
    "distinct_words",
    "sentence_length",
    "log_lines",
    "line_length",
    "options",
    "question_marks",
    "code_marks",
)
LENGTH = FORM_NAMES.index("log_characters")


def text_of(request: InferenceRequest) -> str:
    """Return the text that the difficulty is read from, bounded: the last user turn, or the prompt.

    A short turn is read together with the user turn before it, for it means little alone.
    """
    match request:
        case ChatRequest():
            turns = [message for message in request.messages if message.role == "user"]
            if not turns:
                return _bounded_text(request.messages[-1]) if request.messages else ""
            last = _bounded_text(turns[-1])
            if len(turns) > 1 and len(last) < SHORT_TURN:
                return f"{_bounded_text(turns[-2])}\n{last}"
            return last
        case CompletionRequest():
            prompt = request.prompt
            first = prompt[0] if isinstance(prompt, list) and prompt else prompt
            return bounded(first) if isinstance(first, str) else ""
        case _:
            return ""


def bounded(text: str) -> str:
    """Return the text, or its first and last characters when it is longer than what is looked at."""
    return text if len(text) <= HEAD + TAIL else f"{text[:HEAD]}\n{text[-TAIL:]}"


class Reading(NamedTuple):
    """What one text looks like to the model."""

    buckets: npt.NDArray[np.uint32]  # (hit buckets,), rising, each once
    counts: npt.NDArray[np.int64]  # (hit buckets,), how many words and pairs of neighbours fell into each
    form: npt.NDArray[np.float64]  # (form features,)


def read_text(text: str) -> Reading:
    """Return the words of a text in their buckets and the numbers of its form."""
    data = text.encode("utf-8", "replace")
    lower = data.lower()
    words = _WORD.findall(lower)
    return Reading(*_counted(_hits(words)), _form(data, lower, words))


def _hits(words: list[bytes]) -> npt.NDArray[np.uint32]:
    singles = np.fromiter(map(crc32, words), np.uint32, len(words))
    pairs = singles[:-1] * _PAIR ^ singles[1:]
    return np.concatenate((singles, pairs)) & np.uint32(BUCKETS - 1)


def _counted(hits: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    # What numpy.unique does, without its fixed costs: a short prompt has tens of words.
    hits.sort()
    is_first = np.empty(len(hits) + 1, np.bool_)
    is_first[:1] = is_first[-1:] = True
    np.not_equal(hits[1:], hits[:-1], out=is_first[1:-1])
    edges = is_first.nonzero()[0]
    return hits[edges[:-1]], edges[1:] - edges[:-1]


def _form(data: bytes, lower: bytes, words: list[bytes]) -> npt.NDArray[np.float64]:
    """Return the numbers of ``FORM_NAMES``: shares rather than counts, so that they carry over to any length."""
    size, count = max(1, len(data)), max(1, len(words))
    lengths = list(map(len, words))
    lines = data.count(b"\n") + 1
    kinds = np.bincount(np.frombuffer(data, np.uint8), minlength=256) @ _KIND_OF_BYTE / size
    others = (
        math.log(size),
        math.log(count),
        sum(lengths) / count,
        sum(map((8).__lt__, lengths)) / count,
        sum(map(bytes.isdigit, words)) / count,
        len(set(words)) / count,
        math.log(count / max(1, len(_SENTENCE_END.findall(data)))),
        math.log(lines),
        math.log(size / lines),
        float(min(10, len(_OPTION.findall(lower)))),
        float(min(3, data.count(b"?"))),
        sum(map(data.count, _CODE_MARKS)) / lines,
    )
    return np.concatenate((kinds, others))


def _bounded_text(message: Message) -> str:
    # Parts are cut before they are joined, so that a huge one is never copied whole.
    if isinstance(message.content, str):
        return bounded(message.content)
    return bounded("".join(bounded(part.text) for part in message.content or () if isinstance(part, TextPart)))
