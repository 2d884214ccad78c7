# What the complexity model reads of a request: the numbers of its form, and its words hashed into buckets. The same
# code serves requests and prepares the training data, so that both see the same.

from __future__ import annotations

import math
import re
from zlib import crc32

from protocol.chat import ChatRequest, Message
from protocol.completions import CompletionRequest
from router.abilities import InferenceRequest

BUCKETS = 1 << 14  # of hashed words and pairs of words
HEAD = TAIL = 1500  # characters looked at from either end: what a decision costs does not grow with the prompt
SHORT_TURN = 80  # characters; a shorter turn ("and in Python?") leans on the one before it

_WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]")
_OPTION = re.compile(r"^\(?[A-J][.):]\s", re.MULTILINE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")

FORM_NAMES = (
    "log_characters",
    "log_words",
    "word_length",
    "long_words",
    "digits",
    "numbers",
    "capitals",
    "punctuation",
    "math_signs",
    "brackets",
    "backslashes",
    "code_marks",
    "foreign",
    "log_lines",
    "line_length",
    "options",
    "question_marks",
    "sentence_length",
    "distinct_words",
    "quotes",
)


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


def words_of(text: str) -> list[str]:
    """Return words, numbers and signs in order, in lower case."""
    return _WORD.findall(text.lower())


def hashed(words: list[str]) -> dict[int, int]:
    """Return how often each bucket of words and pairs of neighbours is hit."""
    counts: dict[int, int] = {}
    before = "^"
    for word in words:
        for gram in (word, f"{before} {word}"):
            bucket = crc32(gram.encode("utf-8", "surrogatepass")) & (BUCKETS - 1)
            counts[bucket] = counts.get(bucket, 0) + 1
        before = word
    return counts


def form_of(text: str, words: list[str]) -> list[float]:
    """Return the numbers of ``FORM_NAMES``: shares are per character or word, so that they carry over to any length."""
    characters = max(1, len(text))
    alphabetic = [word for word in words if word[0].isalpha()]
    numbers = sum(1 for word in words if word[0].isdecimal())
    count = max(1, len(words))
    spelled = max(1, len(alphabetic))
    lines = text.count("\n") + 1
    return [
        math.log(characters),
        math.log(count),
        sum(map(len, alphabetic)) / spelled,
        sum(1 for word in alphabetic if len(word) > 8) / spelled,
        sum(map(text.count, "0123456789")) / characters,
        numbers / count,
        sum(map(str.isupper, text)) / characters,
        sum(map(text.count, ",;:-")) / characters,
        sum(map(text.count, "=+*/^<>$%")) / characters,
        sum(map(text.count, "()[]{}")) / characters,
        text.count("\\") / characters,
        sum(map(text.count, ("def ", "return", "```", "();", "import "))) / lines,
        0.0 if text.isascii() else (len(text.encode("utf-8", "surrogatepass")) - characters) / characters,
        math.log(lines),
        math.log(characters / lines),
        float(min(10, len(_OPTION.findall(text)))),
        min(3.0, text.count("?")),
        math.log(count / max(1, len(_SENTENCE_END.findall(text)))),
        len(set(alphabetic)) / spelled,
        sum(map(text.count, "\"'“”")) / characters,
    ]


def _bounded_text(message: Message) -> str:
    # Parts are cut before they are joined, so that a huge one is never copied whole.
    if isinstance(message.content, str):
        return bounded(message.content)
    return bounded("".join(bounded(part.text) for part in message.content or () if hasattr(part, "text")))
