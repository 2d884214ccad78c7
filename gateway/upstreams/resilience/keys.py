# Which key a target is asked with: each in its turn, but for those that are in cooldown, and for those that have no
# room by their provider's own limits while another has. A team's own keys are taken in their order, the next where one
# rests, and what is known of them is known of no other's.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

import structlog

from gateway.core.keys import provider_fingerprint
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.resilience.cooldown import (
    LONGEST,
    REFUSED_FOR,
    SPENT_FOR,
    UNTOLD,
    Cooldown,
    Cooldowns,
    at_provider,
    at_target,
    mark_of,
)
from gateway.upstreams.wire.errors import UpstreamFailure
from gateway.upstreams.wire.limits import Left
from router.catalog.targets import Target

UNREADABLE = "none of its team's own keys can be read"

log = structlog.get_logger()


class TargetAway(Exception):
    """A target may not be asked now; ``retry_in`` is in seconds, infinite when a person decides.

    ``reason`` is told to callers: "its breaker is open".
    """

    def __init__(self, retry_in: float, reason: str, *, is_busy: bool, is_limit: bool = False) -> None:
        super().__init__()
        self.retry_in = retry_in
        self.reason = reason
        self.is_busy = is_busy  # a rate limit, not a breaker
        self.is_limit = is_limit  # it is well, and said itself when it takes calls again


class KeyRing:
    """The keys of all providers, and which of them rest where."""

    def __init__(self, registry: ProviderRegistry) -> None:
        self.cooldowns = Cooldowns()
        self.allowances = Allowances()
        self._own_allowances = Allowances()  # of teams' own keys
        self.registry = registry  # of the configuration that holds now

    def deal(self, target: Target, now: float, tokens: int | None = None) -> str | None:
        """Return the next key for ``target``, ``None`` if it needs none. Raises TargetAway when all are at a limit.

        It is for a call of about so many tokens; for one that counts against no limit where ``tokens`` is unsaid.
        """
        if target.own is None and not self.cooldowns.has_common and not self.allowances:
            return self.registry.next_key_at(target)
        allowances = self._allowances_of(target)
        limits: list[Cooldown] = []
        short: list[str | None] = []
        poor: list[str | None] = []
        for key in self._in_turn(target):
            if (limited := self.cooldowns.find(at_target(target, key), now)) is not None:
                limits.append(limited)
            elif self.cooldowns.find(at_provider(target, key), now) is not None:
                poor.append(key)
            elif tokens is not None and not allowances.covers(target.key, _gauged(target, key), tokens, now):
                short.append(key)
            else:
                return self._take(target, key, tokens, now)
        if not short and not poor:
            raise _away(limits, now)
        # Short: its provider may count otherwise. Poor: refused lately; used where there is no better one, so that the
        # gateway learns at once when it is accepted again.
        return self._take(target, (short or poor)[0], tokens, now)

    def hear(self, target: Target, key: str | None, told: list[Left], now: float) -> None:
        """Take over what the answer to a call with ``key`` says of its limits."""
        allowances = self._allowances_of(target)
        if told or allowances:
            allowances.hear(target.key, _gauged(target, key), told, now)
            self._rest_if_empty(target, key, now)

    def cool_down(self, target: Target, key: str | None, failure: UpstreamFailure, now: float) -> bool:
        """Let rest what a failed attempt with ``key`` tells to leave alone; return whether it does."""
        match failure.outcome:
            case "rate_limited" | "full" as why:
                seconds = UNTOLD if failure.retry_after is None else min(LONGEST, failure.retry_after)
                for one in (key,) if why == "rate_limited" else self._of(target):
                    self.cooldowns.put(at_target(target, one), Cooldown(now + seconds, why))
            case "refused_key" | "spend_cap" as why:
                seconds = REFUSED_FOR if why == "refused_key" else SPENT_FOR
                if self.cooldowns.find(at_provider(target, key), now) is None:
                    mark, provider = mark_of(target, key), target.model.provider
                    log.error("key_set_aside", provider=provider, key=mark, reason=why, seconds=seconds)
                self.cooldowns.put(at_provider(target, key), Cooldown(now + seconds, why))
            case _:
                return False
        return True

    def may_rest(self, target: Target) -> bool:
        """Whether anything is in cooldown that a target could be asked with."""
        return self.cooldowns.has_common if target.own is None else bool(self.cooldowns)

    def use_again(self, target: Target) -> None:
        """End the cooldowns at ``target``, and at all of its provider's endpoints, teams' own keys included."""
        for beginning in (target.key, target.model.provider):
            self.cooldowns.forget_begun_with(f"{beginning} ")
        for allowances in (self.allowances, self._own_allowances):
            allowances.forget(target.key)

    def why_away(self, target: Target, now: float) -> TargetAway | None:
        """Return why no key may be used at ``target``: all are at a limit; ``None`` when one is not."""
        limits = [self.cooldowns.find(at_target(target, key), now) for key in self._of(target)]
        return _away([limit for limit in limits if limit is not None], now) if all(limits) else None

    def has_good_one(self, target: Target, now: float, other_than: str | None = None) -> bool:
        """Whether there is a key that is in cooldown neither at ``target`` nor at its provider."""
        return any(self._find(target, key, now) is None for key in self._of(target) if key is None or key != other_than)

    def cooldowns_of(self, target: Target, now: float) -> list[Cooldown]:
        """Return why and until when keys are not used at a target; one for each such key."""
        return [cooldown for key in self._of(target) if (cooldown := self._find(target, key, now)) is not None]

    def count_cooldowns(self, now: float) -> dict[tuple[str, str], int]:
        """Return how many keys of each provider are in cooldown at all of its endpoints, by why."""
        found = Counter[tuple[str, str]]()
        for provider in self.registry.names():
            for key in self.registry.settings(provider).api_keys:
                cooldown = self.cooldowns.find(f"{provider} {provider_fingerprint(key)}", now)
                for why in ("refused_key", "spend_cap"):
                    found[provider, why] += cooldown is not None and cooldown.why == why
        return found

    def _take(self, target: Target, key: str | None, tokens: int | None, now: float) -> str | None:
        if tokens is not None:
            self._allowances_of(target).take(target.key, _gauged(target, key), tokens)
            self._rest_if_empty(target, key, now)
        return key

    def _rest_if_empty(self, target: Target, key: str | None, now: float) -> None:
        until = self._allowances_of(target).empty_until(target.key, _gauged(target, key), now)
        if until > now:
            self.cooldowns.put(at_target(target, key), Cooldown(min(until, now + LONGEST), "rate_limited"))

    def _allowances_of(self, target: Target) -> Allowances:
        return self.allowances if target.own is None else self._own_allowances

    def _of(self, target: Target) -> tuple[str | None, ...]:
        keys = self.registry.keys_at(target)
        return keys or (None,) if target.own is None else keys

    def _in_turn(self, target: Target) -> Iterator[str | None]:
        """Yield each key of a target once, the one first whose turn it is."""
        if target.own is not None:
            yield from self.registry.keys_at(target)
            return
        for _ in self._of(target):
            yield self.registry.next_key_at(target)

    def _find(self, target: Target, key: str | None, now: float) -> Cooldown | None:
        limited = self.cooldowns.find(at_target(target, key), now)
        return limited or self.cooldowns.find(at_provider(target, key), now)


def _gauged(target: Target, key: str | None) -> str | None:
    """Return by what the limits of a key are known: a team's own is kept nowhere."""
    return key if target.own is None else mark_of(target, key)


def _away(limits: list[Cooldown], now: float) -> TargetAway:
    """Return what to say of a target each of whose keys is at a limit."""
    if not limits:
        return TargetAway(math.inf, UNREADABLE, is_busy=False)
    soonest = min(cooldown.until for cooldown in limits)
    is_busy = all(cooldown.why == "rate_limited" for cooldown in limits)
    reason = "its upstream's rate limit is reached" if is_busy else "its engine takes no more calls"
    return TargetAway(soonest - now, reason, is_busy=is_busy, is_limit=True)


# What a key may still ask of a target: by what its upstream last said, less what was asked since. No I/O: time is an
# argument, in monotonic seconds.
# Of a limit on tokens one part in so many must be there again before a key is asked that had none.
PART = 60


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
