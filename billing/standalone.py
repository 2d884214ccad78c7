# What a gateway may still spend while Redis is away: its share of the last remainder that it knew, and never more than
# its share of what the statements leave.

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator

import structlog
from msgspec import Struct

from billing.holds import (
    Hold,
    HoldRequest,
    LimitName,
    RefusedHold,
    Scope,
    Settlement,
    Sums,
    demands,
    headroom_of,
)
from billing.quota_verbs import month_of, period
from billing.scope_state import ScopeState

MINUTE = 60.0
ASK_WITHIN = 0.25  # seconds for what the statements say of a scope
ASK_AGAIN = 5.0  # seconds after which a scope's statements are asked for again, if Postgres did not answer

SMALL = {LimitName.REQUESTS_PER_MINUTE, LimitName.CONCURRENT_REQUESTS}  # a share of a small number is at least one
LASTING = {LimitName.TOKENS_PER_DAY, LimitName.USD_PER_DAY, LimitName.USD_PER_MONTH}  # only ever used up

log = structlog.get_logger(__name__)


class Room(Struct, frozen=True):
    """What Redis told of a scope: for which day (since 1970), when (unix seconds), and who ran others' calls then."""

    day: int
    told_at: float
    state: ScopeState
    others: int  # calls of other processes that ran


class Share(Struct, frozen=True):
    """What this process may give of one limit, and what one request wants of it."""

    scope: Scope
    limit: LimitName
    cap: int
    wanted: int
    base: int | None  # what the limit has left for all processes; None: nobody says
    spent: int  # of the share
    left: int  # of the share


class Minute:
    """The calls of the last minute, and the tokens that they may use."""

    def __init__(self) -> None:
        self.tokens = 0
        self._calls: deque[tuple[float, int]] = deque()  # when each began, and its tokens

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, now: float, tokens: int) -> None:
        """Count a call that begins now."""
        self._calls.append((now, tokens))
        self.tokens += tokens

    def forget(self, now: float) -> None:
        """Count those no more that began a minute ago."""
        while self._calls and self._calls[0][0] <= now - MINUTE:
            self.tokens -= self._calls.popleft()[1]


AskStatements = Callable[[Scope, str, int], Awaitable[Sums]]  # scope, team id, day since 1970


class Standalone:
    """This process's own small books while Redis is away.

    What Redis last told of a minute, or as running, counts against those limits for a minute more; then it has flowed
    back, or nobody can know. What a day or a month has left is only ever used up. What was spent of a remainder stays
    spent, through any number of outages, until Redis tells a newer remainder.
    """

    def __init__(self, share: float) -> None:
        self.ask_statements: AskStatements | None = None
        self.share = share
        self._rooms: dict[tuple[str, str], Room] = {}  # what Redis last told
        self._sums: dict[tuple[str, str, int], tuple[float, Sums | None]] = {}  # asked in this outage, and when
        self._asking: dict[tuple[str, str, int], asyncio.Future[None]] = {}
        self._spent: dict[tuple[str, str], dict[tuple[LimitName, int], int]] = {}  # by limit and its day or month
        self._recent: dict[tuple[str, str], Minute] = {}
        self._holds: dict[str, HoldRequest] = {}
        self._own: dict[tuple[str, str], int] = {}  # calls of this process that run, wherever they are held

    def began(self, request: HoldRequest) -> None:
        """Count a call of this process that runs from now on."""
        if request.is_aside:
            return
        for scope in request.scopes:
            name = (scope.kind, scope.id)
            self._own[name] = self._own.get(name, 0) + 1

    def ended(self, request: HoldRequest) -> None:
        """Count it no more."""
        if request.is_aside:
            return
        for scope in request.scopes:
            name = (scope.kind, scope.id)
            if self._own[name] == 1:
                del self._own[name]
            else:
                self._own[name] -= 1

    def remember(self, scope: Scope, day: int, state: ScopeState, now: float) -> None:
        """Keep what Redis says a scope has used and held; what we spent without it is in there."""
        name = (scope.kind, scope.id)
        self._rooms[name] = Room(day, now, state, max(0, state.live - self._own.get(name, 0)))
        if self._spent:
            self._spent.pop(name, None)
        if self._recent:
            self._recent.pop(name, None)

    async def learn(self, request: HoldRequest, now: float) -> None:
        """Ask the statements for what they say of the request's scopes: once per scope and outage."""
        if self.ask_statements is None:
            return
        day, _ = period(request.request_id)
        missing = [
            scope
            for scope in request.scopes
            if any(limit in LASTING for limit, _, _ in demands(scope, request)) and not self._has_asked(scope, day, now)
        ]
        if missing:
            await asyncio.gather(*(self._ask_once(scope, request.team_id, day, now) for scope in missing))

    def open(self, request: HoldRequest, now: float) -> Hold | RefusedHold:
        """Hold against this process's share, or say which share has no room."""
        shares = [share for scope in request.scopes for share in self._shares(scope, request, now)]
        for share in shares:
            if share.wanted > share.left:
                return RefusedHold(
                    scope=share.scope,
                    limit=share.limit,
                    cap=share.cap,
                    used=share.cap - (share.base or 0),
                    held=share.spent,
                    wanted=share.wanted,
                    retry_after=1.0,
                    is_settled=False,
                    alone_exceeds=share.wanted > share.cap,
                    headroom=headroom_of((one.limit, one.left) for one in shares),
                    is_unknown=share.base is None,
                )
        for scope in request.scopes:
            name = (scope.kind, scope.id)
            if not request.is_aside:
                self._recent.setdefault(name, Minute()).add(now, request.tokens)
            self._spend(scope, request, request.tokens, request.cost_nanousd)
        self._holds[request.request_id] = request
        return Hold(request=request, standalone=True)

    def settle(self, request_id: str, used: Settlement | None) -> None:
        """Put what was used in place of the hold; ``None`` gives all of it back."""
        request = self._holds.pop(request_id, None)
        if request is None:
            return
        tokens = used.usage.total_tokens if used else 0
        cost = used.cost_nanousd if used else 0
        for scope in request.scopes:
            self._spend(scope, request, tokens - request.tokens, cost - request.cost_nanousd)

    def end_outage(self) -> None:
        """Redis counts again, and knows every hold that was opened here."""
        self._sums.clear()
        self._holds.clear()

    def _shares(self, scope: Scope, request: HoldRequest, now: float) -> Iterator[Share]:
        """Yield this process's share of each limit of a scope that counts for the request."""
        name = (scope.kind, scope.id)
        recent = self._recent.get(name) or Minute()
        recent.forget(now)
        for limit, cap, wanted in demands(scope, request):
            base: int | None
            match limit:
                case LimitName.REQUESTS_PER_MINUTE:
                    base, spent = self._flowing(scope, limit, cap, now), len(recent)
                case LimitName.TOKENS_PER_MINUTE:
                    base, spent = self._flowing(scope, limit, cap, now), recent.tokens
                case LimitName.CONCURRENT_REQUESTS:
                    base, spent = self._beside_others(scope, cap, now), self._own.get(name, 0)
                case _:
                    base = self._remainder(scope, request, limit, cap)
                    spent = self._spent.get(name, {}).get((limit, _span(limit, request)), 0)
            allowed = max(int((base or 0) * self.share), 1 if base and limit in SMALL else 0)
            yield Share(scope, limit, cap, wanted, base, spent, allowed - spent)

    def _flowing(self, scope: Scope, limit: LimitName, cap: int, now: float) -> int:
        """Return what is left of a limit that flows back: for a minute, no more than what Redis last told."""
        room = self._rooms.get((scope.kind, scope.id))
        if room is None or now - room.told_at >= MINUTE:
            return cap
        return max(0, cap - sum(room.state.used_and_held(limit)))

    def _beside_others(self, scope: Scope, cap: int, now: float) -> int:
        """Return how many calls may run beside those of other processes: for a minute, those that Redis last told."""
        room = self._rooms.get((scope.kind, scope.id))
        return cap if room is None or now - room.told_at >= MINUTE else max(0, cap - room.others)

    def _remainder(self, scope: Scope, request: HoldRequest, limit: LimitName, cap: int) -> int | None:
        """Return what a day or month has left as far as anybody told us; ``None`` when nobody did."""
        day, month = period(request.request_id)
        known = []
        if (room := self._rooms.get((scope.kind, scope.id))) is not None:
            is_same = room.day == day if limit is not LimitName.USD_PER_MONTH else month_of(room.day) == month
            known.append(cap - sum(room.state.used_and_held(limit)) if is_same else cap)
        if (sums := self._sums.get((scope.kind, scope.id, day), (0.0, None))[1]) is not None:
            match limit:
                case LimitName.TOKENS_PER_DAY:
                    known.append(cap - sums.day_tokens)
                case LimitName.USD_PER_DAY:
                    known.append(cap - sums.day_nanousd)
                case _:
                    known.append(cap - sums.month_nanousd)
        return max(0, min(known)) if known else None

    def _spend(self, scope: Scope, request: HoldRequest, tokens: int, cost: int) -> None:
        spent = self._spent.setdefault((scope.kind, scope.id), {})
        for limit, change in (
            (LimitName.TOKENS_PER_DAY, tokens),
            (LimitName.USD_PER_DAY, cost),
            (LimitName.USD_PER_MONTH, cost),
        ):
            key = (limit, _span(limit, request))
            spent[key] = spent.get(key, 0) + change

    def _has_asked(self, scope: Scope, day: int, now: float) -> bool:
        asked_at, sums = self._sums.get((scope.kind, scope.id, day), (-ASK_AGAIN, None))
        return sums is not None or now - asked_at < ASK_AGAIN

    async def _ask_once(self, scope: Scope, team_id: str, day: int, now: float) -> None:
        """Ask, or wait for whoever is asking the same."""
        key = (scope.kind, scope.id, day)
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = asyncio.ensure_future(self._ask(scope, team_id, day, now))
            asking.add_done_callback(lambda _: self._asking.pop(key, None))
        await asyncio.wait((asking,))

    async def _ask(self, scope: Scope, team_id: str, day: int, now: float) -> None:
        assert self.ask_statements is not None
        sums = None
        try:
            async with asyncio.timeout(ASK_WITHIN):
                sums = await self.ask_statements(scope, team_id, day)
        except Exception as exc:  # Postgres is away too: we go by what we know
            log.info("statements_unreachable", team_id=team_id, error=repr(exc))
        self._sums[scope.kind, scope.id, day] = (now, sums)


def _span(limit: LimitName, request: HoldRequest) -> int:
    """Return the day or month in which the request counts against ``limit``."""
    day, month = period(request.request_id)
    return month if limit is LimitName.USD_PER_MONTH else day
