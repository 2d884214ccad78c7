# How fast a streamed reply came: the time of the attempt until its first token, and the waits for each chunk after it.
# Counted as it goes, so that a reply of any length keeps sixteen numbers.

from __future__ import annotations

from bisect import bisect_left

CHUNK_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)


class Pace:
    """The pace of one streamed reply. Times are seconds; what a slow client took is in none of them."""

    def __init__(self, first: float) -> None:
        self.first = first  # until the first token, by the attempt that brought it
        self.chunks = [0] * (len(CHUNK_SECONDS) + 1)  # after the first, by their waits
        self.total = 0.0  # of these waits
        self._waited: float | None = None  # since the last chunk; none before the first is there

    def wait(self, seconds: float) -> None:
        """The upstream was waited for."""
        self._waited = (self._waited or 0.0) + seconds

    def grow(self) -> None:
        """A chunk with a part of the answer came. The first is not waited for here."""
        if self._waited is None:
            return
        self.chunks[bisect_left(CHUNK_SECONDS, self._waited)] += 1
        self.total += self._waited
        self._waited = None
