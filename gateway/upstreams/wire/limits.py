# What an upstream says that a key may still ask of it: the rate-limit headers of its answers, in either dialect.
# OpenAI tells durations (6m0s), Anthropic moments (RFC 3339): when the limit is whole again, not when there is room for
# the next request. Both fill up evenly.

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime

from msgspec import Struct

UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001, "µs": 1e-6, "us": 1e-6, "ns": 1e-9}
DURATION = re.compile(r"(?:\d{1,18}(?:\.\d{1,18})?(?:h|ms|m|s|µs|us|ns))+")
PART = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)(h|ms|m|s|µs|us|ns)")
CLAUDE_TOKENS = ("tokens", "input-tokens", "output-tokens")


class Left(Struct, frozen=True):
    """What is left of one limit, and in how many seconds it is whole again; ``limit`` where that is told."""

    counts_tokens: bool  # else requests
    left: float
    limit: float | None
    whole_in: float


def read_limits(headers: Mapping[str, str], now: float) -> list[Left] | None:
    """Return which limits the headers of an answer say are half used or more; ``now`` in unix seconds.

    ``None`` where they say nothing of limits. What makes no sense is not said.
    """
    get = headers.get
    if (requests := get("x-ratelimit-remaining-requests")) is not None:
        tokens, most = get("x-ratelimit-remaining-tokens"), get("x-ratelimit-limit-tokens")
        found = (
            _left(False, requests, get("x-ratelimit-limit-requests"), headers, "x-ratelimit-reset-requests", now),
            _left(True, tokens, most, headers, "x-ratelimit-reset-tokens", now),
        )
        return [one for one in found if one is not None]
    if get("anthropic-ratelimit-requests-remaining") is None:
        return None
    names = ((kind, f"anthropic-ratelimit-{kind}-") for kind in ("requests", *CLAUDE_TOKENS))
    told = (
        _left(kind != "requests", get(name + "remaining"), get(name + "limit"), headers, name + "reset", now)
        for kind, name in names
    )
    return [one for one in told if one is not None]


def _left(
    counts_tokens: bool, left: str | None, limit: str | None, headers: Mapping[str, str], reset: str, now: float
) -> Left | None:
    """Return what is left of one limit; ``None`` where that is plenty, or not told, or not until when."""
    known, most = _number(left), _number(limit)
    if known is None or (most is not None and known > most / 2):
        return None
    said = headers.get(reset)
    whole_in = _duration(said) if said is None or "T" not in said else _until(said, now)
    return None if whole_in is None else Left(counts_tokens, known, most, whole_in)


def _number(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() else None


def _duration(text: str | None) -> float | None:
    """Return the seconds of a Go duration ("6m0s", "12ms") or of a plain number of them."""
    if text is None:
        return None
    if DURATION.fullmatch(text):
        return sum(float(number) * UNITS[unit] for number, unit in PART.findall(text))
    return _number(text)


def _until(text: str, now: float) -> float | None:
    """Return the seconds until a moment of RFC 3339."""
    try:
        return max(0.0, datetime.fromisoformat(text).timestamp() - now)
    except ValueError:
        return None
