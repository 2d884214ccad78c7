# Clients that leave before a first token, again and again. Their prompts are charged, but what a model thought until
# then is billed to the house and told by no upstream: after a few such ends in a row a key has to wait between calls.

from __future__ import annotations

import math

import structlog
from msgspec import Struct

from billing.errors import RateLimited
from gateway.clock import Clock

FREE = 5  # ends in a row that cost a key no wait
LONGEST = 60.0  # seconds between its calls, reached by doubling from one
FORGOTTEN = 600.0  # seconds after which a row of ends counts no more

log = structlog.get_logger()


class Row(Struct):
    """The ends in a row of one key. Times are monotonic seconds."""

    number: int = 0
    latest: float = 0.0
    until: float = 0.0  # when its next call may run

    @property
    def pause(self) -> float:
        """Seconds from one call to the next."""
        return min(LONGEST, 2.0 ** min(self.number - FREE - 1, 10))


class EarlyLeaves:
    """What one process knows of them, by key id. A first token makes a key's row end."""

    def __init__(self, clock: Clock) -> None:
        self._rows: dict[str, Row] = {}
        self._clock = clock

    def refuse(self, key_id: str) -> None:
        """Raise RateLimited while a key has to wait. After each wait one call may show that its client stays."""
        if not self._rows or (row := self._rows.get(key_id)) is None or row.number <= FREE:
            return
        now = self._clock.monotonic()
        if now >= row.until:
            row.until = now + row.pause
            return
        raise RateLimited(
            f"The last {row.number} calls of this key were left before their first token. Set a longer timeout in the"
            " client, or ask for less at once, and try again after the time in retry-after.",
            headers={"retry-after": str(math.ceil(row.until - now))},
        )

    def count(self, key_id: str, began: float) -> None:
        """Count an end of a call that began at ``began``; those that ran side by side count as one: an app that stops
        leaves all its calls at once."""
        now, row = self._clock.monotonic(), self._rows.get(key_id)
        if row is None or now - row.latest > FORGOTTEN:
            self._rows = {key: one for key, one in self._rows.items() if now - one.latest <= FORGOTTEN}
            row = self._rows[key_id] = Row()
        elif began <= row.latest:
            return
        row.number, row.latest = row.number + 1, now
        if row.number > FREE:
            row.until = now + row.pause
            log.warning("key_waits_after_early_leaves", key_id=key_id, in_a_row=row.number, seconds=row.pause)

    def forget(self, key_id: str) -> None:
        """A first token has come for a key."""
        if self._rows:
            self._rows.pop(key_id, None)
