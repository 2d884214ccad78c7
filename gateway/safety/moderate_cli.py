# `tollgate moderate`: a line with a text in, a line with its scores out. For evaluation, and for looking at what the
# content policy sees.

from __future__ import annotations

from typing import Any, TextIO

import msgspec
from msgspec import Struct

from gateway.safety.classifier import FLAGGED, Classifier


class Line(Struct, frozen=True):
    """One text."""

    text: str


def main(stdin: TextIO, stdout: TextIO, classifier: Classifier | None = None) -> None:
    """Answer each line of ``stdin`` with ``{"flagged", "categories": {…: 0..1}}``, or ``{"error": …}`` if it is faulty.

    Blank lines are passed over; every other line has one line of answer, written at once, so that a caller may wait
    for it.
    """
    classifier = Classifier.load() if classifier is None else classifier
    for line in stdin:
        if line.strip():
            stdout.write(msgspec.json.encode(_answer(line, classifier)).decode() + "\n")
            stdout.flush()


def _answer(line: str, classifier: Classifier) -> dict[str, Any]:
    try:
        asked = msgspec.json.decode(line.encode("utf-8", "surrogateescape"), type=Line)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        return {"error": f"not a line that can be moderated: {exc}"}
    scores = classifier.score(asked.text)
    return {"flagged": max(scores.values()) >= FLAGGED, "categories": scores}
