# Rates: requests and tokens a minute, and running calls, of a team and its keys. Redis counts them (rates.lua), and
# every process draws slices from it: a quarter of what it admits in a second, to be used within a fifth of a second or
# given back. So a busy team costs a few trips a second in each process, and a call waits for none of them but the
# first, and those near a cap.
#
# A call counts from its beginning for sixty seconds and at most a bucket (a quarter of a second) more. While Redis is
# away each process admits its share (rate_shares.py) and tells Redis afterwards what it admitted when.

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from contextlib import suppress
from itertools import takewhile
from typing import Any

import structlog
from msgspec import MsgspecError
from redis.asyncio import Redis
from redis.exceptions import InvalidResponse, ResponseError

from billing.core.edges import Clock
from billing.core.holds import HoldRequest, RefusedHold, Remaining, Scope
from billing.quotas.rate_scope import RateScope, refused, remaining_of
from billing.quotas.rate_shares import BUCKETS
from billing.quotas.rate_wire import REDIS_AWAY, Caller, Command, RateTeam, RateWire, unpack

DEADLINE = 0.25  # seconds that a call waits at the most
TELL = 0.23  # seconds until what is free again is told; a slice has ended by then, and a busy team asked for another
RETRY = 1.0  # seconds between two tries to reach a Redis that is away
FIND_WITHIN = 1.0  # seconds to find Redis in, while no call waits: the way by a sentinel may be longer than a call's
RENEW = 5.0  # seconds between two statements of the slots of running calls; Redis keeps them for 30
WIPED = 60.0  # seconds within which Redis cannot have forgotten an owner by itself
FORGET = 120.0  # seconds after which a scope without calls is forgotten

log = structlog.get_logger(__name__)


class RateLimits:
    """The rates of all teams, for one process. Nothing here raises for a Redis that is away."""

    def __init__(
        self, redis: Redis, clock: Clock, *, owner: str, uses_server_time: bool = True, deadline: float = DEADLINE
    ) -> None:
        """``owner`` names this start of the process, and no other; a call waits for ``deadline`` seconds at most."""
        self.owners = 1  # living ones, this one among them
        self.is_away = False  # Redis does not answer
        self.refusals = 0  # commands that Redis has refused to execute
        self._wire = RateWire(redis)
        self._owner, self._deadline, self._monotonic = owner, deadline, clock.monotonic
        self._time = None if uses_server_time else clock.now
        self._ahead = clock.now() - clock.monotonic()  # what Redis's clock shows more than ours, and no less
        self._scopes: dict[tuple[str, str], RateScope] = {}
        self._teams: dict[str, RateTeam] = {}
        self._counted: dict[str, tuple[int, int, list[RateScope]]] = {}  # by running call: bucket, tokens held, scopes
        self._number = 0  # of the last command
        self._asking: set[RateTeam] = set()  # whose callers wait
        self._due: dict[RateTeam, float] = {}  # who has something to tell, and when, in monotonic seconds
        self._unheard: list[Command] = []  # said again until they are answered
        self._talking: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._renew_at = 0.0

    def take(self, request: HoldRequest) -> bool | None:
        """Count a call inside what this process has drawn: all scopes and limits, or none. ``None``: ask Redis.

        A request without such limits, or one that ``is_internal``, is counted nowhere.
        """
        scopes = self._limited(request)
        if not scopes:
            return True
        if self.is_away:
            return True if self._refuse_alone(request, scopes) is None else None
        now, tokens = self._monotonic(), request.tokens
        for known in scopes:
            if now >= known.until or known.requests < 1 or known.tokens < tokens or known.slots < 1:
                return None
        bucket = int((now + self._ahead) * BUCKETS)
        for known in scopes:
            known.requests -= 1
            known.tokens -= tokens
            known.slots -= 1
            known.live += 1
            known.change(bucket, 1, tokens, tokens)
        self._counted[request.request_id] = (bucket, tokens, scopes)
        return True

    async def ask(self, request: HoldRequest) -> RefusedHold | None:
        """Ask Redis to count a call; ``None`` when it is counted. Callers that wait share a trip.

        Waits for the deadline at most, and not at all while Redis is away: then this process's share decides.
        A cancelled caller is counted nowhere.
        """
        scopes = self._limited(request)
        if not scopes:
            return None
        if self.is_away:
            return self._refuse_alone(request, scopes)
        answer: asyncio.Future[RefusedHold | None] = asyncio.get_running_loop().create_future()
        team = self._teams[request.team_id]
        team.waiting.append(Caller(request, scopes, answer))
        self._asking.add(team)
        self._talk()
        try:
            return await answer
        except asyncio.CancelledError:
            self.release(request)  # it may have been counted just now
            raise

    def settle(self, request: HoldRequest, tokens: int) -> None:
        """Count the tokens that a call has used in place of those held, and free its slot. Once."""
        self._end(request, 0, tokens)

    def release(self, request: HoldRequest) -> None:
        """Count a call no more, for it never ran."""
        self._end(request, -1, 0)

    def remaining(self, request: HoldRequest) -> tuple[Remaining | None, Remaining | None]:
        """Return the tightest limits of requests and tokens a minute: all owners' as last told, less our own since."""
        known = map(self._scopes.get, [(scope.kind, scope.id) for scope in request.scopes])
        return remaining_of(filter(None, known), self._monotonic())

    async def start(self) -> None:
        """Find Redis, before calls come: a call would not wait for that, and go by a share of what others have used up.

        Where it is not found within a second it is away.
        """
        await self._carry(FIND_WITHIN)

    async def run(self) -> None:
        """Tell Redis, within a fifth of a second, of what is free again, and every few seconds of running calls.

        Nothing is said where nothing has happened. While Redis is away, look for it once a second.
        """
        while True:
            now = self._monotonic()
            moment = now + RETRY if self.is_away else min(next(iter(self._due.values()), math.inf), self._renew_at)
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, moment - now)):
                    await self._wake.wait()
                    continue
            await self.tell()

    async def tell(self) -> None:
        """Tell what is due, and wait until Redis has heard it. Where it was away, say first what was not answered."""
        if self.is_away:
            if not await self._carry(FIND_WITHIN):
                return
            self.is_away = False
            log.info("rates_redis_back")
        if (now := self._monotonic()) >= self._renew_at:
            self._renew(now)
        self._talk()
        if self._talking is not None:
            await self._talking

    async def close(self) -> None:
        """Tell what is left to tell, and give slices back."""
        self._due = dict.fromkeys(self._due, 0.0)
        self._talk()
        if (talking := self._talking) is not None:
            await asyncio.wait([talking], timeout=DEADLINE)
            talking.cancel()

    def _limited(self, request: HoldRequest) -> list[RateScope]:
        """Return the scopes of a call that have rates."""
        found: list[RateScope] = []
        for scope in () if request.is_internal else request.scopes:
            limits = scope.limits
            if (
                limits.requests_per_minute is not None
                or limits.tokens_per_minute is not None
                or limits.concurrent_requests is not None
            ):
                known = self._scopes.get((scope.kind, scope.id))
                if known is None or known.scope.limits is not limits:
                    known = self._meet(request.team_id, scope)
                found.append(known)
        return found

    def _meet(self, team_id: str, scope: Scope) -> RateScope:
        known = self._scopes.get((scope.kind, scope.id))
        if known is None:
            team = self._teams.get(team_id)
            if team is None:
                team = self._teams[team_id] = RateTeam(team_id)
            known = self._scopes[scope.kind, scope.id] = RateScope(scope, team_id, team.touched)
        known.adopt(scope)
        return known

    def _count(self, request: HoldRequest, scopes: list[RateScope], bucket: int) -> None:
        for scope in scopes:
            scope.used = bucket
            scope.live += 1
            scope.slots -= 1
        self._counted[request.request_id] = (bucket, request.tokens, scopes)

    def _end(self, request: HoldRequest, requests: int, tokens: int) -> None:
        counted = self._counted.pop(request.request_id, None)
        if counted is None:
            return
        bucket, held, scopes = counted
        for scope in scopes:
            scope.live -= 1
            scope.slots += 1
            scope.change(bucket, requests, tokens - held, -held)
            if scope.share is not None:
                scope.share.spend(bucket, requests, tokens - held)
        team = self._teams[request.team_id]
        if team not in self._due:
            self._note(team)

    def _refuse_alone(self, request: HoldRequest, scopes: list[RateScope]) -> RefusedHold | None:
        """Count a call inside this process's shares, or say which has no room."""
        now = self._monotonic()
        bucket, tokens = int((now + self._ahead) * BUCKETS), request.tokens
        for scope in scopes:
            found = scope.stand_alone(bucket).refuses(now, bucket, tokens, scope.live, self.owners)
            if found is not None:
                return refused(request, scopes, scope, *found, now)
        for scope in scopes:
            scope.stand_alone(bucket).spend(bucket, 1, tokens)
            scope.change(bucket, 1, tokens, tokens)
        self._count(request, scopes, bucket)
        self._note(self._teams[request.team_id])
        return None

    def _note(self, team: RateTeam) -> None:
        """Let a team tell what it has to, soon, unless a call asks before."""
        if not self._due:
            self._wake.set()
        self._due.setdefault(team, self._monotonic() + TELL)

    def _talk(self) -> None:
        if self._talking is None and not self.is_away:
            self._talking = asyncio.create_task(self._say_all())

    async def _say_all(self) -> None:
        try:
            while not self.is_away and (self._unheard or self._compose()):
                await self._carry(self._deadline / 2)  # one trip to wait for, and one's own
        finally:
            self._talking = None

    def _compose(self) -> bool:
        """Make commands of what callers need and what is due to be told; return whether there are any."""
        now, time = self._monotonic(), -1.0 if self._time is None else self._time()
        due = {team for team, _ in takewhile(lambda item: item[1] <= now, self._due.items())}
        for team in self._asking | due:
            self._number += 1
            command = team.say(self._number, self._owner, self.owners, now, time, is_due=team in due)
            if command is not None:
                self._unheard.append(command)
            if not team.touched:
                self._due.pop(team, None)
        self._asking = {team for team in self._asking if team.waiting}
        return bool(self._unheard)

    async def _carry(self, deadline: float) -> bool:
        """Say what has no answer yet; return whether Redis answered."""
        try:
            await self._wire.carry(self._unheard, self._hear, deadline=deadline)
        except REDIS_AWAY as exc:
            if not self.is_away:
                log.warning("rates_redis_away", error=repr(exc))
            self.is_away = True
            self._wake.set()
            callers = [caller for command in self._unheard for caller in command.callers]
            for team in self._asking:
                callers += team.waiting
                team.waiting = []
            self._asking.clear()
            self._decide_alone(callers)
            return False
        return True

    def _hear(self, command: Command, reply: Any) -> None:
        team, now = command.team, self._monotonic()
        try:
            if isinstance(reply, ResponseError):
                raise reply
            answer = unpack(reply or b"")
        except (ResponseError, MsgspecError) as exc:  # this command, not all of them
            self.refusals += 1
            log.warning("rates_refused", team_id=team.id, error=str(exc))
            team.touched.update(command.scopes)
            self._note(team)
            self._decide_alone(command.callers)
            return
        if answer.number != command.number:
            raise InvalidResponse(f"command {command.number} was answered as {answer.number}")
        if now - command.at <= self._deadline:
            self._ahead = answer.now - command.at
        is_wiped = not answer.was_known and any(command.at - scope.told_at < WIPED for scope in command.scopes)
        for scope, told in zip(command.scopes, answer.scopes, strict=True):
            scope.hear(told, answer.bucket, command.at)
        for caller, (place, limit, seconds) in zip(command.callers, answer.refusals, strict=True):
            request, scopes = caller.request, caller.scopes
            if caller.answer.done():  # it waits no more
                for scope in [] if seconds else scopes:
                    scope.change(answer.bucket, -1, -request.tokens, -request.tokens)
            elif seconds:
                scope = command.scopes[place - 1]
                caller.answer.set_result(refused(request, scopes, scope, limit - 1, seconds, now))
            else:
                self._count(request, scopes, answer.bucket)
                caller.answer.set_result(None)
        if team.touched:
            self._note(team)
        if is_wiped:
            self._renew(now)

    def _decide_alone(self, callers: Iterable[Caller]) -> None:
        for caller in callers:
            if not caller.answer.done():
                caller.answer.set_result(self._refuse_alone(caller.request, caller.scopes))

    def _renew(self, now: float) -> None:
        """Have all slots of running calls stated again, and forget scopes that nothing runs in."""
        self._renew_at = now + RENEW
        for scope in self._scopes.values():
            if scope.live and scope.caps[2] >= 0:
                scope.touched.add(scope)
                self._note(self._teams[scope.team_id])
        if not self._asking and not self._unheard:
            self._scopes = {
                key: scope
                for key, scope in self._scopes.items()
                if scope.live or scope in scope.touched or now - scope.told_at < FORGET
            }
            used = {scope.team_id for scope in self._scopes.values()}
            self._teams = {team_id: team for team_id, team in self._teams.items() if team_id in used}
