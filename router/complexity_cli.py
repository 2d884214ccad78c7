# `tollgate complexity`: a line with a prompt or a conversation in, a line with its score out. For evaluation, and for
# looking at what the router thinks.

from __future__ import annotations

from typing import TextIO

import msgspec
from msgspec import Struct

from protocol.chat import ChatRequest, Message
from router.complexity import Complexity


class Line(Struct, frozen=True):
    """One question: a prompt, or the messages of a conversation."""

    prompt: str | None = None
    messages: tuple[Message, ...] | None = None


def main(stdin: TextIO, stdout: TextIO, complexity: Complexity | None = None) -> None:
    """Answer each line of ``stdin`` with ``{"small_suffices": 0..1}``, or ``{"error": …}`` where it is faulty.

    Blank lines are passed over; every other line has one line of answer, written at once, so that a caller may wait
    for it.
    """
    complexity = Complexity.load() if complexity is None else complexity
    for line in stdin:
        if line.strip():
            stdout.write(msgspec.json.encode(_answer(line, complexity)).decode() + "\n")
            stdout.flush()


def _answer(line: str, complexity: Complexity) -> dict[str, float | str]:
    try:
        asked = msgspec.json.decode(line.encode("utf-8", "surrogateescape"), type=Line)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        return {"error": f"not a line that can be scored: {exc}"}
    if (asked.prompt is None) == (asked.messages is None):
        return {"error": "give either prompt or messages"}
    if asked.messages == ():
        return {"error": "messages is empty"}
    messages = asked.messages or (Message(role="user", content=asked.prompt),)
    return {"small_suffices": complexity.small_suffices(ChatRequest(model="auto", messages=messages))}
