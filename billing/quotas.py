# Every limit of every scope, checked and held in one atomic step in Redis (quotas.lua), and settled in one more.

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from billing.edges import Clock
from billing.holds import Hold, HoldRequest, Limits, RefusedHold, Scope, Settlement
from billing.records import CHARGED, UsageRecord, bounded_cost, bounded_usage, day_of
from billing.scope_state import ScopeState, refusal, remaining
from billing.script import Script
from billing.standalone import Standalone, demands
from protocol.usage import Usage

DEADLINE = 0.25  # seconds for any call to Redis
LEASE = 30.0  # seconds a hold lives without being renewed
AWAY = 1.0  # seconds between tries while Redis does not answer

SCRIPT = resources.files(__package__).joinpath("quotas.lua").read_text()
UNREACHABLE = (RedisError, OSError, TimeoutError)
# Errors of a Redis that cannot serve now and may later. Any other error is about the command alone.
NOT_NOW = re.compile(
    r"(^|-)(OOM|READONLY|LOADING|MISCONF|BUSY|NOSCRIPT|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOREPLICAS|NOAUTH|MOVED|ASK)\b"
)
NO_LIMITS = Limits()

log = structlog.get_logger(__name__)


class Quotas:
    """The limits of all teams. Safe for any number of concurrent calls and gateways.

    No call waits for Redis longer than 250 ms or fails because of it: what cannot be said now is said later, and calls
    are held against this process's share of the last known remainder meanwhile (``is_standalone``).
    """

    def __init__(
        self,
        redis: Redis,
        clock: Clock,
        *,
        standalone_share: float = 0.25,
        uses_server_time: bool = True,
        deadline: float = DEADLINE,
    ) -> None:
        self.exceeded = 0  # calls whose upstream billed more than was held
        self.refused = 0  # commands that Redis refused for good: its counters lack them, and the audit will say so
        self.is_standalone = False
        self._script = Script(redis, SCRIPT, deadline=deadline)
        self._clock = clock
        self._uses_server_time = uses_server_time
        self._server_ahead = 0.0  # seconds; what Redis's clock shows more than ours
        self._standalone = Standalone(standalone_share)
        self._retry_at = 0.0
        self._unsaid: dict[str, list[Any]] = {}  # request id -> the call that Redis has yet to hear
        self._repeating: asyncio.Task[None] | None = None

    async def open(self, request: HoldRequest) -> Hold | RefusedHold:
        """Hold the dearest leg against every limit of every scope, all or nothing."""
        if self._is_away():
            return self._standalone.open(request, self._clock.now())
        try:
            code, time, states, refusals = await self._call(
                _open_args(request, request.valid_until + self._server_ahead)
            )
        except UNREACHABLE as exc:
            # It may have been held after all, or in part: give that back as soon as Redis hears us.
            self._failed(exc, request.request_id)
            self._say_later(request.request_id, _release_args(request))
            return self._standalone.open(request, self._clock.now())
        self._found(time / 1000)
        known = [ScopeState(*state) for state in states]
        if code == 1:
            return self._held(request, known)
        return refusal(request, known, refusals)

    async def renew(self, hold: Hold, used: Settlement) -> bool:
        """Keep a running call's hold for another lease. False when it was freed meanwhile."""
        if hold.standalone or self._is_away():
            return True
        request = hold.request
        try:
            return bool(await self._call(_renew_args(request, used)))
        except UNREACHABLE as exc:
            self._failed(exc, request.request_id)
            return True

    async def settle(self, hold: Hold, used: Settlement) -> None:
        """Book what the call really used in place of its hold. Once per request id, however often it is said."""
        if used.cost_nanousd > hold.request.cost_nanousd or used.usage.total_tokens > hold.request.tokens:
            self.exceeded += 1
            log.warning("hold_exceeded", request_id=hold.request.request_id, cost=used.cost_nanousd)
        self._standalone.settle(hold.request.request_id, used)
        await self._say(hold.request.request_id, _settle_args(hold.request, used))

    async def release(self, hold: Hold) -> None:
        """Give the whole hold back: the call cost nothing."""
        self._standalone.settle(hold.request.request_id, None)
        if not hold.standalone:
            await self._say(hold.request.request_id, _release_args(hold.request))

    async def book(self, records: Sequence[UsageRecord]) -> None:
        """Settle calls of dead processes as their journals say; what was settled before changes nothing."""
        for record in records:
            scopes = (Scope("team", record.team_id, NO_LIMITS), Scope("key", record.key_id, NO_LIMITS))
            request = HoldRequest(
                request_id=record.request_id, team_id=record.team_id, scopes=scopes, legs=(), valid_until=0.0
            )
            usage = Usage(record.input_tokens, output_tokens=record.output_tokens)
            owed = Settlement(usage, record.cost_nanousd) if record.status in CHARGED else None
            await self._say(record.request_id, _settle_args(request, owed) if owed else _release_args(request))

    async def usage(self, team_id: str, *, day: int | None = None, key_id: str | None = None) -> ScopeState:
        """Return what a team, or one of its keys, has used and held; ``day`` in days since 1970, default today.

        Raises what Redis raises: a console or an audit would rather know.
        """
        day = int(self._clock.now() // 86_400) if day is None else day
        scope = "team" if key_id is None else f"key:{key_id}"
        return ScopeState(*await self._call(["usage", team_id, "", scope, day, month_of(day)]))

    async def sweep(self, team_id: str, most: int = 1000) -> list[str]:
        """Free the holds of a team whose leases have ended, and return their request ids. Raises what Redis raises."""
        return [which.decode() for which in await self._call(["sweep", team_id, "", most])]

    def _held(self, request: HoldRequest, states: Sequence[ScopeState]) -> Hold:
        for scope, state in zip(request.scopes, states, strict=True):
            left = {limit: cap - sum(state.used_and_held(limit)) for limit, cap, _ in demands(scope, request)}
            self._standalone.remember(scope, left)
        requests, tokens = remaining(request, states)
        return Hold(request=request, opened_at=self._clock.now(), requests=requests, tokens=tokens)

    async def _say(self, request_id: str, args: list[Any]) -> None:
        """Tell Redis now, or as soon as it can be reached."""
        if self._is_away():
            self._say_later(request_id, args)
            return
        try:
            await self._call(args)
        except UNREACHABLE as exc:
            self._failed(exc, request_id)
            if not _is_refusal(exc):
                self._say_later(request_id, args)

    def _say_later(self, request_id: str, args: list[Any]) -> None:
        self._unsaid[request_id] = args
        if self._repeating is None or self._repeating.done():
            self._repeating = asyncio.create_task(self._repeat())

    async def _repeat(self) -> None:
        """Say everything unsaid once Redis answers; all of it may be said twice. What it refuses is not said again."""
        while self._unsaid:
            request_id, args = next(iter(self._unsaid.items()))
            try:
                await self._call(args)
            except UNREACHABLE as exc:
                self._failed(exc, request_id)
                if not _is_refusal(exc):
                    await asyncio.sleep(AWAY)
                    continue
            else:
                self._found(None)
            if self._unsaid.get(request_id) is args:
                del self._unsaid[request_id]

    async def _call(self, args: list[Any]) -> Any:
        """Run one verb of the script on its team's keys: args are verb, team, and what follows the time."""
        verb, team_id, *rest = args
        time = "" if self._uses_server_time else repr(self._clock.now())
        return await self._script.call(f"tollgate:{{{team_id}}}", verb, time, *rest)

    def _is_away(self) -> bool:
        return self.is_standalone and self._clock.now() < self._retry_at

    def _failed(self, exc: Exception, request_id: str) -> None:
        """Note what a failed call tells of Redis: that it is away, or that it is there and refuses this command."""
        if _is_refusal(exc):
            self.refused += 1
            log.error("redis_refused", request_id=request_id, error=repr(exc))
            self._found(None)
        else:
            self._lost(exc)

    def _lost(self, exc: Exception) -> None:
        if not self.is_standalone:
            log.error("redis_lost", error=repr(exc))
        self.is_standalone = True
        self._retry_at = self._clock.now() + AWAY

    def _found(self, server_time: float | None) -> None:
        if server_time is not None and self._uses_server_time:
            self._server_ahead = server_time - self._clock.now()
        if self.is_standalone:
            log.info("redis_found", unsaid=len(self._unsaid))
            self.is_standalone = False
            self._standalone.clear()


def month_of(day: int) -> int:
    """Return the month of a day since 1970, counted in months since year 0."""
    moment = datetime.fromtimestamp(day * 86_400, UTC)
    return moment.year * 12 + moment.month


def _is_refusal(exc: Exception) -> bool:
    """Whether Redis answered, and would answer the same again: an overflow, a key of another type, a faulty script."""
    return type(exc) is ResponseError and NOT_NOW.search(str(exc)) is None


def _period(request_id: str) -> tuple[int, int]:
    day = day_of(request_id)
    return day, month_of(day)


def _name(scope: Scope) -> str:
    return "team" if scope.kind == "team" else f"{scope.kind}:{scope.id}"


def _open_args(request: HoldRequest, valid_until: float) -> list[Any]:
    args: list[Any] = ["open", request.team_id, request.request_id, valid_until, LEASE]
    args += [request.tokens, request.cost_nanousd, *_period(request.request_id)]
    for scope in request.scopes:
        limits = scope.limits
        caps = (
            limits.requests_per_minute,
            limits.tokens_per_minute,
            limits.concurrent_requests,
            limits.tokens_per_day,
            limits.nanousd_per_day,
            limits.nanousd_per_month,
        )
        args += [_name(scope), *("" if cap is None else cap for cap in caps)]
    return args


def _renew_args(request: HoldRequest, used: Settlement) -> list[Any]:
    so_far = _amounts(used)
    as_opened = [request.tokens, request.cost_nanousd, *_period(request.request_id)]
    return ["renew", request.team_id, request.request_id, LEASE, *so_far, *as_opened, *map(_name, request.scopes)]


def _settle_args(request: HoldRequest, used: Settlement) -> list[Any]:
    amounts = [*_amounts(used), *_period(request.request_id)]
    return ["settle", request.team_id, request.request_id, *amounts, *map(_name, request.scopes)]


def _amounts(used: Settlement) -> list[int]:
    """Return tokens and nano-dollars as the ledger will have them."""
    return [bounded_usage(used.usage).total_tokens, bounded_cost(used.cost_nanousd)]


def _release_args(request: HoldRequest) -> list[Any]:
    return ["release", request.team_id, request.request_id]
