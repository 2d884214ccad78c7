# How one process stands with the database: what it is called there, whether that answers, and what was acknowledged.

from __future__ import annotations

from collections.abc import Callable

import structlog

from billing.core.edges import Clock
from billing.quotas.lease_store import PostgresLeases

GIVE_UP_AFTER = 4.0  # seconds that a statement has: one that is given up costs its connection, and so the database more
OWNER_APART = 0.00025  # seconds between asks for each living owner: two hundred ask for one balance every 50 ms
ANSWERS_APART = 4  # times what the last answer took: a database that is slow is asked less often
LONGEST_PACE = 0.25  # seconds

log = structlog.get_logger(__name__)


class Standing:
    """One owner of leases, as it and the database know each other."""

    def __init__(self, store: PostgresLeases, clock: Clock, owner: str, *, share: float) -> None:
        self.store = store
        self.clock = clock
        self.owner = owner
        self.share = share  # the most of what a balance has left that lies in leases, over all owners
        self.living = 1  # owners, ourselves among them
        self.is_away = False  # the database did not answer the last time
        self.may_ask = True  # False while our clock and the database's differ, or we have ended
        self.on_beat: Callable[[int, int], None] = lambda sent, beat: None  # what was acknowledged before, and now
        self.acknowledged = 0  # the highest beat that we were told
        self._counts = 0  # that were begun anew: where the database forgot, or this process is another owner
        self.took = 0.0  # seconds, by the last answer to an ask
        self._heard_at = 0.0  # monotonic seconds; when the database last answered anything

    @property
    def pace(self) -> float:
        """Seconds between asks for a tight balance, and between returns of what is not used of it. Many owners share
        one database, and what it cannot answer in time costs it as much as what it can."""
        return min(LONGEST_PACE, max(self.living * OWNER_APART, ANSWERS_APART * self.took))

    @property
    def mark(self) -> tuple[int, int]:
        """What a statement notes that is asked now, for ``heard``."""
        return self._counts, self.acknowledged

    def count_from(self, beat: int) -> None:
        """Begin another count: what was asked before tells nothing of it, or one failover would be found twice."""
        self._counts += 1
        self.acknowledged = beat

    def miss(self, began: float, exc: BaseException) -> None:
        """Take note of a statement, begun then (monotonic seconds), that has no answer in time. The database is away if
        it has answered no other since: one scope whose row is locked, or much asked for, keeps no other from asking."""
        if self._heard_at < began:
            if not self.is_away:
                log.error("leases_unreachable", error=repr(exc))
            self.is_away = True

    def heard(self, mark: tuple[int, int], beat: int | None) -> None:
        """Take note of an acknowledgement. ``mark``: as it was when we asked."""
        self._heard_at = self.clock.monotonic()
        counts, sent = mark
        if beat and counts == self._counts:  # 0: not counted, a look alone, or beside another statement of this process
            self.acknowledged = max(self.acknowledged, beat)
            self.on_beat(sent, beat)
