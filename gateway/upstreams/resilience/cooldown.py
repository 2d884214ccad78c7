# What is left alone for a while: a key at a target whose rate limit it met, a key that its provider refuses.
# No I/O: time is an argument, in monotonic seconds.

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from gateway.core.keys import provider_fingerprint
from router.catalog.targets import Target

LONGEST = 60.0  # seconds for a rate limit, whatever the upstream says
UNTOLD = 1.0  # when it says nothing
REFUSED_FOR = 300.0  # for a key that the provider refuses
SPENT_FOR = 60.0  # for a key whose account is used up


class Cooldown(Struct, frozen=True):
    """One thing in cooldown, ``until`` monotonic seconds, and why.

    ``rate_limited`` and ``full`` are of one target, ``refused_key`` and ``spend_cap`` of a provider.
    """

    until: float
    why: str


class Cooldowns:
    """Everything in cooldown, by name. What is new waits in ``news`` for the other gateways to hear of it."""

    def __init__(self) -> None:
        self.news: set[str] = set()
        self.has_common = False  # any that is not of a team's own key alone
        self._cooldowns: dict[str, Cooldown] = {}

    def __bool__(self) -> bool:
        return bool(self._cooldowns)

    def put(self, name: str, cooldown: Cooldown) -> None:
        """Put something into cooldown, or for longer."""
        known = self._cooldowns.get(name)
        if known is None or known.until < cooldown.until:
            self._cooldowns[name] = cooldown
            self.news.add(name)
            self.has_common = self.has_common or not _is_own(name)

    def find(self, name: str, now: float) -> Cooldown | None:
        """Return why and until when something is in cooldown, if it is."""
        if not self._cooldowns or (cooldown := self._cooldowns.get(name)) is None:
            return None
        if cooldown.until > now:
            return cooldown
        del self._cooldowns[name]
        self._look_for_common()
        return None

    def forget(self, names: Iterable[str]) -> None:
        """End the cooldowns of some names."""
        for name in names:
            if self._cooldowns.pop(name, None) is not None:
                self.news.add(name)
        self._look_for_common()

    def forget_ended(self, now: float) -> None:
        """Forget what is over; while Redis answers, what all know takes its place anyway."""
        self._cooldowns = {name: cooldown for name, cooldown in self._cooldowns.items() if cooldown.until > now}
        self._look_for_common()

    def forget_begun_with(self, beginning: str) -> None:
        """End the cooldowns of all names that begin so."""
        self.forget([name for name in self._cooldowns if name.startswith(beginning)])

    def names(self) -> list[str]:
        """Return what is in cooldown, or was until lately."""
        return list(self._cooldowns)

    def agree(self, shared: dict[str, Cooldown], told: Mapping[str, Cooldown | None]) -> None:
        """Take over what all gateways know, who were ``told`` so much; what has changed here since then stays news."""
        self.news -= {name for name, cooldown in told.items() if self._cooldowns.get(name) == cooldown}
        unsaid = {name: cooldown for name, cooldown in self._cooldowns.items() if name in self.news}
        unsaid_gone = self.news - unsaid.keys()
        self._cooldowns = {name: cooldown for name, cooldown in shared.items() if name not in unsaid_gone} | unsaid
        self._look_for_common()

    def _look_for_common(self) -> None:
        self.has_common = any(not _is_own(name) for name in self._cooldowns)


def at_target(target: Target, api_key: str | None) -> str:
    """Return the name of a key at one target."""
    return f"{target.key} {mark_of(target, api_key)}"


def at_provider(target: Target, api_key: str | None) -> str:
    """Return the name of a key at all endpoints of a target's provider."""
    return f"{target.model.provider} {mark_of(target, api_key)}"


def mark_of(target: Target, api_key: str | None) -> str:
    """Return what tells a key from others of its provider. The same key in two hands has two: what one of them is told
    of it rests on the other's word no more than on a guess at it."""
    mark = provider_fingerprint(api_key) if api_key else "-"
    return mark if target.own is None else f"{target.own.team}:{mark}"


def _is_own(name: str) -> bool:
    """Whether a name is of a team's own key."""
    return ":" in name.rpartition(" ")[2]
