# The headers that say what is left of a limit: x-ratelimit for all clients, anthropic-ratelimit for that dialect.

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache

from billing.core.holds import Hold, RefusedHold

LimitHeaders = Callable[[Hold | RefusedHold, float], dict[str, str]]  # of what an API says, at unix seconds


def rate_limit_headers(held: Hold | RefusedHold, now: float = 0.0) -> dict[str, str]:
    """Return ``x-ratelimit-{limit,remaining,reset}-{requests,tokens}`` for the limits that there are."""
    headers: dict[str, str] = {}
    for kind, left in (("requests", held.requests), ("tokens", held.tokens)):
        if left is not None:
            headers[f"x-ratelimit-limit-{kind}"] = str(left.limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(left.remaining if left.remaining > 0 else 0)
            headers[f"x-ratelimit-reset-{kind}"] = go_duration(left.reset)
    return headers


def anthropic_limit_headers(held: Hold | RefusedHold, now: float) -> dict[str, str]:
    """Return ``anthropic-ratelimit-{requests,tokens}-{limit,remaining,reset}``; ``now`` is unix seconds."""
    headers: dict[str, str] = {}
    for kind, left in (("requests", held.requests), ("tokens", held.tokens)):
        if left is not None:
            moment = datetime.fromtimestamp(math.ceil(now + max(0.0, left.reset)), UTC)
            headers[f"anthropic-ratelimit-{kind}-limit"] = str(left.limit)
            headers[f"anthropic-ratelimit-{kind}-remaining"] = str(max(0, left.remaining))
            headers[f"anthropic-ratelimit-{kind}-reset"] = f"{moment:%Y-%m-%dT%H:%M:%SZ}"
    return headers


@lru_cache  # nearly all are none, or a minute
def go_duration(seconds: float) -> str:
    """Return seconds as Go writes a duration, the way OpenAI's headers do: ``12ms``, ``1s``, ``6m0s``."""
    if seconds <= 0:
        return "0ms"
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    whole = -(-milliseconds // 1000)
    hours, minutes = divmod(whole // 60, 60)
    words = f"{whole % 60}s"
    if hours or minutes:
        words = f"{minutes}m{words}"
    return f"{hours}h{words}" if hours else words
