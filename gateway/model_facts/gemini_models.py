# What the generations of Gemini differ in, told by a model's name: how it is asked to think, and what goes together
# (Google, "Gemini thinking", "Structured output" and "Thought signatures", November 2026).

from __future__ import annotations

import re
from functools import lru_cache

from msgspec import Struct

# gemini-2.5-flash-lite-preview-09-2025, gemini-3-pro-preview, models/gemini-3.5-flash
NAME = re.compile(r"gemini-(?P<major>\d)(?:\.(?P<minor>\d))?-(?P<line>pro|flash-lite|flash)?")
NEWEST = (99, 0)  # of a name without a version, such as gemini-flash-latest
EFFORTS = ("minimal", "low", "medium", "high")
BUDGETS = {"minimal": 1_024, "low": 1_024, "medium": 8_192, "high": 24_576}  # tokens; Google's own, for OpenAI's words


class GeminiRules(Struct, frozen=True, kw_only=True):
    """What one model takes. The defaults are those of a model that is no Gemini, such as Gemma: it does not think."""

    levels: tuple[str, ...] = ()  # thinkingLevel, from the least on
    takes_budget: bool = False  # thinkingBudget
    can_be_off: bool = False  # by a budget of 0
    least_budget: int = 1  # tokens, where it thinks
    takes_json_with_tools: bool = False
    wants_signatures: bool = False  # calls of functions that are told again without one are refused
    fetches: bool = False  # pictures and PDFs that lie elsewhere


@lru_cache(256)
def rules_of(upstream_model: str) -> GeminiRules:
    """Return the rules of a model by its upstream's name; a Gemini of a version yet to come has the newest's."""
    name = upstream_model.lower()
    if "gemini-" not in name:
        return GeminiRules()
    found = NAME.search(name)
    version = (int(found["major"]), int(found["minor"] or 0)) if found else NEWEST
    is_pro = "pro" in name
    if version < (2, 5):
        return GeminiRules()
    if version < (3, 0):
        least = 128 if is_pro else 512 if "lite" in name else 1
        return GeminiRules(takes_budget=True, can_be_off=not is_pro, least_budget=least, fetches=True)
    levels = ("low", "high") if is_pro and version < (3, 1) else EFFORTS[1:] if is_pro else EFFORTS
    return GeminiRules(levels=levels, takes_json_with_tools=True, wants_signatures=True, fetches=True)
