# The hold: what is reserved for a call before any upstream hears of it. Shapes only; quotas.py does the work.

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from protocol.usage import Usage


class Limits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of one scope. ``None`` is no limit. Money is nano-dollars."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    nanousd_per_day: int | None = None
    nanousd_per_month: int | None = None


class Scope(Struct, frozen=True):
    """Whose limits: a team's, one of its keys', or a team's for one model, one end user or one value of a tag. All
    scopes of a team share one hash tag in Redis."""

    kind: str  # "team", "key", "model", "user" or "tag"
    id: str  # "TEAM/MODEL", "TEAM/HASH" of a user, "TEAM/KEY=HASH" of a tag
    limits: Limits
    model: str = ""  # whose calls alone count; empty: all of them

    @property
    def name(self) -> str:
        """What balances and leases call it."""
        return f"{self.kind}:{self.id}"


OF_VALUES = ("user:", "tag:")  # what the names of scopes begin with that calls bring along: nothing lists these before


class NamedLimits(Struct, frozen=True):
    """Limits of one end user or one value of a tag, or of each that has none of its own ("*")."""

    name: str  # as admins say it
    limits: Limits


class Leg(Struct, frozen=True):
    """The most that one target of the route could use and cost."""

    target: str  # Target.key
    tokens: int
    cost_nanousd: int
    model: str = ""  # ModelSpec.name


class HoldRequest(Struct, frozen=True, kw_only=True):
    """What a call asks to reserve: the dearest leg."""

    request_id: str
    team_id: str
    scopes: tuple[Scope, ...]
    legs: tuple[Leg, ...]
    is_internal: bool = (
        False  # the deployment's own: no request of the team, in no minute's rate and beside no other call
    )

    @property
    def tokens(self) -> int:
        """Tokens held: the most of any leg."""
        most = 0
        for leg in self.legs:  # in a third of what max() and a generator take; a call asks half a dozen times
            if leg.tokens > most:
                most = leg.tokens
        return most

    @property
    def cost_nanousd(self) -> int:
        """Nano-dollars held: the most of any leg."""
        most = 0
        for leg in self.legs:
            if leg.cost_nanousd > most:
                most = leg.cost_nanousd
        return most

    @property
    def amounts(self) -> tuple[tuple[int, int], ...]:
        """Tokens and nano-dollars held of each scope: of a model's, the most of the legs that it would answer."""
        whole = self.tokens, self.cost_nanousd
        return tuple([whole if not scope.model else self._most_of(scope.model) for scope in self.scopes])

    def _most_of(self, model: str) -> tuple[int, int]:
        legs = [leg for leg in self.legs if leg.model == model]
        return max((leg.tokens for leg in legs), default=0), max((leg.cost_nanousd for leg in legs), default=0)


class LimitName(StrEnum):
    """Which limit refused."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    CONCURRENT_REQUESTS = "concurrent_requests"
    TOKENS_PER_DAY = "tokens_per_day"
    USD_PER_DAY = "usd_per_day"
    USD_PER_MONTH = "usd_per_month"
    SCOPES_PER_DAY = "scopes_per_day"  # end users, or values of tags, that a team's limits count of


class Remaining(Struct, frozen=True):
    """One limited quantity after the hold, for x-ratelimit headers. ``reset`` is seconds until it is whole again."""

    limit: int
    remaining: int
    reset: float


class Hold(Struct, frozen=True, kw_only=True):
    """Reserved, until settled or released."""

    request: HoldRequest
    owner: str = ""  # the process inside whose lease it is
    requests: Remaining | None = None  # the tightest per-minute request limit
    tokens: Remaining | None = None  # the tightest per-minute token limit


class Headroom(Struct, frozen=True):
    """What a call's limits leave to one call more: the least of all scopes. ``None``: no limit of that kind."""

    tokens: int | None = None
    nanousd: int | None = None


class RefusedHold(Struct, frozen=True, kw_only=True):
    """No room. ``retry_after`` is seconds from the very bucket that refused; ``None`` when waiting cannot help today.

    ``is_settled`` is true when what is settled alone leaves no room; ``alone_exceeds`` when this request would not fit
    even into an empty limit.
    """

    scope: Scope
    limit: LimitName
    cap: int
    used: int  # settled
    held: int
    wanted: int
    retry_after: float | None
    is_settled: bool
    alone_exceeds: bool
    is_unknown: bool = False  # Postgres does not say what is left: the limit cannot be checked now
    headroom: Headroom = Headroom()
    requests: Remaining | None = None
    tokens: Remaining | None = None


class Settlement(Struct, frozen=True):
    """What a call really used, booked in place of its hold."""

    usage: Usage
    cost_nanousd: int
    model: str = ""  # that answered, as the call's record names it


TOKEN_LIMITS = frozenset({LimitName.TOKENS_PER_MINUTE, LimitName.TOKENS_PER_DAY})
DOLLAR_LIMITS = frozenset({LimitName.USD_PER_DAY, LimitName.USD_PER_MONTH})


def headroom_of(left: Iterable[tuple[LimitName, int]]) -> Headroom:
    """Return the headroom of limits of which so much is left."""
    known = list(left)
    return Headroom(
        min((max(0, amount) for limit, amount in known if limit in TOKEN_LIMITS), default=None),
        min((max(0, amount) for limit, amount in known if limit in DOLLAR_LIMITS), default=None),
    )
