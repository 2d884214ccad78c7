# How a call walks its route: whom it asks, in which order, how often, and what it says when nobody answers.

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from redis.asyncio import Redis

from gateway.calls.call import Call
from gateway.calls.remote_prefill import RemotePrefills
from gateway.calls.unanswered import AllLimited
from gateway.core.background import Background
from gateway.core.principals import Caller, Team
from gateway.core.settings import BreakerPolicy, ProviderSettings, QueueSettings, Retries
from gateway.inference.attempt import AttemptLog
from gateway.inference.dispatcher import Dispatcher
from gateway.inference.limiter import TargetLimiter
from gateway.telemetry.metrics import Metrics
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.resilience.breakers import Breakers
from gateway.upstreams.resilience.first_tokens import FirstTokens
from gateway.upstreams.resilience.retry_budget import BURST, RetryBudgets
from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamBusy, UpstreamError, UpstreamFailure, UpstreamRefused, UpstreamTimeout
from gateway.upstreams.wire.reading import usual_failure
from protocol.chat import ChatRequest, Message
from protocol.errors import Overloaded
from router import RoutingOptions
from router.catalog.targets import Endpoint, Route, Target
from tests.support.clock import SetClock
from tests.support.house import NEVER_OPENS, model

US, EU, OTHER = "http://us/v1", "http://eu/v1", "http://other/v1"
ANSWER = b'{"choices":[{"index":0,"message":{"content":"hi"},"finish_reason":"stop"}]}'
Act = Callable[[str], UpstreamFailure | None]


class Answer:
    """A whole reply."""

    status = 200
    headers: Mapping[str, str] = MappingProxyType({})

    async def read(self) -> bytes:
        """Return its body."""
        return ANSWER

    def close(self) -> None:
        """Nothing to close."""


class Upstreams:
    """Every endpoint, each doing as told; notes who was asked with which key."""

    def __init__(self, **acts: Act) -> None:
        self.acts = acts
        self.asked: list[tuple[str, str]] = []
        self.deadlines: list[str | None] = []

    async def send(self, request: UpstreamRequest, connect: float, patience: float) -> Answer:
        """Fail or answer, as the endpoint was told to."""
        self.deadlines.append(request.headers.get("x-deadline-ms"))
        host = request.url.split("/")[2]
        key = request.headers["authorization"].removeprefix("Bearer ")
        self.asked.append((host, key))
        await asyncio.sleep(0)
        if (failure := self.acts[host](key)) is not None:
            raise failure
        return Answer()


class Scene:
    """A route over two regions and a spare model, with real breakers and a real budget."""

    def __init__(
        self,
        upstreams: Upstreams,
        *,
        attempts: int = 1,
        budget: float = 0.1,
        breaker: BreakerPolicy = NEVER_OPENS,
        self_hosted: bool = False,
    ) -> None:
        self.clock = SetClock()
        self.upstreams = upstreams
        retries = Retries(attempts=attempts, budget=budget)
        regions = ProviderSettings(
            name="regions",
            format="openai",
            api_keys=("one", "two"),
            endpoints=(Endpoint("us", US), Endpoint("eu", EU)),
            retries=retries,
            breaker=breaker,
            self_hosted=self_hosted,
        )
        spare = ProviderSettings(
            name="spare",
            format="openai",
            api_keys=("three",),
            endpoints=(Endpoint("any", OTHER),),
            retries=retries,
            breaker=breaker,
        )
        registry = ProviderRegistry({"regions": regions, "spare": spare})
        best, second = model("best", "regions"), model("second", "spare")
        targets = (*(Target(best, one) for one in regions.endpoints), Target(second, spare.endpoints[0]))
        self.route = Route("best", targets, "named")
        self.breakers = Breakers(registry, targets, self.clock, Background(), Redis(port=1))
        self.breakers.is_alone = True
        self.budgets = RetryBudgets()
        limiter = TargetLimiter(registry, targets, self.breakers, QueueSettings(), self.clock, Metrics())
        client, first_tokens = cast(UpstreamClient, upstreams), FirstTokens(self.clock)
        prefills = RemotePrefills(registry, client, limiter.prompt_at, self.clock)
        self.dispatcher = Dispatcher(
            registry, client, self.breakers, self.budgets, limiter, prefills, first_tokens, self.clock
        )

    def call(self, *allowed_models: str) -> Call:
        """Return a call for "best" by a team that may use all models, or these."""
        return Call(
            request_id=self.clock.new_id(),
            caller=Caller(team=Team(id="a", name="A"), key_id="k"),
            endpoint="chat.completions",
            request=ChatRequest(model="best", messages=(Message(role="user", content="hi"),)),
            routing=RoutingOptions(allowed_models=frozenset(allowed_models) or None),
            created_at=self.clock.now(),
            started=self.clock.monotonic(),
        )

    async def told(self, *allowed_models: str) -> str:
        """Return what such a call is told when no target answers."""
        with pytest.raises((UpstreamFailure, Overloaded)) as raised:
            await self.dispatcher.try_targets(
                self.dispatcher.begin(self.call(*allowed_models), self.route, AttemptLog())
            )
        return str(raised.value.message)

    async def ask(self, route: Route | None = None) -> tuple[str, list[str]]:
        """Return which region answered, or the failure's code, and the outcomes of all attempts."""
        log = AttemptLog()
        try:
            answering = await self.dispatcher.try_targets(self.dispatcher.begin(self.call(), route or self.route, log))
        except (UpstreamFailure, Overloaded) as exc:
            return str(exc.code), [attempt.outcome for attempt in log.attempts]
        return answering.target.endpoint.region, [attempt.outcome for attempt in log.attempts]


def well(_: str) -> None:
    return None


def broken(_: str) -> UpstreamFailure:
    return UpstreamError("broken", outcome="connect")


def unknown(_: str) -> UpstreamFailure:
    return usual_failure(404, {}, f"No deployment org-7/best at {US}.")


def refuses(*keys: str) -> Act:
    return lambda key: UpstreamError("no", outcome="refused_key") if key in keys else None


def limits(*keys: str) -> Act:
    return lambda key: UpstreamBusy("slow down", retry_after=7) if key in keys else None


@pytest.mark.parametrize(
    ("us", "eu", "answered_by", "outcomes"),
    [
        (well, well, "us", ["ok"]),
        (broken, well, "eu", ["connect", "ok"]),
        (broken, broken, "any", ["connect", "connect", "connect", "ok"]),
        (refuses("one"), well, "us", ["refused_key", "ok"]),
        (refuses("one", "two"), well, "eu", ["refused_key", "refused_key", "ok"]),
        (limits("one"), well, "us", ["rate_limited", "ok"]),
        (limits("one", "two"), well, "eu", ["rate_limited", "rate_limited", "ok"]),
        (lambda _: UpstreamTimeout("silence"), well, "eu", ["timeout", "ok"]),
        (lambda _: UpstreamRefused("your fault", code="invalid_value"), well, "invalid_value", ["refused"]),
    ],
)
async def test_next_key_then_next_endpoint_then_next_model(
    us: Act, eu: Act, answered_by: str, outcomes: list[str]
) -> None:
    """Each failure goes to whoever can help with it, at once; the request's own fault goes nowhere."""
    scene = Scene(Upstreams(us=us, eu=eu, other=well), attempts=2)

    assert await scene.ask() == (answered_by, outcomes)


async def test_the_last_endpoint_of_a_model_is_tried_again_before_another_model() -> None:
    """A blip changes the region, not the model: `attempts` tries where no other endpoint is left."""
    falls = iter([broken(""), broken(""), broken(""), None])
    scene = Scene(Upstreams(us=lambda _: next(falls), eu=lambda _: next(falls), other=well), attempts=3)

    assert await scene.ask() == ("eu", ["connect", "connect", "connect", "ok"])


async def test_what_is_away_is_passed_by_at_no_cost() -> None:
    """An open breaker takes neither an attempt nor budget; with all of them open the answer is 503, unasked."""
    upstreams = Upstreams(us=broken, eu=broken, other=broken)
    scene = Scene(upstreams, budget=0.0, breaker=BreakerPolicy(min_requests=3))
    while len(scene.breakers.health()) < 3:
        await scene.ask()
    asked, spent = len(upstreams.asked), scene.budgets.all()["regions"].spent
    away = scene.dispatcher.refusal(scene.call(), scene.route)

    assert await scene.ask() == ("overloaded", [])
    assert (len(upstreams.asked), scene.budgets.all()["regions"].spent) == (asked, spent)
    assert isinstance(away, Overloaded) and away.headers["retry-after"] == "15"


async def test_limits_of_all_keys_are_passed_on_unasked() -> None:
    """429 with what is left of the wait, for as long as it lasts."""
    upstreams = Upstreams(us=limits("one", "two"), eu=limits("one", "two"), other=limits("three"))
    scene = Scene(upstreams)
    first = await scene.ask()
    scene.clock.move(3.0)
    away = scene.dispatcher.refusal(scene.call(), scene.route)
    scene.clock.move(4.1)

    assert first == ("rate_limit_exceeded", ["rate_limited"] * 5)
    assert isinstance(away, AllLimited) and away.headers["retry-after"] == "4"
    assert scene.dispatcher.refusal(scene.call(), scene.route) is None


async def test_each_model_that_was_tried_is_named_with_why_it_did_not_answer() -> None:
    """One sentence a model, endpoints that say the same told once; an open breaker and a rate limit with their wait."""
    scene = Scene(Upstreams(us=unknown, eu=unknown, other=lambda _: UpstreamTimeout("The upstream fell silent.")))

    answered = await scene.told()
    await scene.breakers.force_open(scene.breakers.watch(scene.route.targets[0]), "a test")
    scene.upstreams.acts |= {"eu": limits("one", "two")}
    later = await scene.told()
    refused = await scene.told()

    assert answered == (
        "No model answered. 'best': the upstream knows no such model, or no such path. "
        "'second': the upstream fell silent."
    )
    assert later == (
        "No model answered. 'best': its breaker is open, until an administrator resets it, "
        "slow down. 'second': the upstream fell silent."
    )
    assert "its upstream's rate limit is reached, for 7 s more. 'second': the upstream fell silent." in refused


async def test_with_nothing_left_to_ask_each_model_is_named() -> None:
    """A refusal before any attempt names the models, too, and what stands in their way."""
    scene = Scene(Upstreams(us=well, eu=well, other=well))
    for target in scene.route.targets:
        await scene.breakers.force_open(scene.breakers.watch(target), "a test")

    away = scene.dispatcher.refusal(scene.call(), scene.route)

    why = "its breaker is open, until an administrator resets it."
    assert away is not None
    assert away.message == f"No model can be asked now. 'best': {why} 'second': {why} Try again later."
    assert await scene.told() == away.message


async def test_a_model_that_a_teams_list_has_not_is_told_by_the_name_that_was_asked() -> None:
    """A team whose list names an alias or a route learns no other name of the catalogue; no caller learns a URL."""
    scene = Scene(Upstreams(us=unknown, eu=unknown, other=broken))

    told = [await scene.told("best"), await scene.told()]

    assert told[0] == "No model answered. 'best': the upstream knows no such model, or no such path, broken."
    assert told[1] == told[0][: -len(", broken.")] + ". 'second': broken."


def too_long(_: str) -> UpstreamFailure:
    return usual_failure(400, {}, "This model's maximum context length is 8192 tokens.", code="context_length_exceeded")


@pytest.mark.parametrize(
    ("context", "answered_by", "outcomes"),
    [(100_000, "any", ["refused", "ok"]), (8_192, "context_length_exceeded", ["refused"])],
)
async def test_a_prompt_too_long_for_a_model_goes_to_one_that_holds_more(
    context: int, answered_by: str, outcomes: list[str]
) -> None:
    """No other endpoint of the model is asked, nor a model whose context is as short; it is on no budget."""
    scene = Scene(Upstreams(us=too_long, eu=too_long, other=well), budget=0.0)
    *best, other = scene.route.targets
    other = replace(other, model=replace(other.model, context=context))

    for _ in range(BURST + 1):
        assert await scene.ask(replace(scene.route, targets=(*best, other))) == (answered_by, outcomes)


async def test_no_attempt_begins_after_the_calls_deadline() -> None:
    """The whole call has one deadline; a target that takes it all leaves none to others, and its silence counts."""
    scene = Scene(Upstreams(us=well, eu=well, other=well))

    def silent(_: str) -> UpstreamFailure:
        scene.clock.move(600.0)
        return UpstreamTimeout("silence")

    scene.upstreams.acts["us"] = silent

    assert await scene.ask() == ("upstream_timeout", ["timeout"])


async def test_our_own_engine_is_told_what_is_left_of_the_deadline() -> None:
    """Each replica hears how long the call may still take: what an attempt before it took is gone."""
    scene = Scene(Upstreams(us=well, eu=broken, other=well), self_hosted=True)

    def slow(_: str) -> UpstreamFailure:
        scene.clock.move(100.0)
        return UpstreamTimeout("silence")

    scene.upstreams.acts["us"] = slow
    await scene.ask()

    assert scene.upstreams.deadlines == ["600000", "500000", None]  # the last is no engine of ours


@settings(max_examples=25, deadline=None)
@given(
    calls=st.integers(1, 150),
    budget=st.sampled_from([0.0, 0.1, 0.5]),
    attempts=st.integers(1, 2),
    at_once=st.booleans(),
)
def test_with_everything_failing_there_is_no_storm(calls: int, budget: float, attempts: int, at_once: bool) -> None:
    """Upstreams hear of (1 + budget) × calls + burst attempts at the most, whatever routes and settings would allow."""
    upstreams = Upstreams(us=broken, eu=broken, other=broken)

    async def run() -> Counter[str]:
        scene = Scene(upstreams, attempts=attempts if at_once else 1, budget=budget)
        if at_once:
            answers = await asyncio.gather(*(scene.ask() for _ in range(calls)))
        else:
            answers = [await scene.ask() for _ in range(calls)]
        return Counter(code for code, _ in answers)

    codes = asyncio.run(run())

    assert codes == {"upstream_error": calls}
    assert calls <= len(upstreams.asked) <= (1 + budget) * calls + BURST


async def test_a_call_that_is_never_sent_earns_no_extra_attempt() -> None:
    """The content policy may forbid a call before it is sent: any number of those pays for no retry of another."""
    scene = Scene(Upstreams(us=well, eu=well, other=well), budget=0.5)
    for _ in range(100):
        context = scene.dispatcher.begin(scene.call(), scene.route, AttemptLog())

    extra = 0
    while context.budget.take_move(scene.clock.monotonic()):
        extra += 1

    assert extra == BURST


async def test_a_cold_region_that_fails_under_a_hundred_calls_fails_none_of_them() -> None:
    """The burst is there for this: calls that began together all find the other region."""
    scene = Scene(Upstreams(us=broken, eu=well, other=well), attempts=2, breaker=BreakerPolicy())
    answers: list[Any] = await asyncio.gather(*(scene.ask() for _ in range(100)))

    assert {region for region, _ in answers} == {"eu"}
    assert list(scene.breakers.health()) == [scene.route.targets[0].key]
