# UTC days as users write them.

from __future__ import annotations

from datetime import date

from protocol.errors import invalid_value


def read_day(said: str, name: str) -> date:
    """Return a day written as 2026-04-05. Raises BadRequest about the parameter ``name``."""
    try:
        day = date.fromisoformat(said)
    except ValueError:
        day = None
    if day is None or day.isoformat() != said:  # weeks and bare digits are ISO dates too
        raise invalid_value(name, "is a UTC day such as 2026-04-05")
    return day
