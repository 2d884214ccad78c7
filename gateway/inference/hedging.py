# Hedged requests: where a first token is slow to come, the next target is asked beside the first, and who begins first
# answers. Both attempts are held, and both are booked: the call's row has the one that answered, a row of its own the
# one that was cancelled, as its upstream bills it.

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Coroutine
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from billing.core.records import HEDGE, HEDGE_LOST, Attempt, Status
from gateway.calls.accounting import CallAccounting
from gateway.calls.answering import Answering
from gateway.calls.call import Call
from gateway.core.clock import Clock
from gateway.core.settings import HedgeSettings
from gateway.inference.admission import Admission
from gateway.inference.attempt import AttemptContext, AttemptLog
from gateway.inference.call_closer import CallCloser
from gateway.inference.dispatcher import Dispatcher
from gateway.overload.slots import Slot
from gateway.telemetry.meters import counter_of
from gateway.telemetry.metrics import Metrics
from gateway.upstreams.wire.errors import UpstreamFailure
from protocol.chat import ChatRequest, HostedTool
from protocol.errors import Overloaded, ServiceError
from protocol.inference import Generation
from protocol.serving.leaving import Client
from router.catalog.targets import Target, Tier

ABANDONED = "abandoned"  # the outcome of a cancelled attempt
SEEN, FEWEST = 100, 20  # first tokens that a target's 95th percentile is told by, and the least for that
LATE = 0.95


class FirstTokenTimes:
    """How long first tokens of targets lately took, for calls that may be hedged."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[float]] = {}  # seconds, by Target.key

    def note(self, target: Target, seconds: float) -> None:
        """A first token took so long, or its attempt was cancelled after so long: it took more."""
        self._seen.setdefault(target.key, deque(maxlen=SEEN)).append(seconds)

    def late(self, target: Target) -> float | None:
        """Return the seconds within which nineteen of twenty came; ``None`` where too few have been seen."""
        seen = self._seen.get(target.key, ())
        return sorted(seen)[math.ceil(LATE * len(seen)) - 1] if len(seen) >= FEWEST else None


class Second(Struct, eq=False):
    """The second attempt of a call: as the books know it, its account, what it tried, and its way to an answer."""

    context: AttemptContext
    log: AttemptLog
    account: CallAccounting
    answer: asyncio.Task[Answering]


class Hedger(Struct, eq=False):
    """Sends calls whose first token may be hedged."""

    hedges: dict[str, HedgeSettings]  # by the name that is asked for
    _dispatcher: Dispatcher
    _admission: Admission
    _closer: CallCloser
    _times: FirstTokenTimes
    _clock: Clock
    _metrics: Metrics

    def delay(self, context: AttemptContext) -> float | None:
        """Return the seconds after which a second target is asked; ``None``: none is.

        Only a client that waits for a stream is served sooner by that; pictures and sound are owed whole wherever they
        are begun, and tools that the upstream runs may do twice what is asked once.
        """
        call, route = context.call, context.route
        if (hedge := self.hedges.get(call.request.model)) is None or not call.streams or len(route.targets) < 2:
            return None
        if call.is_batch_item or call.is_background or call.is_internal or call.routing.tier is not Tier.INTERACTIVE:
            return None
        if not isinstance(call.request, Generation):
            return None
        tools = call.request.tools if isinstance(call.request, ChatRequest) else None
        if any(isinstance(tool, HostedTool) for tool in tools or ()):
            return None
        return self._times.late(route.targets[0]) or math.inf if hedge.after is None else hedge.after

    async def try_targets(
        self, context: AttemptContext, slot: Slot | None, account: CallAccounting, client: Client, after: float
    ) -> Answering:
        """Try the targets as the dispatcher does, and the next one beside the first ``after`` so many seconds without a
        first token. Raises as the dispatcher does; both attempts have ended then, and the second is booked."""
        began = self._clock.monotonic()
        first = asyncio.ensure_future(self._dispatcher.try_targets(context, slot))
        second: Second | None = None
        try:
            await asyncio.wait((first,), timeout=None if after == math.inf else after)
            if not first.done() and not context.log.attempts:
                second = await self._begin(context, account, first)
            if second is None:
                answering = await first
                if len(context.log.attempts) == 1 and answering.target is context.route.targets[0]:
                    self._times.note(context.route.targets[0], self._clock.monotonic() - began)
                return answering
            winner = await self._sooner(first, second)
        except BaseException:
            await _cancel(first, *([] if second is None else [second.answer]))
            _let_go(first)  # it may have answered in the moment in which its client left
            if second is not None:
                context.log.is_hedged = False
                context.log.attempts[:0] = _lost(_beside(second.log.attempts))
                self._book(second, second.log, second.answer, may_owe=client.has_left and context.call.can_be_left)
            raise
        return await self._end(context, first, second, winner, self._clock.monotonic() - began)

    async def _begin(
        self, context: AttemptContext, account: CallAccounting, first: asyncio.Task[Answering]
    ) -> Second | None:
        """Ask the next target that can be asked; ``None`` where none can, no limit has room for both, the retry budget
        is spent, or the first attempt has ended meanwhile, or was made elsewhere, the first target being away."""
        route = context.route
        elsewhere = (one for one in route.targets[1:] if one.key != route.targets[0].key)  # not by another key alone
        target = next(filter(self._dispatcher.can_ask, elsewhere), None)
        if target is None or self._dispatcher.is_away(route.targets[0]):
            return None
        both = replace(route, targets=(target, *(one for one in route.targets if one is not target)), reason=HEDGE)
        call = _named_apart(context.call, self._clock.new_id())
        own = None
        try:
            own = await self._held(first, self._admission.admit_beside(call, context.call, both, account.prompt))
            if own is None or first.done() or context.log.attempts:
                if own is not None:
                    self._admission.settle(own)
                return None
            if not context.budget.take_move(self._clock.monotonic()):
                raise Overloaded("The retry budget is spent.")
        except ServiceError:  # the first attempt goes on alone
            self._count(target, "no_room")
            if own is not None:
                self._admission.settle(own)
            return None
        context.log.is_hedged = True
        enter_beside = partial(own.enter, call, both, Status.FAILED)

        def enter() -> None:
            context.enter()  # the first may still wait for leave to ask, and what answers here is the call's answer
            enter_beside()

        alone = replace(context, route=replace(route, targets=(target,)), log=AttemptLog(), enter=enter)
        answer = asyncio.ensure_future(self._dispatcher.try_beside(alone))
        return Second(replace(alone, call=call, route=both), alone.log, own, answer)

    async def _held(
        self, first: asyncio.Task[Answering], holding: Coroutine[Any, Any, CallAccounting]
    ) -> CallAccounting | None:
        """Return the account that ``holding`` opens; ``None`` where the first attempt ends before there is room: no
        first token waits for that."""
        admitting, is_left = asyncio.create_task(holding), False
        try:
            await asyncio.wait((first, admitting), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            is_left = True
        is_left = await _cancel(admitting) or is_left
        if is_left:
            if _has_result(admitting):
                self._admission.settle(admitting.result())
            raise asyncio.CancelledError
        return None if admitting.cancelled() else admitting.result()

    async def _sooner(self, first: asyncio.Task[Answering], second: Second) -> asyncio.Task[Answering] | None:
        """Return the attempt that answers first, the call's own where both do; ``None`` where neither does, or where
        the first has found that the call itself is at fault."""
        waiting = {first, second.answer}
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for one in (first, second.answer):
                if one in done and one.exception() is None:
                    return one
            why = first.exception() if first in done else None
            if isinstance(why, UpstreamFailure) and not why.moves_on:
                return None
        return None

    async def _end(
        self,
        context: AttemptContext,
        first: asyncio.Task[Answering],
        second: Second,
        winner: asyncio.Task[Answering] | None,
        elapsed: float,
    ) -> Answering:
        """Cancel the attempt that lost, book it, and return the answer of the other; where there is none, go on along
        the route. Raises as the dispatcher does."""
        is_left = await _cancel(*(one for one in (first, second.answer) if one is not winner))
        log, target, beside = context.log, context.route.targets[0], second.context.route.targets[0]
        log.is_hedged = False
        if first.cancelled() or first.exception() is None:
            self._times.note(target, elapsed)
        if winner is not first:  # where the first had failed before, the call waited on for the second
            log.waited = max(log.waited, elapsed)
        if winner is second.answer:
            lost = AttemptLog()
            lost.attempts, lost.was_left_waiting = log.attempts, log.was_left_waiting
            log.attempts = [*_lost(log.attempts), *_beside(second.log.attempts)]
            log.was_left_waiting = False
            self._book(second, lost, first, may_owe=True)
        else:
            log.attempts[:0] = _lost(_beside(second.log.attempts))
            self._book(second, second.log, second.answer, may_owe=True)
        self._count(beside, "failed" if winner is None else "lost" if winner is first else "won")
        if winner is not None:
            if is_left:
                winner.result().close()
                raise asyncio.CancelledError
            return winner.result()
        failure = first.exception()
        assert failure is not None
        rest = tuple(one for one in context.route.targets if one is not target and one is not beside)
        if is_left or not rest or not isinstance(failure, UpstreamFailure) or not failure.moves_on:
            raise failure
        context = replace(context, route=replace(context.route, targets=rest))
        return await self._dispatcher.try_targets(context, failure=failure)

    def _book(self, second: Second, log: AttemptLog, attempt: asyncio.Task[Answering], *, may_owe: bool) -> None:
        """Close the account of the attempt that does not answer the call: what its upstream had all of is owed."""
        is_owed = may_owe and (log.was_left_waiting or log.has_answered)
        _let_go(attempt)
        log.attempts = [one if one.outcome != ABANDONED else replace(one, outcome=HEDGE_LOST) for one in log.attempts]
        status = Status.INTERRUPTED if is_owed else Status.FAILED
        self._closer.close_unanswered(replace(second.context, log=log), second.account, status)

    def _count(self, target: Target, outcome: str) -> None:
        counter_of(self._metrics.hedges, target.model.name, outcome).inc()


def _named_apart(call: Call, request_id: str) -> Call:
    """Return what stands for a second attempt in the books: a call of the same team and key that is none of its
    requests, and names the call that it is of."""
    return replace(
        call, request_id=request_id, client_request_id=call.request_id, is_internal=True, idempotency_key=None
    )


def _lost(attempts: list[Attempt]) -> list[Attempt]:
    """Return attempts as their call's row has them: they have one of their own, which tells how they ended."""
    return [replace(one, outcome=HEDGE_LOST) for one in attempts]


def _beside(attempts: list[Attempt]) -> list[Attempt]:
    return [replace(one, hedge=True) for one in attempts]


def _has_result(task: asyncio.Task[Any]) -> bool:
    return not task.cancelled() and task.exception() is None


def _let_go(attempt: asyncio.Task[Answering]) -> None:
    """Close the answer of an attempt that has ended, where it has one."""
    if _has_result(attempt):
        attempt.result().close()


async def _cancel(*attempts: asyncio.Task[Any]) -> bool:
    """Cancel attempts and wait until they have let their upstreams go; whether this call was cancelled meanwhile."""
    running = [one for one in attempts if not one.done()]
    for one in running:
        one.cancel()
    is_left = False
    while not all(one.done() for one in running):
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:  # they end at once, and what they used has to be booked
            is_left = True
    return is_left
