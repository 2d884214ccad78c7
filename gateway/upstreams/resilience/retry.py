# Whether a failed attempt is followed by another, and when; and the deadline over all of a call's attempts. Pure: dice
# and time are arguments. dispatcher.py sleeps.

from __future__ import annotations

from msgspec import Struct

from gateway.core.settings import Retries
from gateway.upstreams.resilience.breaker import Verdict
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFailure

BASE = 0.25  # seconds; the most that is waited before the first retry,
CAP = 4.0  # and before any
LONGEST_PAUSE = 5.0  # seconds that a call waits because an upstream asked it to; beyond them it moves on

# Words of attempts (UpstreamFailure.outcome) that say nothing of the target's health.
NOT_ITS_DOING = frozenset({"refused_key", "forbidden", "not_found", "too_long", "deadline"})
OF_OUR_SETTINGS = ("status_3", "status_4")  # a wrong path, a redirect: how we ask is at fault
NEVER_ASKED = frozenset({"unsupported", "unsayable"})  # refused before anything was sent: a format cannot say it
OF_THE_KEY = frozenset({"refused_key", "spend_cap", "rate_limited"})


def verdict_of(failure: UpstreamFailure) -> Verdict:
    """Return what a failed attempt says of its target: no connection, silence, cuts and 5xx speak against it."""
    match failure.status:
        case 502 | 504 if failure.outcome not in NOT_ITS_DOING and not failure.outcome.startswith(OF_OUR_SETTINGS):
            return Verdict.BAD
        case 400 | 413 if failure.outcome not in NEVER_ASKED:
            return Verdict.GOOD  # it is well enough to say what is wrong
    return Verdict.NOTHING


def next_pause(
    failure: UpstreamFailure, tries: int, policy: Retries, *, time_left: float, dice: float, has_sibling: bool
) -> float | None:
    """Return the seconds to wait before the same target is asked again, or ``None`` to move on.

    ``tries`` counts those made at this target, ``dice`` is in [0, 1). Where the model has another endpoint
    (``has_sibling``), that is asked at once instead. A target that was silent for a whole deadline gets no other.
    """
    if has_sibling or tries >= policy.attempts or not isinstance(failure, UpstreamError):
        return None
    if verdict_of(failure) is not Verdict.BAD or failure.outcome == "malformed":
        return None
    pause = max(full_jitter(tries, dice), failure.retry_after or 0.0)
    return pause if pause <= LONGEST_PAUSE and pause < time_left else None


def full_jitter(tries: int, dice: float) -> float:
    """Return the seconds before the next try: anything up to a bound that doubles each time.

    "Full jitter" of M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """
    return dice * min(CAP, BASE * 2 ** (min(tries, 30) - 1))


class Deadline(Struct, frozen=True):
    """The moment, in monotonic seconds, at which a call's attempts end, however many there are."""

    at: float

    def left(self, now: float) -> float:
        """Return the seconds left, never less than 0."""
        return self.at - now if now < self.at else 0.0

    def within(self, patience: float, now: float) -> float:
        """Return the seconds that one attempt may take which would usually get ``patience``."""
        return patience if now + patience <= self.at else self.left(now)
