# What a process may admit of a scope's rates while Redis is away: its share by living owners. Pure.

from __future__ import annotations

from billing.rate_words import BUCKETS, WINDOW, ScopeTold

MINUTE = 60.0
SLOTS = 30.0  # seconds after which slots that are not stated again have ended
PAUSE = 1.0  # seconds until a caller may try again where nothing tells when there is room


class Share:
    """One scope's share while Redis is away.

    It begins with this owner's part of what Redis last told to be left, and refills at cap / owners a minute, up to as
    much; no minute of the outage admits more. A cap below one per owner gives one at most: to an owner that has used it
    in the last minute before, which may use it again when that minute is over. So the shares of all owners together
    stay within the cap, whatever each of them knows.
    """

    def __init__(
        self, caps: tuple[int, int, int], told: ScopeTold, told_at: float, *, used: int | None, live: int
    ) -> None:
        """Begin an outage. ``told_at`` is in monotonic seconds; ``used``: the bucket of this owner's last use, if that
        was in the minute before; ``live``: its running calls."""
        self._requests_cap, self._tokens_cap, self._slots_cap = caps
        self._told, self._told_at = told, told_at
        self._others = told.slots - live  # running calls, or slots, of other owners
        self._had_request, self._had_slot = used is not None, live > 0
        self._spent: dict[int, list[int]] = {} if used is None else {used: [1, 0]}  # bucket -> requests, tokens
        self._requests, self._tokens = int(used is not None), 0  # sums of these
        self._refund = 0  # tokens of ``_told`` that own calls have turned out not to need

    def refuses(self, now: float, bucket: int, tokens: int, live: int, owners: int) -> tuple[int, float] | None:
        """Return which limit (from 0) has no room for a call of so many tokens, and the seconds until it may have."""
        self._forget(bucket)
        elapsed = now - self._told_at
        if self._requests_cap >= 0:
            cap = self._requests_cap
            allowed = self._allowed(cap, cap - self._told.requests, elapsed, owners)
            if cap < owners:
                allowed = min(1, cap) if self._had_request else 0
            if self._requests + 1 > allowed:
                return 0, self._wait(self._requests + 1 - allowed, cap, owners)
        if self._tokens_cap >= 0:
            cap = self._tokens_cap
            allowed = self._allowed(cap, cap - self._told.tokens + self._refund, elapsed, owners)
            if self._tokens + tokens > allowed:
                return 1, self._wait(self._tokens + tokens - allowed, cap, owners)
        if self._slots_cap >= 0:
            allowed = self._slots_cap // owners
            if elapsed < SLOTS:
                allowed = min(allowed, self._slots_cap - self._others)
            if self._slots_cap < owners:
                allowed = min(1, self._slots_cap) if self._had_slot else 0
            if live + 1 > allowed:
                return 2, PAUSE
        return None

    @property
    def spent(self) -> tuple[int, int]:
        """Requests and tokens of the last minute that Redis has not heard of."""
        return self._requests, self._tokens

    def spend(self, bucket: int, requests: int, tokens: int) -> None:
        """Count what a call takes, or gives back with negative numbers, in the bucket in which it began."""
        entry = self._spent.get(bucket)
        if entry is None:
            if requests <= 0:  # it began before the outage
                self._refund -= min(0, tokens)
                return
            entry = self._spent[bucket] = [0, 0]
        entry[0] += requests
        entry[1] += tokens
        self._requests += requests
        self._tokens += tokens

    def _forget(self, bucket: int) -> None:
        for oldest in list(self._spent):
            if oldest >= bucket - WINDOW:
                break
            requests, tokens = self._spent.pop(oldest)
            self._requests -= requests
            self._tokens -= tokens

    def _allowed(self, cap: int, left: int, elapsed: float, owners: int) -> int:
        return int(min(cap, max(0, left) + cap * max(0.0, elapsed) / MINUTE) / owners)

    def _wait(self, missing: int, cap: int, owners: int) -> float:
        """Return after how many seconds the share has refilled by so much."""
        return min(MINUTE, max(1 / BUCKETS, missing * owners * MINUTE / cap)) if cap > 0 else MINUTE
