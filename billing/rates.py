# Rates: requests and tokens a minute, and running calls, of a team and its keys. Redis counts them (rates.lua), and
# every process draws slices from it: a quarter of what it admits in a second, to be used within a fifth of a second or
# given back. So a busy team costs a few trips a second in each process, and a call waits for none of them but the
# first, and those near a cap.
#
# A call counts from its beginning for sixty seconds and at most a bucket (a quarter of a second) more. While Redis is
# away each process admits its share (rate_shares.py) and tells Redis afterwards what it admitted when.

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from redis.asyncio import Redis

from billing.edges import Clock
from billing.holds import HoldRequest, Remaining, Scope
from billing.rate_scope import RateScope
from billing.rate_talk import DEADLINE, RateTalk
from billing.rate_team import Caller, refused
from billing.rate_words import BUCKETS, WINDOW, RefusedRate

FORGET = 120.0  # seconds after which a scope without calls is forgotten

Counted = tuple[int, int, list[RateScope]]  # bucket in which the call began, tokens held, its scopes


class Rates(RateTalk):
    """The rates of all teams, for one process. Nothing here raises for a Redis that is away."""

    def __init__(
        self, redis: Redis, clock: Clock, *, owner: str, uses_server_time: bool = True, deadline: float = DEADLINE
    ) -> None:
        """``owner`` names this start of the process, and no other; a call waits for ``deadline`` seconds at most."""
        super().__init__(redis, clock, owner=owner, uses_server_time=uses_server_time, deadline=deadline)
        self._scopes: dict[tuple[str, str], RateScope] = {}
        self._counted: dict[str, Counted] = {}  # running calls by request id

    def take(self, request: HoldRequest) -> bool | None:
        """Count a call inside what this process has drawn: all scopes and limits, or none. ``None``: ask Redis.

        A request without such limits, or aside, is counted nowhere.
        """
        if request.is_aside:
            return True
        scopes: list[RateScope] = []
        for scope in request.scopes:
            limits = scope.limits
            if (
                limits.requests_per_minute is not None
                or limits.tokens_per_minute is not None
                or limits.concurrent_requests is not None
            ):
                known = self._scopes.get((scope.kind, scope.id))
                if known is None or known.scope.limits is not limits:
                    known = self._meet(request, scope)
                scopes.append(known)
        if not scopes:
            return True
        now, tokens = self._monotonic(), 0
        for leg in request.legs:  # as request.tokens does, in half the time
            if leg.tokens > tokens:
                tokens = leg.tokens
        if self.is_away:
            return True if self._refuse_alone(request, scopes, tokens, now) is None else None
        for known in scopes:
            if now >= known.until or known.requests < 1 or known.tokens < tokens or known.slots < 1:
                return None
        bucket = int((now + self._ahead) * BUCKETS)
        for known in scopes:
            known.requests -= 1
            known.tokens -= tokens
            known.slots -= 1
            known.live += 1
            cell = known.cell if known.bucket == bucket else self._turn_to(known, bucket)
            cell[0] += 1
            cell[1] += tokens
            cell[2] += tokens
        self._counted[request.request_id] = (bucket, tokens, scopes)
        return True

    async def ask(self, request: HoldRequest) -> RefusedRate | None:
        """Ask Redis to count a call; ``None`` when it is counted. Callers that wait share a trip.

        Waits for the deadline at most, and not at all while Redis is away: then this process's share decides.
        """
        scopes = [self._meet(request, scope) for scope in request.scopes if _has_rates(scope)]
        if request.is_aside or not scopes:
            return None
        if self.is_away:
            return self._refuse_alone(request, scopes, request.tokens, self._monotonic())
        answer: asyncio.Future[RefusedRate | None] = asyncio.get_running_loop().create_future()
        team = self._team(request.team_id)
        team.waiting.append(Caller(request, scopes, answer))
        self._depart(team)
        try:
            return await answer
        except asyncio.CancelledError:
            self.release(request)  # it may have been counted just now
            answer.cancel()
            raise

    def settle(self, request: HoldRequest, tokens: int) -> None:
        """Count the tokens that a call has used in place of those held, and free its slot. Once."""
        if request.request_id in self._counted:
            self._end(request, 0, tokens)

    def release(self, request: HoldRequest) -> None:
        """Count a call no more, for it never ran."""
        if request.request_id in self._counted:
            self._end(request, -1, 0)

    def remaining(self, request: HoldRequest) -> tuple[Remaining | None, Remaining | None]:
        """Return the tightest limits of requests and tokens a minute: all owners' as last told, less our own since."""
        known = [self._scopes.get((scope.kind, scope.id)) for scope in request.scopes]
        left = [scope.remaining() for scope in known if scope is not None]
        return (
            min((of for of, _ in left if of is not None), key=lambda of: of.remaining, default=None),
            min((of for _, of in left if of is not None), key=lambda of: of.remaining, default=None),
        )

    def _meet(self, request: HoldRequest, scope: Scope) -> RateScope:
        known = self._scopes.get((scope.kind, scope.id))
        if known is None:
            known = self._scopes[scope.kind, scope.id] = RateScope(
                scope, request.team_id, self._team(request.team_id).touched
            )
        elif known.scope.limits is not scope.limits:
            known.adopt(scope)
        return known

    def _turn_to(self, scope: RateScope, bucket: int) -> list[int]:
        """Return the cell in which calls are counted from now on."""
        scope.touch()
        scope.bucket, scope.used, scope.cell = bucket, bucket, scope.cell_of(bucket)
        return scope.cell

    def _end(self, request: HoldRequest, requests: int, tokens: int) -> None:
        bucket, held, scopes = self._counted.pop(request.request_id)
        for scope in scopes:
            scope.live -= 1
            scope.slots += 1
            cell = scope.untold.get(bucket)
            if cell is None:
                scope.touch()
                cell = scope.cell_of(bucket)
            cell[0] += requests
            cell[1] += tokens - held
            cell[2] -= held
            if scope.share is not None:
                scope.share.spend(bucket, requests, tokens - held)
        team = self._teams[request.team_id]
        if team not in self._due:
            self._note(team)

    def _renew(self, now: float) -> None:
        for key, scope in list(self._scopes.items()):
            team = self._teams[scope.team_id]
            if scope.live and scope.caps[2] >= 0:
                scope.touch()
                self._note(team)
            elif not scope.live and now - scope.told_at > FORGET and team.is_silent:
                del self._scopes[key]
        used = {scope.team_id for scope in self._scopes.values()}
        for team_id, team in list(self._teams.items()):
            if team_id not in used and team.is_silent:
                del self._teams[team_id]

    def _come_back(self) -> None:
        for scope in self._scopes.values():
            scope.share = None

    def _count(self, caller: Caller, bucket: int) -> None:
        self._counted[caller.request.request_id] = (bucket, caller.tokens, caller.scopes)

    def _decide_alone(self, caller: Caller) -> RefusedRate | None:
        return self._refuse_alone(caller.request, caller.scopes, caller.tokens, self._monotonic())

    def _refuse_alone(
        self, request: HoldRequest, scopes: list[RateScope], tokens: int, now: float
    ) -> RefusedRate | None:
        """Count a call inside this process's shares, or say which has no room."""
        bucket = int((now + self._ahead) * BUCKETS)
        for scope in scopes:
            share = scope.stand_alone(bucket - WINDOW)
            if (found := share.refuses(now, bucket, tokens, scope.live, self.owners)) is not None:
                limit, wait = found
                used = max(0, (scope.told.requests, scope.told.tokens, scope.live)[limit])
                cap, wanted = scope.caps[limit], tokens if limit == 1 else 1
                return refused(scopes, scope, limit, cap, used, 0, wanted, wait)
        for scope in scopes:
            share = scope.stand_alone(bucket - WINDOW)
            share.spend(bucket, 1, tokens)
            scope.live += 1
            scope.slots -= 1
            scope.used = bucket
            scope.change(bucket, 1, tokens, tokens)
        self._counted[request.request_id] = (bucket, tokens, scopes)
        self._note(self._teams[request.team_id])
        return None


def _has_rates(scope: Scope) -> bool:
    limits = scope.limits
    rates: Iterable[int | None] = (
        limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent_requests
    )  # fmt: skip
    return any(rate is not None for rate in rates)
