# What a key may still ask of a target: by what its upstream last said, less what was asked since. No I/O: time is an
# argument, in monotonic seconds.

from __future__ import annotations

from collections.abc import Iterable

from gateway.upstreams.wire.limits import Left

PART = (
    60  # of a limit on tokens: what must be there again before a key is asked that had none; of a minute's, a second's
)


class Gauge:
    """One limit. It fills up evenly until it is whole, at once where its size was not told."""

    __slots__ = ("_least", "_left", "_rate", "_seen", "_whole", "counts_tokens")

    def __init__(self, told: Left, now: float) -> None:
        self.counts_tokens = told.counts_tokens
        self._left = told.left
        self._seen, self._whole = now, now + told.whole_in
        self._rate = 0.0 if told.limit is None else (told.limit - told.left) / max(told.whole_in, 0.001)  # a second
        self._least = max(1.0, told.limit / PART) if told.limit is not None and told.counts_tokens else 1.0

    def covers(self, amount: float, now: float) -> bool:
        """Whether so much was left when it was last told of, or everything is by now."""
        return self._left >= amount or now >= self._whole

    def take(self, amount: float) -> None:
        """Count what is asked for."""
        self._left -= amount

    def empty_until(self, now: float) -> float:
        """Return when it has room again; ``now`` or earlier where it has."""
        if self._left >= 1.0:
            return now
        return min(self._whole, self._seen + (self._least - self._left) / self._rate if self._rate else self._whole)


class Allowances:
    """The limits of all keys at all targets that told of any."""

    def __init__(self) -> None:
        self._gauges: dict[tuple[str, str | None], list[Gauge]] = {}

    def __bool__(self) -> bool:
        return bool(self._gauges)

    def hear(self, target_key: str, api_key: str | None, told: Iterable[Left], now: float) -> None:
        """Take over what an upstream says now; nothing is told where there is plenty."""
        if gauges := [Gauge(one, now) for one in told]:
            self._gauges[target_key, api_key] = gauges
        elif self._gauges:
            self._gauges.pop((target_key, api_key), None)

    def covers(self, target_key: str, api_key: str | None, tokens: float, now: float) -> bool:
        """Whether a key has room for one call of about so many tokens, for all we know."""
        gauges = self._gauges.get((target_key, api_key), ())
        return all(gauge.covers(tokens if gauge.counts_tokens else 1, now) for gauge in gauges)

    def take(self, target_key: str, api_key: str | None, tokens: float) -> None:
        """Count one call of about so many tokens."""
        for gauge in self._gauges.get((target_key, api_key), ()):
            gauge.take(tokens if gauge.counts_tokens else 1)

    def empty_until(self, target_key: str, api_key: str | None, now: float) -> float:
        """Return when a key has room again; ``now`` or earlier where it has."""
        return max((one.empty_until(now) for one in self._gauges.get((target_key, api_key), ())), default=now)

    def forget(self, target_key: str) -> None:
        """Forget what was told of a target."""
        for name in [name for name in self._gauges if name[0] == target_key]:
            del self._gauges[name]
