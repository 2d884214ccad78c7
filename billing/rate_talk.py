# How one process talks to Redis about rates: when what is told, one command of a team at a time, and what becomes of an
# answer that does not come.

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from importlib.resources import files

import structlog
from msgspec import MsgspecError
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from billing.edges import Clock
from billing.rate_team import Caller, RateTeam, Sent
from billing.rate_words import BUCKETS, RefusedRate, unpack
from billing.script import Script
from billing.store_errors import REDIS_AWAY, redis_refuses

DEADLINE = 0.25  # seconds that a call waits at the most
TELL = 0.23  # seconds until what is free again is told; a slice has ended by then, and a busy team asked for another
RETRY = 1.0  # seconds between two tries to reach a Redis that is away
RENEW = 5.0  # seconds between two statements of the slots of running calls; Redis keeps them for 30
WIPED = 60.0  # seconds within which Redis cannot have forgotten an owner by itself

SCRIPT = files("billing").joinpath("rates.lua").read_text()

log = structlog.get_logger(__name__)


class RateTalk(ABC):
    """The commands about all teams' rates. Nothing here raises for a Redis that is away."""

    def __init__(self, redis: Redis, clock: Clock, *, owner: str, uses_server_time: bool, deadline: float) -> None:
        self.owners = 1  # living ones, this one among them
        self.is_away = False  # Redis does not answer
        self.refusals = 0  # commands that Redis has refused to execute
        self._script = Script(redis, SCRIPT, deadline=deadline / 2)  # one trip to wait for, and one's own
        self._clock, self._monotonic = clock, clock.monotonic
        self._owner = owner
        self._uses_server_time = uses_server_time
        self._ahead = clock.now() - clock.monotonic()  # what Redis's clock shows more than ours, and no less
        self._numbers = itertools.count(1)  # of commands
        self._teams: dict[str, RateTeam] = {}
        self._due: dict[RateTeam, float] = {}  # who has something to tell, and when, in monotonic seconds
        self._doubted: dict[RateTeam, None] = {}  # whose last command was not answered
        self._wake = asyncio.Event()
        self._renewed_at = 0.0

    @abstractmethod
    def _count(self, caller: Caller, bucket: int) -> None:
        """Redis has counted a call that waited."""

    @abstractmethod
    def _decide_alone(self, caller: Caller) -> RefusedRate | None:
        """Redis will not say in time whether a call may be admitted."""

    @abstractmethod
    def _renew(self, now: float) -> None:
        """Have all slots of running calls stated again, and forget scopes that nothing runs in."""

    @abstractmethod
    def _come_back(self) -> None:
        """Redis counts again."""

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
            self._come_back()
            for team in self._doubted:
                self._depart(team)
            self._tell()

    async def close(self) -> None:
        """Tell what is left to tell, give slices back, and the connection."""
        if not self.is_away:
            for team in self._due:
                team.is_due = True
                for scope in team.touched:
                    scope.until = 0.0
                self._depart(team)
        drivers = [team.driver for team in self._teams.values() if team.driver is not None]
        if drivers:
            await asyncio.wait(drivers, timeout=DEADLINE)
        for driver in drivers:
            driver.cancel()
        await self._script.close()

    def _team(self, team_id: str) -> RateTeam:
        team = self._teams.get(team_id)
        if team is None:
            team = self._teams[team_id] = RateTeam(team_id, self._owner, self._numbers)
        return team

    def _note(self, team: RateTeam) -> None:
        """Let a team tell what it has to, soon, unless a call asks before."""
        if not self._due:
            self._wake.set()
        self._due.setdefault(team, self._monotonic() + TELL)

    def _tell(self) -> None:
        if self.is_away:
            return
        now = self._monotonic()
        if now - self._renewed_at >= RENEW:
            self._renewed_at = now
            self._renew(now)
        for team, moment in list(self._due.items()):
            if moment > now:
                break
            del self._due[team]
            team.is_due = True
            self._depart(team)

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
        except MsgspecError as exc:  # another wrote there
            self._fail(team, sent, ResponseError(str(exc)))
            return True
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
                self._count(caller, answer.bucket)
                caller.answer.set_result(None)
        if team.touched:
            self._note(team)
        if not answer.was_known and sent.sent_at - before < WIPED:
            self._renew(self._monotonic())  # Redis was wiped: it knows nobody's slots
        return True

    def _fail(self, team: RateTeam, sent: Sent, exc: Exception) -> None:
        callers = sent.callers
        if redis_refuses(exc):  # this command, not all of them
            self.refusals += 1
            log.warning("rates_refused", team_id=team.id, error=str(exc))
            team.in_doubt = None
            self._doubted.pop(team, None)
            for scope in sent.scopes:
                scope.touch()
            self._note(team)
        else:
            if not self.is_away:
                log.warning("rates_redis_away", error=repr(exc))
            self.is_away = True
            self._doubted[team] = None
            self._wake.set()
            if isinstance(exc, ResponseError):  # this server cannot serve now; another may
                self._script.reconnect()
            for other in self._teams.values():
                callers = [*callers, *other.waiting]
                other.waiting = []
        for caller in callers:
            if not caller.answer.done():
                caller.answer.set_result(self._decide_alone(caller))
