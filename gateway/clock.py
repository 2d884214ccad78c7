# Time and ids as arguments: what needs them is handed a Clock, so that a test of thirty seconds takes none.

from __future__ import annotations

import secrets
import time
from datetime import UTC, date, datetime


class Clock:
    """The real clock. Tests pass their own."""

    def now(self) -> float:
        """Return unix seconds."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return time.monotonic()

    def today(self) -> date:
        """Return the UTC day."""
        return datetime.fromtimestamp(self.now(), UTC).date()

    def new_id(self) -> str:
        """Return a UUIDv7 as text: 48 bits of unix milliseconds, then dice (RFC 9562, section 5.7)."""
        value = int(self.now() * 1000) << 80 | secrets.randbits(80)
        value = value & ~(0xF << 76) | 0x7 << 76
        digits = f"{value & ~(0x3 << 62) | 0x2 << 62:032x}"
        return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
