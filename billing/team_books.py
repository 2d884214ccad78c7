# The books of teams in Redis (quotas.lua), spoken to directly: what is read from them, and what a rebuild and the
# sweeper do to them. PatientBooks adds what calls need, never to fail and never to wait, and Quotas their limits.

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from importlib import resources
from typing import Any, Protocol

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from billing.edges import Clock
from billing.epochs import DEADLINE, EPOCH_KEY, read_epoch
from billing.holds import Hold, Sums
from billing.quota_verbs import Said, Words, load_sums, month_of, put_back_calls
from billing.records import UsageRecord
from billing.scope_state import ScopeState
from billing.script import Script

ANY_EPOCH = "*"  # of books that nobody rebuilds: whatever is there counts
FIRST_EPOCH = b"0"  # what they begin with in an empty Redis

SCRIPT = resources.files(__package__).joinpath("quotas.lua").read_text()


class Guard(Protocol):
    """Who sees to it that the counters are true: the Restorer."""

    def alarm(self, reason: str) -> None:
        """Look soon.

        Redis does not answer ("redis_lost"); a team's books are missing ("unknown"), not of our epoch ("stale") or
        written over ("broken"); or they cannot say whether they have a call ("late_journal").
        """

    async def welcome(self, team_id: str) -> bool:
        """Begin the books of a team that has none. False when it should have some: they were lost."""


class TeamBooks:
    """The books of all teams. Every verb raises what Redis raises: TimeoutError, RedisError or OSError."""

    def __init__(
        self, redis: Redis, clock: Clock, *, uses_server_time: bool = True, deadline: float = DEADLINE
    ) -> None:
        self.epoch = ANY_EPOCH  # in which we count
        self._script = Script(redis, SCRIPT, deadline=deadline)
        self._deadline = deadline  # seconds
        self._clock = clock
        self._uses_server_time = uses_server_time
        self._guard: Guard | None = None

    async def usage(self, team_id: str, *, day: int | None = None, key_id: str | None = None) -> ScopeState:
        """Return what a team, or one of its keys, has used and held; ``day`` in days since 1970, default today.

        Raises what Redis raises: a console or an audit would rather know.
        """
        day = int(self._clock.now() // 86_400) if day is None else day
        scope = "team" if key_id is None else f"key:{key_id}"
        return ScopeState(*await self._speak(Words("usage", team_id, "", (scope, day, month_of(day))), ""))

    async def settled_before(self, team_id: str, day: int, before: float) -> Sums | None:
        """Return what the counters have settled of a team's calls whose ids are older than ``before`` (unix seconds).

        ``before`` is cut to whole minutes and lies within the last two hours. ``None`` when it is not comparable with
        the ledger: the books are being rebuilt, or were begun after ``before``. Raises what Redis raises.
        """
        minute = int(before // 60)
        if not self._clock.now() - 7200 <= minute * 60 <= self._clock.now():
            return None
        async with asyncio.timeout(self._deadline):
            epoch = read_epoch(await self._script.redis.hgetall(EPOCH_KEY))
        words = Words("settled_before", team_id, "", (day, month_of(day), minute))
        marker, tokens, day_nanousd, month_nanousd = await self._speak(words, "")
        since = 0.0
        if marker != FIRST_EPOCH:
            if epoch is None or not epoch.is_ready or marker.decode() != epoch.id:
                return None
            since = epoch.ready_at
        return Sums(tokens, day_nanousd, month_nanousd) if minute * 60 >= since else None

    async def sweep(self, team_id: str, most: int = 1000) -> tuple[list[str], list[str]]:
        """Free the holds of a team whose leases have ended, and return their request ids; and those of every call freed
        in the last hour that nobody has settled since.
        """
        answer = await self._speak(Words("sweep", team_id, "", (most,)), self.epoch)
        if answer in (Said.UNKNOWN, Said.STALE):
            return [], []
        freed, unsettled = answer
        return [which.decode() for which in freed], [which.decode() for which in unsettled]

    async def put_back(self, epoch: str, team_id: str, closed: Iterable[UsageRecord], live: Iterable[Hold]) -> None:
        """Tell a new epoch of calls that the statements do not know. Twice is harmless. Raises what Redis raises."""
        await self._speak(put_back_calls(team_id, closed, live), epoch)

    async def calls_put_back(self, epoch: str, team_id: str) -> list[str]:
        """Return the ids of the closed calls that all owners have put back. Raises what Redis raises."""
        return [which.decode() for which in await self._speak(Words("backs", team_id, ""), epoch)]

    async def load(self, epoch: str, team_id: str, sums: tuple[Any, Any, Any], valid_until: float) -> bool:
        """Begin a team's books of ``epoch`` with what the statements say. False after ``valid_until`` (Redis's clock).

        ``sums`` are the days, months and seconds that quotas.lua adds. Raises what Redis raises.
        """
        return int(await self._speak(load_sums(team_id, *sums, valid_until), epoch)) >= 0

    async def disconnect(self) -> None:
        """Give the connection back."""
        await self._script.close()

    async def _speak(self, words: Words, epoch: str) -> Any:
        """Run one verb of the script on its team's books; a new team's are begun first."""
        time = "" if self._uses_server_time else repr(self._clock.now())
        key = f"tollgate:{{{words.team_id}}}"
        try:
            answer = await self._script.call(key, words.verb, time, epoch, words.request_id, *words.rest)
        except ResponseError as exc:
            if self._guard is not None and "WRONGTYPE" in str(exc):
                self._guard.alarm("broken")
            raise
        is_unknown = (answer[0] if words.verb == "open" else answer) == Said.UNKNOWN
        if is_unknown and self._guard is not None and await self._guard.welcome(words.team_id):
            answer = await self._script.call(key, words.verb, time, epoch, words.request_id, *words.rest)
        return answer
