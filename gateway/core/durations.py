# Durations as users write them: 500ms, 2s, 1m30s, 24h, 400d.

from __future__ import annotations

import re

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LONGEST = 100 * 365 * 86400.0  # seconds; beyond a century it is a slip of the keyboard

_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_WHOLE = re.compile(rf"(?:{_PART.pattern})+")


def read_duration(text: str) -> float | None:
    """Return ``text`` as seconds, or ``None`` if it is no duration."""
    if len(text) > 40 or not _WHOLE.fullmatch(text):
        return None
    seconds = sum(float(count) * _UNITS[unit] for count, unit in _PART.findall(text))
    return seconds if seconds <= LONGEST else None
