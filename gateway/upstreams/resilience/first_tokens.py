# How soon each target has lately sent a first token: what the router goes by where targets cost about the same.

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from gateway.core.clock import Clock
from router.catalog.targets import HEALTHY, Target, TargetHealth

NEWEST = 0.2  # what the newest stream counts in the mean; those before it, the rest
BELIEVED = 60.0  # seconds without a stream, after which a target is tried again as if nothing were known of it


class FirstTokens:
    """A forecast for each target that has lately streamed to a client that waits, as this process saw it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[float, TargetHealth]] = {}  # when a stream last began, and the forecast
        self._forecasts: dict[str, TargetHealth] = {}
        self._oldest = 0.0  # no stream of ``_seen`` is older

    def note(self, target: Target, seconds: float) -> None:
        """A stream's first token came so long after it was asked for."""
        if target.own is not None:
            return  # another account may be served otherwise
        milliseconds, known = seconds * 1000, self._forecasts.get(target.key)
        if known is not None:
            milliseconds = known.first_token_ms + NEWEST * (milliseconds - known.first_token_ms)
        forecast = replace(HEALTHY, first_token_ms=milliseconds)
        self._seen[target.key] = (self._clock.monotonic(), forecast)
        self._forecasts[target.key] = forecast

    def beside(self, health: Mapping[str, TargetHealth]) -> Mapping[str, TargetHealth]:
        """Return what is forecast, by ``Target.key``, and ``health`` of those that are in it: they go last anyhow."""
        now = self._clock.monotonic()
        if self._seen and now - self._oldest > BELIEVED:
            self._seen = {key: seen for key, seen in self._seen.items() if now - seen[0] <= BELIEVED}
            self._forecasts = {key: forecast for key, (_, forecast) in self._seen.items()}
            self._oldest = min((at for at, _ in self._seen.values()), default=now)
        return {**self._forecasts, **health} if health else self._forecasts
