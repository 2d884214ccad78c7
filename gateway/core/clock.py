# Time and ids as arguments: code that needs them gets a Clock, so that a test of thirty seconds takes none.

from __future__ import annotations

import secrets
import time
from datetime import UTC, date, datetime

from billing.core.ids import uuid7


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
