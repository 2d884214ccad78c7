# One team's conversation with Redis: callers that wait, and one command at a time, said until it is answered.

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator

from msgspec import Struct

from billing.holds import HoldRequest
from billing.rate_scope import RateScope
from billing.rate_words import NAMES, Answer, Command, RefusalTold, RefusedRate, pack

MOST = 128  # callers in one command


class Caller:
    """A call that waits for Redis. ``answer`` gives the refusal, or None when the call was counted."""

    __slots__ = ("answer", "request", "scopes", "tokens")

    def __init__(self, request: HoldRequest, scopes: list[RateScope], answer: asyncio.Future[RefusedRate | None]):
        self.request, self.scopes, self.answer = request, scopes, answer
        self.tokens = request.tokens


class Sent(Struct, eq=False):
    """A command as it was said, and for whom."""

    command: Command
    packed: bytes
    keys: list[str]
    callers: list[Caller]
    scopes: list[RateScope]
    sent_at: float  # monotonic seconds


class RateTeam:
    """The scopes of one team. Nothing here waits: the words go out and come in by ``Rates``."""

    def __init__(self, team_id: str, owner: str, numbers: Iterator[int]) -> None:
        """``numbers`` only grow, also over a team that was forgotten and is met again."""
        self.id = team_id
        self.waiting: list[Caller] = []
        self.touched: set[RateScope] = set()  # what they have to tell, or may have to give back
        self.is_due = False  # the next command goes out though no caller waits
        self.in_doubt: Sent | None = None  # said, and not answered: said again before anything else
        self.driver: asyncio.Task[None] | None = None
        self.said_at = -math.inf  # monotonic seconds
        self._owner = owner
        self._prefix = f"tollgate:{{{team_id}}}:rates:"
        self._numbers = numbers

    @property
    def is_silent(self) -> bool:
        """Whether there is nothing to say or to hear."""
        return self.driver is None and self.in_doubt is None and not self.waiting and not self.touched

    def say(self, now: float, bucket: int, owners: int, time: float) -> Sent | None:
        """Return the next command; ``None`` when there is nothing to say."""
        if self.in_doubt is not None:
            return self.in_doubt
        callers, self.waiting = self.waiting[:MOST], self.waiting[MOST:]
        callers = [caller for caller in callers if not caller.answer.done()]
        if not callers and not self.is_due:
            return None
        self.is_due = False
        needs: dict[RateScope, list[int]] = {}
        for caller in callers:
            for scope in caller.scopes:
                need = needs.setdefault(scope, [0, 0])
                need[0] += 1
                need[1] += caller.tokens
        scopes = [*needs, *(scope for scope in self.touched if scope not in needs)]
        self.touched.clear()
        said = [scope.say(now, bucket, *needs.get(scope, (0, 0))) for scope in scopes]
        self.touched.update(scope for scope in scopes if scope.until)  # a slice that is kept
        places = {scope: place for place, scope in enumerate(scopes, 1)}
        asked = [[caller.tokens, *(places[scope] for scope in caller.scopes)] for caller in callers]
        command = Command(next(self._numbers), time, owners, self._owner, said, asked)
        keys = [f"{self._prefix}told:{self._owner}"]
        for scope in scopes:
            keys += (f"{self._prefix}minute:{scope.name}", f"{self._prefix}slots:{scope.name}")
        self.in_doubt = Sent(command, pack(command), keys, callers, scopes, now)
        return self.in_doubt

    def hear(self, sent: Sent, answer: Answer) -> list[Caller]:
        """Take over what was drawn, tell refused callers, and return those that were granted what they need."""
        self.in_doubt = None
        granted, counts = [], dict.fromkeys(sent.scopes, 0)
        outcomes = list(zip(sent.callers, answer.refusals, strict=True))
        for caller, refusals in outcomes:
            if not refusals:
                granted.append(caller)
                for scope in caller.scopes:
                    counts[scope] += 1
                    scope.begin(answer.bucket)
        for scope, said, told in zip(sent.scopes, sent.command.scopes, answer.scopes, strict=True):
            if scope.hear(said, told, counts[scope], answer.bucket, sent.sent_at):
                self.touched.add(scope)
        for caller, refusals in outcomes:
            if refusals and not caller.answer.done():
                caller.answer.set_result(refusal(caller, sent.scopes, answer, refusals))
        return granted


def refusal(caller: Caller, scopes: list[RateScope], answer: Answer, refusals: Iterable[RefusalTold]) -> RefusedRate:
    """Return the refusal that lasts longest."""
    heard = []
    for told in refusals:
        scope, of = scopes[told.scope - 1], answer.scopes[told.scope - 1]
        cap, wanted = scope.caps[told.limit - 1], caller.tokens if told.limit == 2 else 1
        held = (0, min(of.held, told.used), told.used)[told.limit - 1]
        heard.append(refused(caller.scopes, scope, told.limit - 1, cap, told.used, held, wanted, told.wait))
    return max(heard, key=lambda one: (one.alone_exceeds, one.retry_after or 0.0))


def refused(
    scopes: Iterable[RateScope], scope: RateScope, limit: int, cap: int, used: int, held: int, wanted: int, wait: float
) -> RefusedRate:
    """Return what a call hears that finds no room in one limit (from 0); a second to wait where ``wait`` is -1."""
    left = [one.remaining() for one in scopes]
    return RefusedRate(
        scope=scope.scope,
        limit=NAMES[limit],
        cap=cap,
        used=used - held,
        held=held,
        wanted=wanted,
        retry_after=None if wanted > cap else 1.0 if wait < 0 else wait,
        alone_exceeds=wanted > cap,
        requests=min((of for of, _ in left if of is not None), key=lambda of: of.remaining, default=None),
        tokens=min((of for _, of in left if of is not None), key=lambda of: of.remaining, default=None),
    )
