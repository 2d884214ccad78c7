# What the complexity model reads of a request: its words hashed into buckets, and the numbers of its layout. The same
# code serves requests and prepares the training data, so that both see the same.

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from protocol.chat import ChatRequest, Message, TextPart
from protocol.completions import CompletionRequest
from protocol.inference import Request
from router.complexity.text_stats import plain_bytes, stats_of, words_of

BUCKETS = 1 << 17  # of hashed words and pairs of words
HEAD = TAIL = 1000  # characters looked at from either end: what a decision costs does not grow with the prompt
SHORT_TURN = 80  # characters; a shorter turn ("and in Python?") leans on the one before it


def text_of(request: Request) -> str:
    """Return the text that the difficulty is read from, bounded: the last user turn, or the prompt.

    A short turn is read together with the user turn before it, for it means little alone.
    """
    match request:
        case ChatRequest():
            turns = (message for message in reversed(request.messages) if message.role == "user")
            if (turn := next(turns, None)) is None:
                return _bounded_text(request.messages[-1]) if request.messages else ""
            last = _bounded_text(turn)
            if len(last) < SHORT_TURN and (before := next(turns, None)) is not None:
                return f"{_bounded_text(before)}\n{last}"
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

    buckets: npt.NDArray[np.intp]  # (hits,), rising: one for each word and each pair of neighbours
    is_first: npt.NDArray[np.bool_]  # (hits,), whether a bucket stands there for the first time
    stats: npt.NDArray[np.float64]  # (text statistics,)
    readable: float  # 0..1, the share of words of two letters and more that are in letters that were fitted


def read_text(text: str) -> Reading:
    """Return the words of a text in their buckets and the numbers of its layout."""
    data = plain_bytes(text)
    lower = data.lower()
    words = words_of(lower)
    # Words in other letters were not fitted, and would be taken for those that share their buckets. Of one letter or
    # digit are the options of exams and the numbers of sums, which tell one exam from another and nothing else.
    long = [word for word in words if len(word) > 1]
    known = long if data.isascii() else [word for word in long if word.isascii()]
    return Reading(*_hits(known), stats_of(data, lower, words), len(known) / (len(long) or 1))


def _hits(words: list[bytes]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    # A pair's checksum is that of its words written as one: the second goes on where the first ended.
    sums = list(map(crc32, words))
    sums.extend(map(crc32, words[1:], sums[:]))
    buckets = np.array(sums, np.intp)
    buckets &= BUCKETS - 1
    buckets.sort()
    is_first = np.empty(len(sums), np.bool_)
    is_first[:1] = True
    np.not_equal(buckets[1:], buckets[:-1], is_first[1:])
    return buckets, is_first


def _bounded_text(message: Message) -> str:
    # Parts are cut before they are joined, so that a huge one is never copied whole. Each begins a line, so that the
    # last word of one and the first of the next stay two.
    if isinstance(message.content, str):
        return bounded(message.content)
    return bounded("\n".join(bounded(part.text) for part in message.content or () if isinstance(part, TextPart)))
