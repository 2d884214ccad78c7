# `tollgate complexity` and `tollgate moderate`: a line with a prompt, a conversation or a text in, a line with scores
# out. For evaluation, and for looking at what the router thinks and the content policy sees. Each loads its own model.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TextIO, TypeVar

import msgspec
from msgspec import Struct

from gateway.moderation.classifier.classifier import FLAGGED, Classifier
from gateway.moderation.reading.encoder import is_installed, load_encoder
from protocol.chat import ChatRequest, Message
from protocol.errors import BadRequest
from router.complexity.classifier import Complexity

T = TypeVar("T")


class Question(Struct, frozen=True):
    """A prompt, or the messages of a conversation."""

    prompt: str | None = None
    messages: tuple[Message, ...] | None = None


class Text(Struct, frozen=True):
    """One text."""

    text: str


SHAPES: dict[type, str] = {Question: '{"prompt": "…"} or {"messages": […]}', Text: '{"text": "…"}'}


def score_complexity(stdin: TextIO, stdout: TextIO, complexity: Complexity | None = None) -> bool:
    """Answer each line of ``stdin`` with ``{"small_suffices": 0..1}``, or ``{"error": …}`` where it is faulty.
    Return whether not every one was."""
    complexity = Complexity.load() if complexity is None else complexity
    return _answer_lines(
        stdin, stdout, Question, lambda line: {"small_suffices": complexity.small_suffices(request_of(line))}
    )


def score_safety(stdin: TextIO, stdout: TextIO, classifier: Classifier | None = None) -> bool:
    """Answer each line of ``stdin`` with ``{"flagged", "categories": {…: 0..1}}``, or ``{"error": …}`` if faulty, as a
    gateway judges input: with the sentence encoder, where it is installed. Return whether not every one was."""
    return _answer_lines(stdin, stdout, Text, safety_judge(classifier))


def safety_judge(classifier: Classifier | None = None) -> Callable[[Text], dict[str, Any]]:
    """Return what answers a text with ``flagged`` and its ``categories``."""
    classifier = Classifier.load() if classifier is None else classifier
    encode = load_encoder() if is_installed() else None

    def answer(line: Text) -> dict[str, Any]:
        scores = classifier.score(line.text, encode)
        return {"flagged": max(scores.values()) >= FLAGGED, "categories": scores}

    return answer


def request_of(line: Question) -> ChatRequest:
    """Return a line as a request; raises ``BadRequest`` where it has neither prompt nor messages, or both."""
    if (line.prompt is None) == (line.messages is None):
        raise BadRequest("give either prompt or messages")
    if line.messages == ():
        raise BadRequest("messages is empty")
    return ChatRequest(model="auto", messages=line.messages or (Message(role="user", content=line.prompt),))


def _answer_lines(stdin: TextIO, stdout: TextIO, kind: type[T], answer: Callable[[T], Mapping[str, Any]]) -> bool:
    """Answer each line of ``stdin``, a ``kind``, with an object, or with ``{"error": …}`` where it is faulty. Return
    whether one was not, or none came.

    Blank lines are passed over; every other line has one line of answer, written at once, so that a caller may wait for
    it.
    """
    count = faulty = 0
    for line in stdin:
        if line.strip():
            answered = _answered(line, kind, answer)
            stdout.write(msgspec.json.encode(answered).decode() + "\n")
            stdout.flush()
            count += 1
            faulty += "error" in answered
    return not count or faulty < count


def _answered(line: str, kind: type[T], answer: Callable[[T], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        return answer(msgspec.json.decode(line.encode("utf-8", "surrogateescape"), type=kind))
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        return {"error": f"not a line that can be scored: {exc}; give {SHAPES[kind]} a line"}
    except BadRequest as exc:
        return {"error": exc.message}
