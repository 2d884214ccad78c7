# A clock that stands still until a test moves it.

from __future__ import annotations

from gateway.core.clock import Clock

NOON = 1_775_390_400.0  # 2026-04-05 12:00 UTC


class SetClock(Clock):
    """Time as the test says; ids follow it."""

    def __init__(self, now: float = NOON) -> None:
        self.time = now
        self._behind = 0.0

    def now(self) -> float:
        """Return unix seconds."""
        return self.time - self._behind

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return self.time

    def set_back(self, seconds: float) -> None:
        """Set the time of day back, as NTP or a person does; what has passed has passed."""
        self._behind += seconds

    def move(self, seconds: float) -> None:
        """Let time pass, or go back."""
        self.time += seconds
