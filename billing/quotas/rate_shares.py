# What Redis tells an owner of a scope's rates, and what that owner may admit while Redis is away: its share by living
# owners. Pure.

from __future__ import annotations

from msgspec import Struct

BUCKETS = 4  # in a second, as rates.lua counts
WINDOW = 60 * BUCKETS  # a bucket counts while so many later ones have begun, and one more
MINUTE = 60.0  # seconds
NONE = -1  # no limit
SLOTS = 30.0  # seconds after which slots that are not stated again have ended
PAUSE = 1.0  # seconds until a caller may try again where nothing tells when there is room


class ScopeTold(Struct, array_like=True, frozen=True):
    """One scope in an answer: what all owners have, with this command's, and the slice."""

    requests: int = 0
    tokens: int = 0
    held: int = 0  # of the tokens
    slots: int = 0
    own_slots: int = 0  # of this owner, with those of the slice
    calls: int = 0  # for which the slice is
    call_tokens: int = 0  # of all of these


class Share:
    """One scope's share while Redis is away: cap / owners a minute.

    What Redis last told to be used leaves the minute evenly. A cap below one per owner gives one at most: to an owner
    that has used it in the last minute before, which may use it again when that minute is over. So the shares of all
    owners together stay within the cap, whatever each of them knows.
    """

    def __init__(
        self, caps: tuple[int, int, int], told: ScopeTold, told_at: float, *, used: int | None, live: int
    ) -> None:
        """Begin an outage. ``told_at`` is in monotonic seconds; ``used``: the bucket of this owner's last use, if that
        was in the minute before; ``live``: its running calls."""
        self._caps, self._told, self._told_at = caps, told, told_at
        self._others = told.slots - live  # running calls, or slots, of other owners
        self._used, self._had_slot = used, live > 0
        self._spent: dict[int, list[int]] = {}  # bucket -> requests, tokens
        self.spent = [0, 0]  # sums of these: what Redis has not heard of
        self._refund = 0  # tokens that calls from before have turned out not to need

    def refuses(self, now: float, bucket: int, tokens: int, live: int, owners: int) -> tuple[int, float] | None:
        """Return which limit (from 0) has no room for a call of so many tokens, and the seconds until it may have."""
        while (oldest := next(iter(self._spent), bucket)) < bucket - WINDOW:
            self.spend(oldest, *(-spent for spent in self._spent[oldest]))
            del self._spent[oldest]
        stays = 1.0 - min(1.0, (now - self._told_at) / MINUTE)
        used = (self._told.requests, max(0, self._told.tokens - self._refund))
        for limit, wanted in enumerate((1, tokens)):
            cap = self._caps[limit]
            allowed = int((cap - min(cap, used[limit]) * stays) / owners)
            if limit == 0 and cap < owners:
                allowed = min(1, cap) if self._used is not None and self._used < bucket - WINDOW else 0
            missing = self.spent[limit] + wanted - allowed
            if cap >= 0 and missing > 0:
                return limit, min(MINUTE, max(1 / BUCKETS, missing * owners * MINUTE / cap)) if cap else MINUTE
        cap = self._caps[2]
        allowed = cap // owners
        if now - self._told_at < SLOTS:
            allowed = min(allowed, cap - self._others)
        if cap < owners:
            allowed = min(1, cap) if self._had_slot else 0
        return (2, PAUSE) if cap >= 0 and live + 1 > allowed else None

    def spend(self, bucket: int, requests: int, tokens: int) -> None:
        """Count what a call takes, or gives back with negative numbers, in the bucket in which it began."""
        entry = self._spent.get(bucket)
        if entry is None:
            if requests <= 0:  # it began before the outage
                self._refund -= min(0, tokens)
                return
            entry = self._spent[bucket] = [0, 0]
        for each in (entry, self.spent):
            each[0] += requests
            each[1] += tokens
