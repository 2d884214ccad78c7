# When a second attempt is made, which of two answers, and what becomes of the other, whenever a client leaves.

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from billing.core.holds import Hold, HoldRequest
from billing.core.records import HEDGE, HEDGE_LOST, Attempt
from gateway.calls.call import Call
from gateway.core.principals import Caller, Team
from gateway.core.settings import HedgeSettings
from gateway.inference.attempt import AttemptContext, AttemptLog
from gateway.inference.hedging import FEWEST, SEEN, FirstTokenTimes, Hedger, Second
from gateway.telemetry.metrics import Metrics
from gateway.upstreams.resilience.retry_budget import BURST, RetryBudget
from gateway.upstreams.wire.errors import UpstreamError, UpstreamRefused
from protocol.chat import ChatRequest
from protocol.completions import CompletionRequest
from protocol.media.images import ImageRequest
from protocol.serving.leaving import Client
from router import RoutingOptions
from router.catalog.targets import Endpoint, Route, Target, TeamKeys
from tests.support.clock import SetClock
from tests.support.factories import make_record
from tests.support.house import model

HERE = Endpoint("local", "http://upstream")
TARGET, WIDE, LAST = (Target(model(name), HERE) for name in ("small", "wide", "last"))
OWN = Target(TARGET.model, HERE, TeamKeys("a"))
CALL = Call(
    request_id="0196090a-7c00-7000-8000-000000000000",
    caller=Caller(team=Team(id="a", name="A"), key_id="k"),
    endpoint="chat.completions",
    request=ChatRequest(model="small", messages=(), stream=True),
    routing=RoutingOptions(),
    created_at=0.0,
    started=0.0,
)


class Answer:
    """Stands in for an upstream that has begun to answer."""

    def __init__(self, target: Target = TARGET) -> None:
        self.target, self.closed = target, 0

    def close(self) -> None:
        self.closed += 1


class Parts:
    """Stands in for the dispatcher, the admission and the closer: attempts go as the test says, and what is asked, held
    and booked is kept."""

    def __init__(self, first: Any, second: Any = None, targets: tuple[Target, ...] = (TARGET, WIDE, LAST)) -> None:
        self.context = AttemptContext(
            CALL, Route("small", targets, "named"), AttemptLog(), cast(Any, None), RetryBudget(0.0)
        )
        self.log, self.clock, self.metrics = self.context.log, SetClock(), Metrics()
        self.asked, self.held, self.settled, self.booked = list[Any](), list[Any](), list[Any](), list[Any]()
        self.room = asyncio.Event()
        self.room.set()
        self._first, self._second = first, second
        self.hedger = Hedger(
            {"small": HedgeSettings(0.0)}, *cast(Any, (self, self, self)), FirstTokenTimes(), self.clock, self.metrics
        )

    def ask(self) -> asyncio.Task[Any]:
        account = cast(Any, SimpleNamespace(prompt=None))
        return asyncio.ensure_future(self.hedger.try_targets(self.context, None, account, Client(), 0.0))

    async def try_targets(self, context: AttemptContext, slot: Any = None, failure: Any = None) -> Any:
        if failure is not None:
            self.asked.append(context.route.targets)
            return Answer(context.route.targets[0])
        return await self._first(self)

    async def try_beside(self, context: AttemptContext) -> Any:
        self.asked.append(context.route.targets)
        return await self._second(self)

    def can_ask(self, target: Target) -> bool:
        return True

    def is_away(self, target: Target) -> bool:
        return False

    async def admit_beside(self, named: Call, *_: Any) -> Any:
        await self.room.wait()
        request = HoldRequest(request_id=named.request_id, team_id="a", scopes=(), legs=())
        self.held.append(SimpleNamespace(hold=Hold(request=request), enter=lambda *_: None))
        return self.held[-1]

    def settle(self, account: Any) -> None:
        self.settled.append(account)

    def close_unanswered(self, context: AttemptContext, account: Any, status: Any) -> None:
        self.booked.append((account, status, [one.outcome for one in context.log.attempts]))

    @property
    def outcomes(self) -> str:
        return self.metrics.render().decode()


async def turns(number: int = 10) -> None:
    """Let what is ready run."""
    for _ in range(number):
        await asyncio.sleep(0.001)


async def never(parts: Parts) -> Any:
    await asyncio.sleep(60)


def test_a_target_is_late_after_nineteen_of_twenty() -> None:
    """Of those lately seen; of fewer than twenty nothing is told."""
    times = FirstTokenTimes()
    for number in range(1, FEWEST):
        times.note(TARGET, number / 100)
    before = times.late(TARGET)
    times.note(TARGET, 9.0)
    late = times.late(TARGET)
    for _ in range(SEEN):
        times.note(TARGET, 0.5)

    assert (before, late, times.late(TARGET)) == (None, 0.19, 0.5)


@pytest.mark.parametrize(
    ("first", "second", "winner"),
    [
        ("a", "b", "first"),  # both at the same moment
        (UpstreamError("Broken."), "b", "second"),
        ("a", UpstreamError("Broken."), "first"),
        (UpstreamError("Broken."), UpstreamError("Broken."), None),
        (UpstreamRefused("No.", outcome="refused"), "b", "second"),
    ],
)
async def test_of_two_attempts_that_end_at_once_the_first_answers(first: Any, second: Any, winner: str | None) -> None:
    """A failure is no answer, whichever way it ends."""

    async def end(how: Any) -> Any:
        if isinstance(how, Exception):
            raise how
        return how

    tasks = {"first": asyncio.ensure_future(end(first)), "second": asyncio.ensure_future(end(second))}
    beside = cast(Any, Second)(None, None, None, tasks["second"])
    won = await Hedger._sooner(cast(Any, None), tasks["first"], beside)

    assert won is (tasks[winner] if winner else None)
    for task in tasks.values():
        task.exception()


async def test_an_answer_that_comes_as_its_client_leaves_is_let_go() -> None:
    """Its slot and its connection were held for ever: the client leaves when the first token has come, and before the
    call has heard of it."""
    answer, asking = Answer(), list[asyncio.Task[Any]]()

    async def first(parts: Parts) -> Any:
        await turns(1)
        asyncio.get_running_loop().call_soon(asking[0].cancel)
        return answer

    parts = Parts(first)
    parts.room.clear()
    asking.append(parts.ask())

    with pytest.raises(asyncio.CancelledError):
        await asking[0]
    assert answer.closed == 1 and parts.settled == parts.held


async def test_a_first_token_waits_for_no_room() -> None:
    """Where a limit is tight, room for the second attempt is looked for in Postgres."""
    answer = Answer()

    async def first(parts: Parts) -> Any:
        await turns(3)
        parts.log.add(TARGET, "ok", 0.1)
        return answer

    parts = Parts(first)
    parts.room.clear()

    assert await asyncio.wait_for(parts.ask(), 5) is answer
    assert parts.held == parts.asked == [] and answer.closed == 0


@pytest.mark.parametrize("is_admitted", [False, True])
async def test_a_client_that_leaves_before_a_second_attempt_leaves_nothing_held(is_admitted: bool) -> None:
    """Neither while room is looked for, nor in the moment in which it is there."""
    parts = Parts(never)
    parts.room.clear()
    asking = parts.ask()
    await turns(3)
    if is_admitted:
        parts.room.set()
        asyncio.get_running_loop().call_soon(asking.cancel)
    else:
        asking.cancel()

    with pytest.raises(asyncio.CancelledError):
        await asking
    assert parts.settled == parts.held and len(parts.held) == is_admitted and parts.asked == []


async def test_a_spent_retry_budget_stops_a_second_attempt() -> None:
    """Hedges are no way round what makes storms impossible; what was held goes back."""
    parts = Parts(never)
    for _ in range(BURST):
        assert parts.context.budget.take_move(parts.clock.monotonic())
    asking = parts.ask()
    await turns(3)
    asking.cancel()

    with pytest.raises(asyncio.CancelledError):
        await asking
    assert parts.asked == [] and len(parts.held) == 1 and parts.settled == parts.held
    assert 'tollgate_hedges_total{model="wide",outcome="no_room"} 1' in parts.outcomes


async def test_a_client_that_leaves_twice_while_the_loser_is_let_go() -> None:
    """The loser is booked once, after it has ended, and the answer of the other is closed."""
    gone, answer = asyncio.Event(), Answer(WIDE)

    async def first(parts: Parts) -> Any:
        try:
            await asyncio.sleep(60)
        finally:
            await gone.wait()
            parts.log.add(TARGET, "abandoned", 0.1)
            parts.log.left(is_received=True)

    async def second(parts: Parts) -> Any:
        return answer

    parts = Parts(first, second)
    asking = parts.ask()
    for _ in range(2):
        await turns(5)
        asking.cancel()
    await turns(5)
    assert not asking.done() and parts.booked == []
    gone.set()

    with pytest.raises(asyncio.CancelledError):
        await asking
    assert answer.closed == 1 and parts.booked == [(parts.held[0], "interrupted", ["hedge_lost"])]


@pytest.mark.parametrize("targets", [(TARGET, WIDE, LAST), (OWN, WIDE, TARGET)], ids=["models", "keys"])
async def test_where_both_fail_the_rest_of_the_route_is_asked(targets: tuple[Target, ...]) -> None:
    """Neither of the two again; the endpoint of a team's own key that failed with the deployment's. What the call
    waited for them is no time of ours."""

    async def fail(parts: Parts) -> Any:
        await turns(3)
        parts.log.add(targets[0], "error", 0.1)
        raise UpstreamError("Broken.")

    async def fail_later(parts: Parts) -> Any:
        await turns(10)
        parts.clock.move(2.0)
        raise UpstreamError("Broken.")

    parts = Parts(fail, fail_later, targets)
    answering = await parts.ask()

    assert answering.target is targets[2] and parts.asked == [(WIDE,), (targets[2],)]
    assert [status for _, status, _ in parts.booked] == ["failed"] and parts.log.waited >= 2.0
    assert parts.hedger._times._seen == {}  # a failure is no first token


def test_an_attempt_is_counted_once() -> None:
    """What has a row of its own is told in its call's, too."""
    metrics, ok = Metrics(), Attempt("a", "ok", 1.0)
    metrics.close(make_record("1", attempts=(Attempt("b", HEDGE_LOST, 1.0), ok)))
    metrics.close(make_record("2", attempts=(Attempt("b", "timeout", 1.0),), route_reason=HEDGE))
    metrics.close(make_record("3", attempts=(Attempt("c", HEDGE_LOST, 1.0), ok)))
    metrics.close(make_record("4", attempts=(Attempt("c", HEDGE_LOST, 1.0),), route_reason=HEDGE))
    found = [line.partition("{")[2] for line in metrics.render().decode().splitlines() if "attempts_total{" in line]

    assert sorted(found) == [
        'outcome="hedge_lost",target="c"} 1.0',
        'outcome="ok",target="a"} 2.0',
        'outcome="timeout",target="b"} 1.0',
    ]


async def test_an_endpoint_is_not_hedged_with_itself() -> None:
    """With the deployment's keys beside a team's own it would be no sooner, and at the deployment's cost."""
    answer = Answer(OWN)

    async def first(parts: Parts) -> Any:
        await turns(5)
        return answer

    parts = Parts(first, targets=(OWN, TARGET))

    assert await parts.ask() is answer and parts.held == []


async def test_what_another_target_took_is_not_the_firsts() -> None:
    """The first was away: its 95th percentile would be told by the others'."""

    async def first(parts: Parts) -> Any:
        parts.log.add(WIDE, "ok", 0.1)
        return Answer(WIDE)

    parts = Parts(first)
    await parts.ask()

    assert parts.hedger._times._seen == {}


async def test_a_plain_call_is_not_hedged() -> None:
    """Nor where our own engine is asked for a stream all the same; nor a picture, which both upstreams would make whole
    and charge."""
    parts = Parts(never)
    words = {"model": "small", "prompt": "A toll gate", "stream": True}
    asked = (ChatRequest(model="small", messages=()), CompletionRequest(**words), ImageRequest(**words))

    assert parts.hedger.delay(parts.context) == 0.0
    calls = [replace(CALL, request=each) for each in asked]
    assert [parts.hedger.delay(replace(parts.context, call=each)) for each in calls] == [None, 0.0, None]
