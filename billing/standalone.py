# What a gateway may still spend while Redis is away: its share of the last remainder that it knew.

from __future__ import annotations

from collections import deque

from msgspec import Struct

from billing.holds import Hold, HoldRequest, LimitName, RefusedHold, Scope, Settlement

MINUTE = 60.0


class Room(Struct, frozen=True):
    """What a scope had left, by limit, when Redis last answered; unlimited quantities are missing."""

    left: dict[LimitName, int]


class Standalone:
    """This process's own small books, for one outage. Cleared when Redis answers again.

    Quantities that flow back by themselves (per minute, at a time) are counted over their own span; what a day or a
    month has left is only ever used up.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._rooms: dict[tuple[str, str], Room] = {}
        self._spent: dict[tuple[str, str, LimitName], int] = {}
        self._recent: dict[tuple[str, str], deque[tuple[float, int]]] = {}
        self._holds: dict[str, HoldRequest] = {}

    def remember(self, scope: Scope, left: dict[LimitName, int]) -> None:
        """Keep what Redis says a scope has left."""
        self._rooms[scope.kind, scope.id] = Room(left)

    def open(self, request: HoldRequest, now: float) -> Hold | RefusedHold:
        """Hold against this process's share, or say which share has no room."""
        for scope in request.scopes:
            refused = self._check(scope, request, now)
            if refused is not None:
                return refused
        for scope in request.scopes:
            self._recent.setdefault((scope.kind, scope.id), deque()).append((now, request.tokens))
            self._add(scope, request.tokens, request.cost_nanousd, calls=1)
        self._holds[request.request_id] = request
        return Hold(request=request, opened_at=now, standalone=True)

    def settle(self, request_id: str, used: Settlement | None) -> None:
        """Put what was used in place of the hold; ``None`` gives all of it back."""
        request = self._holds.pop(request_id, None)
        if request is None:
            return
        tokens = used.usage.total_tokens if used else 0
        cost = used.cost_nanousd if used else 0
        for scope in request.scopes:
            self._add(scope, tokens - request.tokens, cost - request.cost_nanousd, calls=-1)

    def clear(self) -> None:
        """Forget the outage: Redis counts again. Holds that are still open settle there."""
        self._spent.clear()
        self._recent.clear()
        self._holds.clear()

    def _add(self, scope: Scope, tokens: int, cost: int, *, calls: int) -> None:
        changes = {
            LimitName.CONCURRENT_REQUESTS: calls,
            LimitName.TOKENS_PER_DAY: tokens,
            LimitName.USD_PER_DAY: cost,
            LimitName.USD_PER_MONTH: cost,
        }
        for limit, change in changes.items():
            key = (scope.kind, scope.id, limit)
            self._spent[key] = self._spent.get(key, 0) + change

    def _check(self, scope: Scope, request: HoldRequest, now: float) -> RefusedHold | None:
        recent = self._recent.get((scope.kind, scope.id), deque())
        while recent and recent[0][0] <= now - MINUTE:
            recent.popleft()
        room = self._rooms.get((scope.kind, scope.id))
        for limit, cap, wanted in demands(scope, request):
            match limit:
                case LimitName.REQUESTS_PER_MINUTE:
                    base, spent = cap, len(recent)
                case LimitName.TOKENS_PER_MINUTE:
                    base, spent = cap, sum(tokens for _, tokens in recent)
                case LimitName.CONCURRENT_REQUESTS:
                    base, spent = cap, self._spent.get((scope.kind, scope.id, limit), 0)
                case _:
                    base = room.left.get(limit, cap) if room else cap
                    spent = self._spent.get((scope.kind, scope.id, limit), 0)
            allowed = max(int(base * self._share), 1 if limit in SMALL else 0)
            if spent + wanted > allowed:
                return RefusedHold(
                    scope=scope,
                    limit=limit,
                    cap=cap,
                    used=cap - base,
                    held=spent,
                    wanted=wanted,
                    retry_after=1.0,
                    is_settled=False,
                    alone_exceeds=wanted > cap,
                )
        return None


SMALL = {LimitName.REQUESTS_PER_MINUTE, LimitName.CONCURRENT_REQUESTS}  # a share of a small number is at least one


def demands(scope: Scope, request: HoldRequest) -> list[tuple[LimitName, int, int]]:
    """Return (limit, cap, what the request wants of it) for every limit that the scope has."""
    limits, tokens, cost = scope.limits, request.tokens, request.cost_nanousd
    listed = (
        (LimitName.REQUESTS_PER_MINUTE, limits.requests_per_minute, 1),
        (LimitName.TOKENS_PER_MINUTE, limits.tokens_per_minute, tokens),
        (LimitName.CONCURRENT_REQUESTS, limits.concurrent_requests, 1),
        (LimitName.TOKENS_PER_DAY, limits.tokens_per_day, tokens),
        (LimitName.USD_PER_DAY, limits.nanousd_per_day, cost),
        (LimitName.USD_PER_MONTH, limits.nanousd_per_month, cost),
    )
    return [(limit, cap, wanted) for limit, cap, wanted in listed if cap is not None]
