# Clients that leave before a first token, again and again. Their prompts are charged, but a model's thinking until
# then is billed to the operator and reported by no upstream: after a few such ends a key has to wait between calls.
#
# The rule: an end adds one to the row of its key, a first token takes one off. Ends of calls that ran side by side make
# groups of up to eight, which add one each; a call that began after the first end of a group is not of that group. A
# first token takes from the ends of the latest group before it takes the group itself.

from __future__ import annotations

import math

import structlog
from msgspec import Struct

from billing.core.errors import RateLimited
from gateway.core.clock import Clock

FREE = 5  # length of a row that costs a key no wait
LONGEST = 60.0  # seconds between its calls, reached by doubling from one
MOST = FREE + 7  # the length with the longest wait; a row grows no further, so that first tokens bring it down again
TOGETHER = 8  # ends of calls side by side that count as one
FORGOTTEN = 600.0  # seconds after its latest end in which a row is forgotten

log = structlog.get_logger()


class Row(Struct):
    """The ends of one key that no first token has taken off. Times are monotonic seconds."""

    number: int = 0
    latest: float = 0.0  # end
    until: float = 0.0  # when its next call may run
    group_since: float = 0.0  # the first end of the latest group,
    in_group: int = 0  # and how many ends it has

    @property
    def pause(self) -> float:
        """Seconds from one call to the next."""
        return min(LONGEST, 2.0 ** (self.number - FREE - 1))


class EarlyLeaves:
    """What one process knows of them, by key id."""

    def __init__(self, clock: Clock) -> None:
        self._rows: dict[str, Row] = {}
        self._clock = clock

    def refuse(self, key_id: str) -> None:
        """Raise RateLimited while a key has to wait. After each wait one call may show that its client stays."""
        if not self._rows or (row := self._rows.get(key_id)) is None or row.number <= FREE:
            return
        now = self._clock.monotonic()
        if now - row.latest > FORGOTTEN:
            del self._rows[key_id]
            return
        if now >= row.until:
            row.until = now + row.pause
            return
        raise RateLimited(
            "Too many calls of this key were left before their first token. Set a longer timeout in the client, ask for"
            " less at once, or cancel fewer calls, and try again after the time in retry-after.",
            headers={"retry-after": str(math.ceil(row.until - now))},
        )

    def count(self, key_id: str, began: float) -> None:
        """Count an end of a call that began at ``began``."""
        now, row = self._clock.monotonic(), self._rows.get(key_id)
        if row is None or now - row.latest > FORGOTTEN:
            self._rows = {key: one for key, one in self._rows.items() if now - one.latest <= FORGOTTEN}
            row = self._rows[key_id] = Row()
        row.latest = now
        if 0 < row.in_group < TOGETHER and began <= row.group_since:
            row.in_group += 1
            return
        row.number, row.group_since, row.in_group = min(MOST, row.number + 1), now, 1
        if row.number > FREE:
            row.until = now + row.pause
            log.warning("key_waits_after_early_leaves", key_id=key_id, row=row.number, seconds=row.pause)

    def forget_one(self, key_id: str) -> None:
        """Take one end off: a first token has come for a key."""
        if not self._rows or (row := self._rows.get(key_id)) is None:
            return
        if row.in_group > 1:
            row.in_group -= 1
            return
        row.number, row.in_group = row.number - 1, 0
        if row.number == 0:
            del self._rows[key_id]
        elif row.number > FREE:
            row.until = min(row.until, self._clock.monotonic() + row.pause)
