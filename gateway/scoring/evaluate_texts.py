# `tollgate evaluate --outcomes FILE` of texts: how many of those that a team wants flagged the classifiers find, and
# how many of the others they flag, as a gateway with shipped defaults judges input.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.scoring.score_lines import Text
from gateway.terminal.printing import Format, show
from router.recalibration import interval_of

COLUMNS = (
    *("kind", "texts", "to_flag", "found", "found_low", "found_high"),
    *("to_pass", "wrongly_flagged", "wrongly_low", "wrongly_high"),
)
WANTED = '{"text": "…", "flag": true or false}'


class LabelledText(Text, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text, and whether it should be flagged."""

    flag: bool
    kind: str = ""  # of text, as its team sorts it


def evaluate_texts(texts: Sequence[LabelledText], judge: Callable[[Text], Mapping[str, Any]], format: Format) -> None:
    """Print a line for all texts and for each kind: shares of those to flag and of the others that are flagged."""
    judged = [(text.kind, text.flag, bool(judge(text)["flagged"])) for text in texts]
    kinds = [_of_kind("all", [pair[1:] for pair in judged])]
    for kind in sorted({text.kind for text in texts} - {""}):
        kinds.append(_of_kind(kind, [pair[1:] for pair in judged if pair[0] == kind]))
    show(format, {"object": "evaluation", "kinds": kinds}, COLUMNS, kinds, f"{len(texts)} texts")


def _of_kind(kind: str, pairs: Sequence[tuple[bool, bool]]) -> Mapping[str, Any]:
    """Return shares with 95 % intervals, of (should be, is) flagged; those of no text are missing."""
    of = {should: [found for wanted, found in pairs if wanted is should] for should in (True, False)}
    line: dict[str, Any] = {"kind": kind, "texts": len(pairs), "to_flag": len(of[True]), "to_pass": len(of[False])}
    for should, name, prefix in ((True, "found", "found"), (False, "wrongly_flagged", "wrongly")):
        if flagged := of[should]:
            low, high = interval_of(sum(flagged), len(flagged))
            line |= {name: round(sum(flagged) / len(flagged), 3)}
            line |= {f"{prefix}_low": round(low, 3), f"{prefix}_high": round(high, 3)}
    return line
