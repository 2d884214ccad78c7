# `tollgate moderate`: a line with a text in, a line with its scores out. For evaluation, and for looking at what the
# content policy sees.

from __future__ import annotations

from typing import Any, TextIO

from msgspec import Struct

from gateway.moderation.classifier.classifier import FLAGGED, Classifier
from protocol.serving.lines import answer_lines


class Line(Struct, frozen=True):
    """One text."""

    text: str


def main(stdin: TextIO, stdout: TextIO, classifier: Classifier | None = None) -> None:
    """Answer each line of ``stdin`` with ``{"flagged", "categories": {…: 0..1}}``, or ``{"error": …}`` if faulty."""
    classifier = Classifier.load() if classifier is None else classifier

    def answer(line: Line) -> dict[str, Any]:
        scores = classifier.score(line.text)
        return {"flagged": max(scores.values()) >= FLAGGED, "categories": scores}

    answer_lines(stdin, stdout, Line, answer)
