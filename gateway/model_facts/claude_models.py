# What the generations of Claude differ in, told by a model's name: how it thinks, what may be said of sampling and of
# tools, and how long its answers are (Anthropic, "Models overview" and the migration guides, November 2026).

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache

from msgspec import Struct

# claude-3-5-sonnet-20241022, claude-sonnet-4-5-20250929, anthropic.claude-opus-4-1-20250805-v1:0, claude-opus-4.6
NAME = re.compile(r"claude-(?:(?P<line>[a-z]+)-)?(?:(?P<major>\d)(?:[-.](?P<minor>\d{1,2}))?(?!\d))?")
NEWEST = (99, 0)  # of a name without a version, such as a preview's
ALL_EFFORTS = ("low", "medium", "high", "xhigh", "max")


class Sampling(StrEnum):
    """What may be said of temperature, top_p and top_k."""

    FREE = "free"
    ONE = "one"  # temperature or top_p, not both
    NONE = "none"  # their defaults alone


class ClaudeRules(Struct, frozen=True, kw_only=True):
    """What one model takes. The defaults are those of a model that is no Claude, of which nothing is known."""

    takes_budget: bool = True  # thinking: enabled, with budget_tokens
    takes_adaptive: bool = True  # thinking: adaptive
    thinks_unasked: bool = False  # where nothing is said of thinking
    offs: tuple[str, ...] = ("disabled", "between_tools")  # what turns thinking off, where it is on and can be
    efforts: tuple[str, ...] = ALL_EFFORTS
    sampling: Sampling = Sampling.FREE
    takes_forced_tools: bool = True
    takes_format: bool = True  # structured outputs: output_config.format
    takes_prefill: bool = True  # a last turn of the assistant's, which the reply goes on with
    max_output: int | None = None  # tokens
    has_newer_tokenizer: bool = False  # which makes more tokens of the same text


@lru_cache(256)
def rules_of(upstream_model: str) -> ClaudeRules:
    """Return the rules of a model by its upstream's name; a Claude of a version yet to come has the newest's."""
    found = NAME.search(upstream_model.lower())
    if found is None:
        return ClaudeRules()
    line, major, minor = found["line"] or "", found["major"], found["minor"]
    version = (int(major), int(minor or 0)) if major else NEWEST
    is_always_on = line in ("fable", "mythos") or (version >= (5, 5) and line not in ("sonnet", "haiku"))
    thinks_unasked = is_always_on or version >= (5, 0)
    off = "between_tools" if line == "sonnet" and version >= (5, 5) else "disabled"
    if version < (4, 6):
        efforts: tuple[str, ...] = ()
    else:
        efforts = ("low", "medium", "high", "max") if version < (4, 7) else ALL_EFFORTS
    return ClaudeRules(
        takes_budget=(3, 7) <= version < (4, 7),
        takes_adaptive=version >= (4, 6),
        has_newer_tokenizer=version >= (4, 7),
        thinks_unasked=thinks_unasked,
        offs=(off,) if thinks_unasked and not is_always_on else (),
        efforts=efforts,
        sampling=Sampling.FREE if version < (4, 1) else Sampling.ONE if version < (4, 7) else Sampling.NONE,
        takes_forced_tools=version < (5, 1) if line in ("fable", "mythos") else version < (5, 5),
        takes_format=version >= ((4, 1) if line == "opus" else (4, 5)),
        takes_prefill=version < (4, 6),
        max_output=_max_output(line, version),
    )


def _max_output(line: str, version: tuple[int, int]) -> int:
    if version < (3, 5):
        return 4_096
    if version < (3, 7):
        return 8_192
    if version < (4, 6):
        return 32_000 if line == "opus" and version < (4, 5) else 64_000
    return 128_000
