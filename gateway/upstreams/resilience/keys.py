# Which key a target is asked with: each in its turn, but for those that are in cooldown, and for those that have no
# room by their provider's own limits while another has.

from __future__ import annotations

from collections import Counter

import structlog

from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.resilience.allowances import Allowances
from gateway.upstreams.resilience.cooldown import (
    LONGEST,
    REFUSED_FOR,
    SPENT_FOR,
    UNTOLD,
    Cooldown,
    Cooldowns,
    at_provider,
    at_target,
    fingerprint,
)
from gateway.upstreams.wire.errors import UpstreamFailure
from gateway.upstreams.wire.limits import Left
from router.catalog.targets import Target

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
        self.registry = registry  # of the configuration that holds now

    def deal(self, target: Target, now: float, tokens: int | None = None) -> str | None:
        """Return the next key for ``target``, ``None`` if it needs none. Raises TargetAway when all are at a limit.

        It is for a call of about so many tokens; for one that counts against no limit where ``tokens`` is unsaid.
        """
        provider = target.model.provider
        key = self.registry.next_key_at(target)
        if not self.cooldowns and not self.allowances:
            return key
        limits: list[Cooldown] = []
        short: list[str | None] = []
        poor: list[str | None] = []
        for _ in self._of(target):
            if (limited := self.cooldowns.find(at_target(target.key, key), now)) is not None:
                limits.append(limited)
            elif self.cooldowns.find(at_provider(provider, key), now) is not None:
                poor.append(key)
            elif tokens is not None and not self.allowances.covers(target.key, key, tokens, now):
                short.append(key)
            else:
                return self._take(target, key, tokens, now)
            key = self.registry.next_key_at(target)
        if not short and not poor:
            raise _away(limits, now)
        # Short: its provider may count otherwise. Poor: refused lately; used where there is no better one, so that the
        # gateway learns at once when it is accepted again.
        return self._take(target, (short or poor)[0], tokens, now)

    def hear(self, target: Target, key: str | None, told: list[Left], now: float) -> None:
        """Take over what the answer to a call with ``key`` says of its limits."""
        if told or self.allowances:
            self.allowances.hear(target.key, key, told, now)
            self._rest_if_empty(target, key, now)

    def cool_down(self, target: Target, key: str | None, failure: UpstreamFailure, now: float) -> bool:
        """Let rest what a failed attempt with ``key`` tells to leave alone; return whether it does."""
        provider = target.model.provider
        match failure.outcome:
            case "rate_limited" | "full" as why:
                seconds = UNTOLD if failure.retry_after is None else min(LONGEST, failure.retry_after)
                for one in (key,) if why == "rate_limited" else self._of(target):
                    self.cooldowns.put(at_target(target.key, one), Cooldown(now + seconds, why))
            case "refused_key" | "spend_cap" as why:
                seconds = REFUSED_FOR if why == "refused_key" else SPENT_FOR
                if self.cooldowns.find(at_provider(provider, key), now) is None:
                    log.error("key_set_aside", provider=provider, key=fingerprint(key), reason=why, seconds=seconds)
                self.cooldowns.put(at_provider(provider, key), Cooldown(now + seconds, why))
            case _:
                return False
        return True

    def use_again(self, target: Target) -> None:
        """End the cooldowns at ``target``, and at all of its provider's endpoints."""
        for key in self._of(target):
            self.cooldowns.forget((at_target(target.key, key), at_provider(target.model.provider, key)))
        self.allowances.forget(target.key)

    def why_away(self, target: Target, now: float) -> TargetAway | None:
        """Return why no key may be used at ``target``: all are at a limit; ``None`` when one is not."""
        limits = [self.cooldowns.find(at_target(target.key, key), now) for key in self._of(target)]
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
                cooldown = self.cooldowns.find(at_provider(provider, key), now)
                for why in ("refused_key", "spend_cap"):
                    found[provider, why] += cooldown is not None and cooldown.why == why
        return found

    def _take(self, target: Target, key: str | None, tokens: int | None, now: float) -> str | None:
        if tokens is not None:
            self.allowances.take(target.key, key, tokens)
            self._rest_if_empty(target, key, now)
        return key

    def _rest_if_empty(self, target: Target, key: str | None, now: float) -> None:
        if (until := self.allowances.empty_until(target.key, key, now)) > now:
            self.cooldowns.put(at_target(target.key, key), Cooldown(min(until, now + LONGEST), "rate_limited"))

    def _of(self, target: Target) -> tuple[str | None, ...]:
        return self.registry.settings_at(target).api_keys or (None,)

    def _find(self, target: Target, key: str | None, now: float) -> Cooldown | None:
        limited = self.cooldowns.find(at_target(target.key, key), now)
        return limited or self.cooldowns.find(at_provider(target.model.provider, key), now)


def _away(limits: list[Cooldown], now: float) -> TargetAway:
    """Return what to say of a target each of whose keys is at a limit."""
    soonest = min(cooldown.until for cooldown in limits)
    is_busy = all(cooldown.why == "rate_limited" for cooldown in limits)
    reason = "its upstream's rate limit is reached" if is_busy else "its engine takes no more calls"
    return TargetAway(soonest - now, reason, is_busy=is_busy, is_limit=True)
