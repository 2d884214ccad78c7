# Rates: requests and tokens a minute, and running calls, of a team and its keys. Redis counts them (rates.lua), and
# every process draws slices from it: a quarter of what it admits in a second, to be used within a fifth of a second or
# given back. So a busy team costs a few trips a second in each process, and a call waits for none of them but the
# first, and those near a cap.
#
# A call counts from its beginning for sixty seconds and at most a bucket (a quarter of a second) more. While Redis is
# away each process admits its share (rate_shares.py) and tells Redis afterwards what it admitted when.

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from importlib.resources import files

import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from billing.edges import Clock
from billing.holds import HoldRequest, Remaining, Scope
from billing.rate_scope import RateScope
from billing.rate_team import Caller, RateTeam, Sent, refused
from billing.rate_words import BUCKETS, WINDOW, RefusedRate, unpack
from billing.script import Script
from billing.store_errors import REDIS_AWAY, redis_refuses

DEADLINE = 0.25  # seconds that a call waits at the most
TELL = 0.23  # seconds until what is free again is told; a slice has ended by then, and a busy team asked for another
RETRY = 1.0  # seconds between two tries to reach a Redis that is away
RENEW = 5.0  # seconds between two statements of the slots of running calls; Redis keeps them for 30
FORGET = 120.0  # seconds after which a scope without calls is forgotten

SCRIPT = files("billing").joinpath("rates.lua").read_text()

log = structlog.get_logger(__name__)

Counted = tuple[int, int, list[RateScope]]  # bucket in which the call began, tokens held, its scopes


class Rates:
    """The rates of all teams, for one process. Nothing here raises for a Redis that is away."""

    def __init__(
        self, redis: Redis, clock: Clock, *, owner: str, uses_server_time: bool = True, deadline: float = DEADLINE
    ) -> None:
        """``owner`` names this start of the process, and no other."""
        self.owners = 1  # living ones, this one among them
        self.is_away = False  # Redis does not answer
        self.refusals = 0  # commands that Redis answered, and would not do
        self._script = Script(redis, SCRIPT, deadline=deadline / 2)  # one trip to wait for, and one's own
        self._clock, self._monotonic = clock, clock.monotonic
        self._owner = owner
        self._uses_server_time = uses_server_time
        self._ahead = clock.now() - clock.monotonic()  # what Redis's clock shows more than ours, and no less
        self._numbers = itertools.count(1)  # of commands
        self._teams: dict[str, RateTeam] = {}
        self._scopes: dict[tuple[str, str], RateScope] = {}
        self._counted: dict[str, Counted] = {}  # running calls by request id
        self._due: dict[RateTeam, float] = {}  # who has something to tell, and when, in monotonic seconds
        self._doubted: dict[RateTeam, None] = {}  # whose last command was not answered
        self._wake = asyncio.Event()
        self._renewed_at = 0.0

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

    async def run(self) -> None:
        """Tell Redis, within a fifth of a second, of what is free again, and every few seconds of running calls.

        Nothing is said where nothing has happened. While Redis is away, look for it once a second.
        """
        while True:
            if self.is_away:
                await asyncio.sleep(RETRY)
                await self.look()
                continue
            now = self._monotonic()
            moment = min(next(iter(self._due.values()), now + RENEW), self._renewed_at + RENEW)
            self._wake.clear()
            if moment > now:
                try:
                    async with asyncio.timeout(moment - now):
                        await self._wake.wait()
                except TimeoutError:
                    pass
            self._tell()

    async def tell(self) -> None:
        """Tell what is due, and wait until Redis has heard it."""
        self._tell()
        await asyncio.gather(*(team.driver for team in self._teams.values() if team.driver is not None))

    async def look(self) -> None:
        """Try to reach a Redis that is away: say again what was not answered."""
        if not self.is_away:
            return
        team = next(iter(self._doubted))
        del self._doubted[team]
        self._doubted[team] = None  # the next try is another team's
        sent = team.in_doubt
        assert sent is not None
        if team.driver is None and await self._send(team, sent) and self.is_away:
            self.is_away = False
            log.info("rates_redis_back")
            for scope in self._scopes.values():
                scope.share = None
            for team in self._doubted:
                self._depart(team)
            self._tell()

    async def close(self) -> None:
        """Give the connection back."""
        for team in self._teams.values():
            if team.driver is not None:
                team.driver.cancel()
        await self._script.close()

    def _meet(self, request: HoldRequest, scope: Scope) -> RateScope:
        known = self._scopes.get((scope.kind, scope.id))
        if known is None:
            known = self._scopes[scope.kind, scope.id] = RateScope(
                scope, request.team_id, self._team(request.team_id).touched
            )
        elif known.scope.limits is not scope.limits:
            known.adopt(scope)
        return known

    def _team(self, team_id: str) -> RateTeam:
        team = self._teams.get(team_id)
        if team is None:
            team = self._teams[team_id] = RateTeam(team_id, self._owner, self._numbers)
        return team

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

    def _note(self, team: RateTeam) -> None:
        """Let a team tell what it has to, soon, unless a call asks before."""
        self._due.setdefault(team, self._monotonic() + TELL)
        self._wake.set()

    def _tell(self) -> None:
        if self.is_away:
            return
        now = self._monotonic()
        if now - self._renewed_at >= RENEW:
            self._renew(now)
        for team, moment in list(self._due.items()):
            if moment > now:
                break
            del self._due[team]
            team.is_due = True
            self._depart(team)

    def _renew(self, now: float) -> None:
        """Have all slots of running calls stated again, and forget scopes that nothing runs in."""
        self._renewed_at = now
        for key, scope in list(self._scopes.items()):
            if scope.live and scope.caps[2] >= 0:
                scope.touch()
                self._due[self._teams[scope.team_id]] = now
            elif not scope.live and now - scope.told_at > FORGET and self._teams[scope.team_id].is_silent:
                del self._scopes[key]
        used = {scope.team_id for scope in self._scopes.values()}
        for team_id, team in list(self._teams.items()):
            if team_id not in used and team.is_silent:
                del self._teams[team_id]

    def _depart(self, team: RateTeam) -> None:
        if team.driver is None:
            team.driver = asyncio.create_task(self._drive(team))

    async def _drive(self, team: RateTeam) -> None:
        """Say what the team has to say, one command after the other."""
        try:
            while not self.is_away:
                now = self._monotonic()
                time = -1.0 if self._uses_server_time else self._clock.now()
                sent = team.say(now, int((now + self._ahead) * BUCKETS), self.owners, time)
                if sent is None:
                    return
                self._due.pop(team, None)
                if not await self._send(team, sent):
                    return
        finally:
            team.driver = None

    async def _send(self, team: RateTeam, sent: Sent) -> bool:
        """Say a command; return whether Redis answered. Its callers get their answers in either case."""
        is_again, before = team in self._doubted, team.said_at
        try:
            reply = await self._script.call(sent.keys, sent.packed)
            if reply is None:  # a later one was answered
                raise ResponseError("LATE")
            answer = unpack(reply)
        except REDIS_AWAY as exc:
            self._fail(team, sent, exc)
            return redis_refuses(exc)
        self._doubted.pop(team, None)
        team.said_at = sent.sent_at
        if not is_again:
            self._ahead = answer.now - sent.sent_at
        for caller in team.hear(sent, answer):
            if caller.answer.done():  # it waits no more
                for scope in caller.scopes:
                    scope.live -= 1
                    scope.slots += 1
                    scope.change(answer.bucket, -1, -caller.tokens, -caller.tokens)
            else:
                self._counted[caller.request.request_id] = (answer.bucket, caller.tokens, caller.scopes)
                caller.answer.set_result(None)
        if team.touched:
            self._note(team)
        if not answer.was_known and sent.sent_at - before < FORGET / 2:
            self._renew(self._monotonic())  # Redis was wiped: it knows nobody's slots
        return True

    def _fail(self, team: RateTeam, sent: Sent, exc: Exception) -> None:
        callers, teams = list(sent.callers), [team]
        if redis_refuses(exc):
            self.refusals += 1
            log.warning("rates_refused", team_id=team.id, error=str(exc))
            team.in_doubt = None
            self._doubted.pop(team, None)
            team.touched.update(sent.scopes)
            self._note(team)
        else:
            if not self.is_away:
                log.warning("rates_redis_away", error=repr(exc))
            self.is_away = True
            self._doubted[team] = None
            self._wake.set()
            teams = list(self._teams.values())
            if isinstance(exc, ResponseError):  # this server cannot serve now; another may
                self._script.reconnect()
        for each in teams:
            if self.is_away:
                callers += each.waiting
                each.waiting = []
        now = self._monotonic()
        for caller in callers:
            if not caller.answer.done():
                caller.answer.set_result(self._refuse_alone(caller.request, caller.scopes, caller.tokens, now))

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
