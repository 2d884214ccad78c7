# `tollgate evaluate --outcomes FILE` of prompts: how well the complexity model that serves tells, of a team's own
# outcomes, where a small model suffices, and what each quality would have cost and brought. Reads a file, nothing else.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from gateway.scoring import evaluate_texts
from gateway.scoring.evaluate_texts import LabelledText
from gateway.scoring.score_lines import Question, request_of, safety_judge
from gateway.terminal.printing import Format, fail, show
from protocol.errors import BadRequest
from router.complexity.classifier import Complexity
from router.complexity.features import text_of
from router.complexity.judging import Floats, apgr, calibration_error, calibration_noise, interval

QUALITIES = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
LEAST = 20  # outcomes of a kind that is judged; the intervals say what so few are worth
KIND_COLUMNS = (
    *("kind", "outcomes", "small_right", "large_right", "small_suffices", "said"),
    *("calibration_error", "by_chance", "apgr", "apgr_low", "apgr_high", "length_apgr"),
)
QUALITY_COLUMNS = ("quality", "large_share", "right", "small_right", "large_right")
WANTED = (
    'each line is {"prompt": "…", "small": 0..1, "large": 0..1}, with "messages" for "prompt" if you like, or each is '
    f'{evaluate_texts.WANTED}; "kind" may stand beside'
)

Line = TypeVar("Line", bound=Question | LabelledText)

Score = Annotated[float, Meta(ge=0, le=1)]


class Outcome(Question, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a small and a large model did on one prompt: 1 is right, 0 wrong."""

    small: Score
    large: Score
    kind: str = ""  # of work, as its team sorts it


def evaluate(file: Path, format: Format, with_qualities: bool) -> None:
    """Print a line for all outcomes of ``file`` and each kind of them, or one for each quality; JSON has both.

    What its first line is, text or prompt, its others are.
    """
    lines = _lines_of(file)
    if not lines:
        fail(f"{file} holds no outcomes: {WANTED}")
    if _is_of_texts(lines[0][1]):
        if with_qualities:
            fail("texts are flagged by the operating points that ship; --qualities is for prompts.", 2)
        texts = [_decoded(line, place, LabelledText) for place, line in lines]
        evaluate_texts.evaluate_texts(texts, safety_judge(), format)
    else:
        _evaluate_prompts([_outcome(line, place) for place, line in lines], format, with_qualities)


def _evaluate_prompts(outcomes: Sequence[Outcome], format: Format, with_qualities: bool) -> None:
    model = Complexity.load()
    requests = [request_of(outcome) for outcome in outcomes]
    judged = {
        "small": np.array([outcome.small for outcome in outcomes]),
        "large": np.array([outcome.large for outcome in outcomes]),
        "scores": np.array([model.small_suffices(request) for request in requests]),
        "length": -np.array([float(len(text_of(request))) for request in requests]),
    }
    of = np.array([outcome.kind for outcome in outcomes])
    kinds = [_of_kind("", **judged)]
    kinds += [
        _of_kind(kind, **{name: values[of == kind] for name, values in judged.items()})
        for kind in sorted(set(of.tolist()) - {""})
    ]
    qualities = [_of_quality(quality, **judged) for quality in QUALITIES]
    whole = {"object": "evaluation", "version": model.version, "kinds": kinds, "qualities": qualities}
    columns, rows = (QUALITY_COLUMNS, qualities) if with_qualities else (KIND_COLUMNS, kinds)
    show(format, whole, columns, rows, f"{len(outcomes)} outcomes")


def _lines_of(file: Path) -> Sequence[tuple[str, bytes]]:
    """Return the lines that hold something, each with what names it."""
    try:
        with file.open("rb") as lines:
            return [(f"{file}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    except OSError as exc:
        fail(f"{file} cannot be read: {exc.strerror}")


def _is_of_texts(line: bytes) -> bool:
    try:
        return "text" in msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False  # the fault is told with the line


def _outcome(line: bytes, place: str) -> Outcome:
    outcome = _decoded(line, place, Outcome)
    try:
        request_of(outcome)
    except BadRequest as exc:
        fail(f"{place}: {exc.message}")
    return outcome


def _decoded(line: bytes, place: str, kind: type[Line]) -> Line:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        fail(f"{place}: {exc}; {WANTED}")


def _of_kind(kind: str, small: Floats, large: Floats, scores: Floats, length: Floats) -> Mapping[str, Any]:
    """Return what is found of some outcomes: how often which is right, what the scores say of it, and how they rank.

    The APGR (0.5 is chance) is missing where the large model is no better, and its interval where a draw of outcomes
    has no gap at all.
    """
    suffices = small >= large
    found: dict[str, Any] = {
        "kind": kind or "all",
        "outcomes": len(scores),
        "small_right": small.mean(),
        "large_right": large.mean(),
        "small_suffices": suffices.mean(),
        "said": scores.mean(),
    }
    if len(scores) >= LEAST:
        found |= {"calibration_error": calibration_error(scores, suffices), "by_chance": calibration_noise(scores)}
        if large.sum() > small.sum():
            with np.errstate(all="ignore"):  # a draw may hold no gap at all
                low, high = interval(scores, large, small)
            found |= {"apgr": apgr(scores, large, small), "length_apgr": apgr(length, large, small)}
            found |= {"apgr_low": low, "apgr_high": high} if np.isfinite([low, high]).all() else {}
    return _rounded(found)


def _of_quality(quality: float, small: Floats, large: Floats, scores: Floats, length: Floats) -> Mapping[str, Any]:
    """Return what a route of that quality would have sent to its large model, and how often it would be right."""
    is_large = scores < quality
    right = np.where(is_large, large, small).mean()
    return _rounded(
        {
            "quality": quality,
            "large_share": is_large.mean(),
            "right": right,
            "small_right": small.mean(),
            "large_right": large.mean(),
        }
    )


def _rounded(found: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value if isinstance(value, str | int) else round(float(value), 3) for name, value in found.items()}
