# One team's words to Redis: what its callers wait for, and what its scopes have to tell, in one command; and the
# answer to it.

from __future__ import annotations

import asyncio

import msgspec
from msgspec import Struct

from billing.core.holds import HoldRequest, RefusedHold
from billing.quotas.rate_scope import RateScope
from billing.quotas.rate_shares import ScopeTold

MOST = 128  # callers in one command, and commands in one trip


class Caller(Struct, eq=False):
    """A call that waits for Redis. ``answer`` gives the refusal, or None when the call was counted."""

    request: HoldRequest
    scopes: list[RateScope]
    answer: asyncio.Future[RefusedHold | None]


class Command(Struct, eq=False):
    """A command, said until it is answered, and for whom."""

    team: RateTeam
    number: int
    keys: list[str]
    packed: bytes
    callers: list[Caller]
    scopes: list[RateScope]
    at: float  # monotonic seconds


class Answer(Struct, array_like=True, frozen=True):
    """What rates.lua answers."""

    number: int
    now: float
    bucket: int
    was_known: int
    scopes: list[ScopeTold]
    refusals: list[tuple[int, int, float]]  # why a need waits longest: scope and limit, from 1; seconds, or 0: granted


class RateTeam:
    """The scopes of one team. Nothing here waits: ``RateLimits`` carries the words."""

    def __init__(self, team_id: str) -> None:
        self.id = team_id
        self.waiting: list[Caller] = []
        self.touched: set[RateScope] = set()  # what they have to tell, or may have to give back

    def say(self, number: int, owner: str, owners: int, now: float, time: float, *, is_due: bool) -> Command | None:
        """Return the next command; ``None`` when there is nothing to say.

        Slices of scopes that no caller waits for are left to them, unless ``is_due``. ``time``: unix seconds, or -1.
        """
        callers = [caller for caller in self.waiting[:MOST] if not caller.answer.done()]
        self.waiting = self.waiting[MOST:]
        told = [scope for scope in self.touched if is_due or (callers and scope.until <= now)]
        needs: dict[RateScope, list[int]] = {scope: [] for scope in told}
        for caller in callers:
            for scope in caller.scopes:
                needs.setdefault(scope, []).append(caller.request.tokens)
        if not needs:
            return None
        scopes = list(needs)
        said = [scope.say(now, needs[scope]) for scope in scopes]
        self.touched.difference_update(scopes)
        asked = [[caller.request.tokens, *(scopes.index(scope) + 1 for scope in caller.scopes)] for caller in callers]
        prefix = f"tollgate:{{{self.id}}}:rates:"
        keys = [f"{prefix}told:{owner}"]
        for scope in scopes:
            keys += (f"{prefix}minute:{scope.name}", f"{prefix}slots:{scope.name}")
        return Command(self, number, keys, pack((number, time, owners, owner, said, asked)), callers, scopes, now)


pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder(Answer).decode
