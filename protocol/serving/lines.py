# Commands that answer line by line: a JSON object in, a JSON object out.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TextIO, TypeVar

import msgspec

from protocol.errors import BadRequest

T = TypeVar("T")


def answer_lines(stdin: TextIO, stdout: TextIO, kind: type[T], answer: Callable[[T], Mapping[str, Any]]) -> None:
    """Answer each line of ``stdin``, a ``kind``, with an object, or with ``{"error": …}`` where it is faulty.

    ``answer`` may raise BadRequest. Blank lines are passed over; every other line has one line of answer, written at
    once, so that a caller may wait for it.
    """
    for line in stdin:
        if line.strip():
            stdout.write(msgspec.json.encode(_answered(line, kind, answer)).decode() + "\n")
            stdout.flush()


def _answered(line: str, kind: type[T], answer: Callable[[T], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        return answer(msgspec.json.decode(line.encode("utf-8", "surrogateescape"), type=kind))
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        return {"error": f"not a line that can be scored: {exc}"}
    except BadRequest as exc:
        return {"error": exc.message}
