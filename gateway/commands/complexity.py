# `tollgate complexity`: a line with a prompt or a conversation in, a line with its score out. For evaluation, and for
# looking at what the router thinks.

from __future__ import annotations

from typing import TextIO

from msgspec import Struct

from protocol.chat import ChatRequest, Message
from protocol.errors import BadRequest
from protocol.serving.lines import answer_lines
from router.complexity.classifier import Complexity


class Line(Struct, frozen=True):
    """One question: a prompt, or the messages of a conversation."""

    prompt: str | None = None
    messages: tuple[Message, ...] | None = None


def main(stdin: TextIO, stdout: TextIO, complexity: Complexity | None = None) -> None:
    """Answer each line of ``stdin`` with ``{"small_suffices": 0..1}``, or ``{"error": …}`` where it is faulty."""
    complexity = Complexity.load() if complexity is None else complexity
    answer_lines(stdin, stdout, Line, lambda line: {"small_suffices": complexity.small_suffices(_request_of(line))})


def _request_of(line: Line) -> ChatRequest:
    if (line.prompt is None) == (line.messages is None):
        raise BadRequest("give either prompt or messages")
    if line.messages == ():
        raise BadRequest("messages is empty")
    return ChatRequest(model="auto", messages=line.messages or (Message(role="user", content=line.prompt),))
