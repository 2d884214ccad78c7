# Every limit of every scope, checked and held in one atomic step in Redis (quotas.lua), and settled in one more.
#
# Redis's books belong to an epoch. A call counts in the epoch in which the journal closes it: in a later one it is in
# the sums that the epoch began with, or was put back into it (rebuild.py). So what is said late, or executed late, can
# be recognised, and nothing counts twice or not at all.

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog
from redis.asyncio import Redis

from billing.edges import Clock
from billing.epochs import DEADLINE
from billing.holds import Hold, HoldRequest, Limits, RefusedHold, Scope, Settlement
from billing.ids import moment_of
from billing.patient_books import MOST, PatientBooks
from billing.quota_verbs import (
    Said,
    correct_counters,
    enter_hold,
    open_hold,
    period,
    release_hold,
    renew_hold,
    settle_hold,
)
from billing.records import CHARGED, UsageRecord
from billing.scope_state import ScopeState, refusal, remaining
from billing.standalone import AskStatements, Standalone
from billing.store_errors import REDIS_AWAY, redis_refuses
from billing.team_books import Guard
from protocol.usage import Usage

TOO_LATE = -1  # what an open is told after its ``valid_until``
REMEMBERED = 3000.0  # seconds; a tombstone lives for an hour

NO_LIMITS = Limits()

log = structlog.get_logger(__name__)


class Quotas(PatientBooks):
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
        super().__init__(redis, clock, uses_server_time=uses_server_time, deadline=deadline)
        self.exceeded = 0  # calls whose upstream billed more than was held
        self._server_ahead = 0.0  # seconds; what Redis's clock shows more than ours
        self._standalone = Standalone(standalone_share)
        self._live: dict[str, Hold] = {}  # held, and not closed in the journal

    def follow(self, standalone_share: float) -> None:
        """Take another share of what was left, from the next outage on."""
        self._standalone.share = standalone_share

    def attach(self, guard: Guard, ask_statements: AskStatements | None = None) -> None:
        """Count in no epoch until ``guard`` begins one."""
        self._guard = guard
        self._standalone.ask_statements = ask_statements
        self._turn_to("")

    async def open(self, request: HoldRequest) -> Hold | RefusedHold:
        """Hold the dearest leg against every limit of every scope, all or nothing."""
        may_be_held = False
        while True:
            if self.is_standalone:
                await self._standalone.learn(request, self._clock.monotonic())
                if self.is_standalone:
                    return self._open_standalone(request, may_be_held=may_be_held)
            answer = await self._open(request)
            if answer is not None:
                return answer
            may_be_held = True

    async def _open(self, request: HoldRequest) -> Hold | RefusedHold | None:
        """Ask Redis. ``None`` when it does not answer, or not from our epoch: we stand alone then."""
        epoch = self.epoch
        words = open_hold(request, request.valid_until + self._server_ahead)
        try:
            code, time, states, refusals = await self._speak(words, epoch)
        except REDIS_AWAY as exc:
            self._failed(exc, request.request_id)
            return self._open_unheard(request) if redis_refuses(exc) else None
        if code in (Said.UNKNOWN, Said.STALE):
            if epoch == self.epoch:
                self._estranged(request.team_id, code)
            return None
        if self._uses_server_time:
            believed, self._server_ahead = self._server_ahead, time / 1000 - self._clock.now()
            if code == TOO_LATE and self._server_ahead > believed and self._clock.now() < request.valid_until:
                return await self._open(request)  # we stood still when Redis last told the time, and took it for slow
        known = [ScopeState(*state) for state in states]
        hold = self._held(request, known) if code == 1 else None
        for scope, state in zip(request.scopes, known, strict=False):  # told nothing, it is too late
            self._standalone.remember(scope, period(request.request_id)[0], state, self._clock.monotonic())
        if hold is None:
            return refusal(request, known, refusals)
        if epoch != self.epoch:  # the books that hold it are closed
            await self._say(enter_hold(request), self.epoch)
        return hold

    def _open_standalone(self, request: HoldRequest, *, may_be_held: bool) -> Hold | RefusedHold:
        answer = self._standalone.open(request, self._clock.monotonic())
        if isinstance(answer, Hold):
            self._begin(answer)
            self._say_later(enter_hold(request))
        elif may_be_held:
            self._say_later(release_hold(request))
        return answer

    def _open_unheard(self, request: HoldRequest) -> Hold | RefusedHold:
        """Hold a call whose counters Redis refuses to touch against our share; its settlement may be refused too."""
        answer = self._standalone.open(request, self._clock.monotonic())
        if isinstance(answer, Hold):
            self._begin(answer)
        return answer

    async def renew(self, hold: Hold, used: Settlement) -> bool:
        """Keep a running call's hold for another lease. False when it was freed meanwhile and its room is taken.

        The call goes on all the same and is settled late: it owes what it uses.
        """
        if self.is_standalone:
            return True
        epoch = self.epoch
        try:
            code = await self._speak(renew_hold(hold.request, used), epoch)
        except REDIS_AWAY as exc:
            self._failed(exc, hold.request.request_id)
            return True
        if code in (Said.UNKNOWN, Said.STALE) and epoch == self.epoch:
            self._estranged(hold.request.team_id, code)
        return bool(code)

    def close(self, hold: Hold) -> str:
        """Note that the journal closes a call now, and return the epoch in which it counts."""
        if self._live.pop(hold.request.request_id, None) is not None:
            self._standalone.ended(hold.request)
        return self.epoch

    async def settle(self, hold: Hold, used: Settlement, epoch: str | None = None) -> None:
        """Book what the call really used in place of its hold. Once per request id, however often it is said.

        ``epoch`` is what ``close`` returned.
        """
        epoch = self.close(hold) if epoch is None else epoch
        request = hold.request
        if used.cost_nanousd > request.cost_nanousd or used.usage.total_tokens > request.tokens:
            self.exceeded += 1
            log.warning("hold_exceeded", request_id=request.request_id, cost=used.cost_nanousd)
        self._standalone.settle(request.request_id, used)
        await self._say(settle_hold(request, used), epoch)

    async def release(self, hold: Hold, epoch: str | None = None) -> None:
        """Give the whole hold back: the call cost nothing."""
        epoch = self.close(hold) if epoch is None else epoch
        self._standalone.settle(hold.request.request_id, None)
        await self._say(release_hold(hold.request), epoch)

    async def book_adopted(self, records: Sequence[UsageRecord]) -> None:
        """Settle calls of dead processes that have just come into the ledger.

        Of calls older than the tombstones nobody can tell whether they were settled: a rebuild has to.
        """
        oldest = 1000 * (self._clock.now() - REMEMBERED)
        young = [record for record in records if moment_of(record.request_id) > oldest]
        if self._guard is not None and len(young) < len(records):
            self._guard.alarm("late_journal")
            records = young
        await self.book(records)

    async def book(self, records: Sequence[UsageRecord], epoch: str | None = None) -> None:
        """Settle calls of dead processes as their journals say; what was settled before changes nothing.

        The rows must have come into the ledger in ``epoch``, by default the present one.
        """
        epoch = self.epoch if epoch is None else epoch
        words = []
        for record in records:
            scopes = (Scope("team", record.team_id, NO_LIMITS), Scope("key", record.key_id, NO_LIMITS))
            request = HoldRequest(
                request_id=record.request_id, team_id=record.team_id, scopes=scopes, legs=(), valid_until=0.0
            )
            usage = Usage(record.input_tokens, output_tokens=record.output_tokens)
            is_owed = record.status in CHARGED
            owed = settle_hold(request, Settlement(usage, record.cost_nanousd)) if is_owed else release_hold(request)
            words.append(owed)
        for start in range(0, len(words), MOST):
            await asyncio.gather(*(self._say(each, epoch) for each in words[start : start + MOST]))

    async def correct(
        self, correction_id: str, team_id: str, key_id: str | None, day: int, tokens: int, cost_nanousd: int
    ) -> None:
        """Add signed amounts to what a day (since 1970) and its month have settled; once per id, a UUIDv7.

        Call it inside the same ``Flusher.paused()`` as the transaction that books the correction, after the commit: a
        rebuild between the two would count it twice.
        """
        await self._say(correct_counters(correction_id, team_id, key_id, day, tokens, cost_nanousd), self.epoch)

    def begin_epoch(self, epoch: str) -> list[Hold]:
        """Count in ``epoch`` from now on, standing alone until ``come_back``; return the holds of running calls.

        What was still to be said in older epochs needs nobody: those calls are in the journal or in the ledger.
        """
        self._turn_to(epoch)
        return list(self._live.values())

    async def come_back(self) -> bool:
        """Say everything that Redis has yet to hear, then count in it again. False when it is still not ours."""
        is_back = await super().come_back()
        if is_back:
            self._standalone.end_outage()
        return is_back

    def _begin(self, hold: Hold) -> None:
        if hold.request.request_id not in self._live:
            self._standalone.began(hold.request)
        self._live[hold.request.request_id] = hold

    def _held(self, request: HoldRequest, states: Sequence[ScopeState]) -> Hold:
        requests, tokens = remaining(request, states)
        hold = Hold(request=request, requests=requests, tokens=tokens)
        self._begin(hold)
        return hold
