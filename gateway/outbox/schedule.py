# What follows from a try: delivered, another try, or the end. Pure: time and dice are arguments.

from __future__ import annotations

from msgspec import Struct

KEEP_TRYING = 24 * 3600.0  # seconds from the event, or from its redelivery, to the last try
FIRST_WAIT = 5.0  # seconds: the most before the second try; it doubles with each
LEAST_WAIT = 1.0
LONGEST_WAIT = 3600.0  # also the most that a receiver's retry-after can ask for
GONE = 410  # the receiver wants no more of this


class DeliveryResult(Struct, frozen=True, kw_only=True):
    """How one try went: what the receiver answered, or why it did not."""

    status: int | None = None
    error: str | None = None
    retry_after: float | None = None  # seconds, as the receiver asked

    @property
    def is_delivered(self) -> bool:
        """Tell whether the receiver took it: any 2xx."""
        return self.status is not None and 200 <= self.status < 300


class Delivered(Struct, frozen=True):
    """The receiver has it."""


class TryAgain(Struct, frozen=True):
    """Not yet."""

    at: float  # unix seconds


class GiveUp(Struct, frozen=True):
    """Never; it stays as undelivered."""


NextStep = Delivered | TryAgain | GiveUp


def next_step(result: DeliveryResult, tries: int, now: float, expires_at: float, dice: float) -> NextStep:
    """Return what follows from ``result``, that of try number ``tries``. ``dice``: from 0 to 1.

    The waits have full jitter (AWS Architecture Blog, "Exponential Backoff And Jitter"): a receiver that comes back is
    not met by everything at once. The last try is at ``expires_at``.
    """
    if result.is_delivered:
        return Delivered()
    if result.status == GONE or now >= expires_at:
        return GiveUp()
    most = min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(tries - 1, 20))
    wait = max(LEAST_WAIT, dice * most, min(result.retry_after or 0.0, LONGEST_WAIT))
    return TryAgain(min(now + wait, expires_at))
