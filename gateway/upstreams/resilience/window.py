# What was asked of a target lately and how much of it failed, and which failures count.

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from itertools import pairwise

from msgspec import Struct

BUCKET = 0.25  # seconds that are counted together
MOST_BUCKETS = 120
RECENT = (1.0, 5.0)  # seconds; a hard outage shows here long before it outweighs a whole window of health


class Window:
    """Requests and failures of the last seconds, in buckets; the oldest leaves up to one bucket early."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._size = max(BUCKET, seconds / MOST_BUCKETS)
        self._buckets: deque[_Bucket] = deque()

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def add_good(self, now: float) -> None:
        """Count an answer."""
        self._bucket(now).requests += 1

    def take_good_back(self, then: float) -> None:
        """Count no more an answer that was counted ``then``, if that is still in the window."""
        for bucket in reversed(self._buckets):
            if bucket.begin <= then:
                bucket.requests -= then < bucket.end and bucket.requests > bucket.failures
                break

    def add_bad(self, now: float, team: str, is_small: bool) -> None:
        """Count a failure."""
        bucket = self._bucket(now)
        bucket.requests += 1
        if is_small:
            bucket.small += 1
        else:
            bucket.large[team] += 1

    def clear(self) -> None:
        """Forget everything."""
        self._buckets.clear()

    def tallies(self, now: float) -> Tallies:
        """Return what was counted in the last second, the last five, and the whole window."""
        self._forget(now)
        return tuple(self._tally(now - span) for span in (*RECENT, self.seconds))

    def check(self) -> None:
        """Assert what always holds."""
        for bucket in self._buckets:
            assert 0 <= bucket.failures <= bucket.requests
        assert all(a.end <= b.begin for a, b in pairwise(self._buckets))

    def _bucket(self, now: float) -> _Bucket:
        buckets = self._buckets
        if buckets and now < buckets[-1].end:  # also when the clock went back
            return buckets[-1]
        self._forget(now)
        bucket = _Bucket(now, now + self._size)
        buckets.append(bucket)
        return bucket

    def _forget(self, now: float) -> None:
        while self._buckets and self._buckets[0].begin <= now - self.seconds:
            self._buckets.popleft()

    def _tally(self, since: float) -> Tally:
        requests = small = 0
        large = Counter[str]()
        for bucket in reversed(self._buckets):
            if bucket.begin <= since:
                break
            requests += bucket.requests
            small += bucket.small
            if bucket.large:  # nearly always none
                large.update(bucket.large)
        return Tally(requests, small, large)


class _Bucket:
    __slots__ = ("begin", "end", "large", "requests", "small")

    def __init__(self, begin: float, end: float) -> None:
        self.begin, self.end = begin, end
        self.requests = self.small = 0
        self.large = Counter[str]()

    @property
    def failures(self) -> int:
        return self.small + sum(self.large.values())


class Tally(Struct, frozen=True):
    """What was counted over some span. A failure is small when its prompt was; large ones are counted by team."""

    requests: int = 0
    small: int = 0
    large: Mapping[str, int] = {}

    @property
    def failures(self) -> int:
        """All failures."""
        return self.small + sum(self.large.values())

    def __add__(self, other: Tally) -> Tally:
        large = Counter(self.large) + Counter(other.large)
        return Tally(self.requests + other.requests, self.small + other.small, large)

    def weighed(self) -> tuple[int, int]:
        """Return the requests and failures that count: one team's large prompts weigh no more than all else that fails.

        So failures count when they come from two teams or with a small prompt, and no team can close a target for all.
        """
        failures = self.failures
        dominant = max(self.large.values(), default=0)
        left_out = max(0, dominant - (failures - dominant))
        return self.requests - left_out, failures - left_out


NO_TALLY = Tally()
Tallies = tuple[Tally, ...]  # one for each of RECENT, and one for the whole window
