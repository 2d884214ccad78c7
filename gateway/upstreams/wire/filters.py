# Which refusals come from an upstream's own content filter. Services say it in many words, and some with the status of
# a key that is refused: taken for one, a single prompt would put the deployment's key into cooldown for all callers.

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.upstreams.wire.errors import UpstreamFiltered

STATUSES = (400, 403, 422, 451)

# Azure's code, and that inside it; OpenAI's, and of pictures; Alibaba's two.
CODES = frozenset(
    {"content_filter", "responsibleaipolicyviolation", "content_policy_violation", "moderation_blocked"}
    | {"data_inspection_failed", "datainspectionfailed"}
)
# OpenAI of prompts to its reasoning models, Azure, Anthropic, xAI, OpenRouter, DeepSeek.
WORDS = re.compile(
    r"flagged as potentially violating|content (?:filtering|management) policy|violates usage guidelines"
    r"|your input was flagged|content exists risk",
    re.IGNORECASE,
)
CATEGORY = re.compile(r"[\w/ -]{1,40}")
MOST_CATEGORIES = 8


def read_filtered(error: Mapping[str, Any], status: int | None = None) -> UpstreamFiltered | None:
    """Return the refusal that an upstream's error object stands for where a content filter speaks in it, else ``None``.

    ``status`` is that of a failing answer; an error inside a stream or an answer has none.
    """
    inner = error.get("innererror")
    codes = (error.get("code"), error.get("type"), inner.get("code") if isinstance(inner, dict) else None)
    words = error.get("message") or ""
    if not any(str(code).lower() in CODES for code in codes) and WORDS.search(words) is None:
        return None
    param = error.get("param")
    # Who says it as if of a key may name the deployment's account, which is no caller's business.
    said = "" if status == 403 else words
    named = ", ".join([name for name in _categories(error) if CATEGORY.fullmatch(name)][:MOST_CATEGORIES])
    what = f"The content filter of the model's provider refused this call{f' ({named})' if named else ''}"
    return UpstreamFiltered(f"{what}: {said}" if said else f"{what}.", param=param if isinstance(param, str) else None)


def _categories(error: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a filter says that it found: Azure as results by category, OpenRouter and OpenAI as a list."""
    match error:
        case {"innererror": {"content_filter_result": dict() as results}}:
            yield from (name for name, said in results.items() if isinstance(said, dict) and said.get("filtered"))
        case {"metadata": {"reasons": list() as reasons}} | {"moderation_details": {"categories": list() as reasons}}:
            yield from (reason for reason in reasons if isinstance(reason, str))
