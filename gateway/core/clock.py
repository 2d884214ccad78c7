# Time and ids as arguments: code that needs them gets a Clock, so that a test of thirty seconds takes none. And days
# and durations as users write them: 500ms, 2s, 1m30s, 24h, 400d.

from __future__ import annotations

import re
import secrets
import time
from datetime import UTC, date, datetime

from billing.core.ids import uuid7
from protocol.errors import invalid_value


class Clock:
    """The real clock, set by the database's: ids are minted in its time. Tests pass their own."""

    ahead = 0.0  # seconds; what the database's clock shows more than this machine's

    def now(self) -> float:
        """Return unix seconds."""
        return time.time() + self.ahead

    def follow(self, ahead: float) -> None:
        """Show so many seconds more than this machine's own clock."""
        self.ahead = ahead

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return time.monotonic()

    def moment(self) -> datetime:
        """Return this moment, in UTC."""
        return datetime.fromtimestamp(self.now(), UTC)

    def today(self) -> date:
        """Return the UTC day."""
        return self.moment().date()

    def new_id(self) -> str:
        """Return a UUIDv7 of this moment."""
        return uuid7(int(self.now() * 1000), secrets.randbits(80))


def read_day(said: str, name: str) -> date:
    """Return a day written as 2026-04-05. Raises BadRequest about the parameter ``name``."""
    try:
        day = date.fromisoformat(said)
    except ValueError:
        day = None
    if day is None or day.isoformat() != said:  # weeks and bare digits are ISO dates too
        raise invalid_value(name, "is a UTC day such as 2026-04-05")
    return day


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
