# What a request id says: a UUIDv7 (RFC 9562, section 5.7) begins with the moment of its making, and so with the UTC day
# for which its call is booked.

from __future__ import annotations

from datetime import date, timedelta
from uuid import UUID

EPOCH = date(1970, 1, 1)


def uuid7(milliseconds: int, dice: int) -> str:
    """Return the id of a moment (unix milliseconds), with 80 bits of dice six of which the format overwrites."""
    value = milliseconds << 80 | dice
    value = value & ~(0xF << 76) | 0x7 << 76
    digits = f"{value & ~(0x3 << 62) | 0x2 << 62:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def uuid_of(request_id: str) -> UUID | None:
    """Return an id as the database has it; ``None`` for what is none."""
    try:
        return UUID(request_id)
    except ValueError:
        return None


def moment_of(request_id: str) -> int:
    """Return the unix milliseconds inside an id: its first 48 bits."""
    return int(request_id[:8] + request_id[9:13], 16)


def day_of(request_id: str) -> int:
    """Return the UTC day inside an id, as days since 1970."""
    return moment_of(request_id) // 86_400_000


def date_of(request_id: str) -> date:
    """Return the UTC day inside an id."""
    return EPOCH + timedelta(days=day_of(request_id))


def least_id(moment: float) -> UUID:
    """Return the least id of a moment in unix seconds: those of earlier calls are below it."""
    return UUID(int=int(moment * 1000) << 80)
