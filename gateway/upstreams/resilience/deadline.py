# How long a call may still take: one deadline over all its attempts.

from __future__ import annotations

from msgspec import Struct


class Deadline(Struct, frozen=True):
    """The moment, in monotonic seconds, at which a call's attempts end, however many there are."""

    at: float

    def left(self, now: float) -> float:
        """Return the seconds left, never less than 0."""
        return max(0.0, self.at - now)

    def within(self, patience: float, now: float) -> float:
        """Return the seconds that one attempt may take which would usually get ``patience``."""
        return min(patience, self.left(now))
