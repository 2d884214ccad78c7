# What admission makes of a hold that is refused: asked for again for an answer that fits.

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace
from sqlalchemy import make_url

from billing.core.errors import ExceedsLimit, LimitUnknown, QuotaExhausted, RateLimited
from billing.core.holds import HoldRequest, Limits, Scope, Settlement
from billing.core.money import to_nano
from billing.core.prices import Price
from billing.journal.journal import Journal
from billing.quotas.lease_store import PostgresLeases
from gateway.calls.call import Call
from gateway.calls.journaling import OpenCalls
from gateway.core.principals import Caller, Team
from gateway.inference.admission import Admission
from gateway.storage.database import Database
from protocol.chat import ChatRequest, Message
from protocol.completions import CompletionRequest
from protocol.embeddings import EmbeddingRequest
from protocol.errors import ServiceError
from protocol.inference import Request
from protocol.usage import Usage
from router import RoutingOptions
from router.catalog.targets import Endpoint, ModelSpec, Route, Target
from router.prompt_size.bounds import WORTHWHILE
from router.prompt_size.prompt_bounds import bound_prompt
from tests.support.clock import SetClock
from tests.support.house import model
from tests.support.limited import LimitedQuotas, set_limits

NONE = Limits()
SMALL = model("small")  # $1 in, $2 out; answers of up to 1,024 tokens


class Parts:
    """What admission needs, and admission."""

    def __init__(self, quotas: LimitedQuotas, journal: Journal, open_calls: OpenCalls, clock: SetClock) -> None:
        self.quotas, self.open_calls, self.clock = quotas, open_calls, clock
        self.admission = Admission(quotas, journal, open_calls, clock)


@pytest.fixture
async def parts(quotas: LimitedQuotas, clock: SetClock, tmp_path: Path) -> AsyncIterator[Parts]:
    """What admission needs of them."""
    journal = Journal.open(tmp_path, clock=clock)
    yield Parts(quotas, journal, OpenCalls(), clock)
    journal.close()


def call_of(
    parts: Parts,
    request: Request | None = None,
    *,
    team: Limits = NONE,
    key: Limits = NONE,
    models: tuple[ModelSpec, ...] = (SMALL,),
    of: tuple[str, str] = ("a", "k"),
    **more: Any,
) -> tuple[Call, Route]:
    """Return a call ``of`` a team and a key, and its route."""
    call = Call(
        request_id=parts.clock.new_id(),
        caller=Caller(team=Team(id=of[0], name="A", limits=team), key_id=of[1], key_limits=key),
        endpoint="chat.completions",
        request=request or chat(max_tokens=10),
        routing=RoutingOptions(),
        created_at=parts.clock.now(),
        started=0.0,
        **more,
    )
    return call, Route("small", tuple(Target(one, Endpoint("here", "http://upstream")) for one in models), "named")


def chat(**more: Any) -> ChatRequest:
    """Return a short question."""
    return ChatRequest(model="small", messages=(Message(role="user", content="Hi"),), **more)


PROMPT = bound_prompt(chat()).size


def budget_for(answer: int) -> int:
    """Return nano-dollars that cover a short question and an answer of so many tokens, to the last."""
    return 1_000 * PROMPT + 2_000 * answer


@pytest.mark.parametrize("size", [1_000, 50_000])
async def test_a_prompt_is_held_by_its_tokens_where_they_count(parts: Parts, size: int) -> None:
    """A long prompt of a team with a budget is looked at closely, and any that would be refused; so a budget of less
    than its bytes has room for it, and what is held is never less than its tokens."""
    words = "The gateway holds what a prompt may cost, and no more. "
    tokens = size // len(words) * 13  # by o200k_base
    request = ChatRequest(
        model="small", messages=(Message(role="user", content=words * (size // len(words))),), max_tokens=1
    )
    limits = Limits(tokens_per_day=size // 2 + 200)

    _, account = await parts.admission.admit(
        *call_of(parts, request, team=limits, models=(model("small", context=10**6),))
    )

    assert tokens < account.hold.request.tokens < 2 * tokens + 200


@pytest.mark.parametrize("kind", ["team", "key"])
@pytest.mark.parametrize(
    "limits",
    [
        Limits(nanousd_per_day=budget_for(700)),
        Limits(nanousd_per_month=budget_for(700)),
        Limits(tokens_per_day=PROMPT + 700),
        Limits(tokens_per_minute=PROMPT + 700),
    ],
)
async def test_a_call_that_names_no_limit_gets_the_one_that_fits(parts: Parts, limits: Limits, kind: str) -> None:
    """The smaller of the model's own output and what the tightest budget of team and key holds, to the token."""
    call, route = call_of(parts, chat(), **{kind: limits})  # type: ignore[arg-type]

    fitted, account = await parts.admission.admit(call, route)

    assert (fitted.fitted_output, fitted.request.output_limit) == (700, 700)  # type: ignore[union-attr]
    assert account.hold.request.tokens == PROMPT + 700


async def test_a_call_that_fits_is_left_alone(parts: Parts) -> None:
    """Where the model's own output fits, nothing is said of a limit."""
    call, route = call_of(parts, chat(), team=Limits(nanousd_per_day=budget_for(1_024)))

    assert (await parts.admission.admit(call, route))[0] is call


async def test_what_fits_the_dearest_target_is_held(parts: Parts) -> None:
    """A fallback may be dearer, or say less than the first: the limit covers each of them."""
    dear = model("dear", price=Price(input=to_nano(2), output=to_nano(4)))
    short = model("short", max_output=100)
    call, route = call_of(parts, chat(), team=Limits(nanousd_per_day=2 * budget_for(600)), models=(SMALL, dear, short))

    fitted, account = await parts.admission.admit(call, route)

    assert fitted.fitted_output == 600
    assert account.hold.request.cost_nanousd == 2 * budget_for(600)


async def test_every_reply_of_a_call_fits(parts: Parts) -> None:
    """The limit is one for each of ``n`` replies; all of them are held."""
    call, route = call_of(parts, chat(n=2), team=Limits(nanousd_per_day=budget_for(1_300)))

    assert (await parts.admission.admit(call, route))[0].fitted_output == 650


async def test_an_answer_that_would_be_cut_off_is_refused(parts: Parts) -> None:
    """Below a few hundred tokens the caller is told what is left; whoever names so few gets them."""
    limits = Limits(nanousd_per_day=budget_for(WORTHWHILE - 1))

    with pytest.raises(ExceedsLimit, match=f"max_tokens of {WORTHWHILE - 1} or less"):
        await parts.admission.admit(*call_of(parts, chat(), team=limits))
    named, _ = await parts.admission.admit(*call_of(parts, chat(max_tokens=WORTHWHILE - 1), team=limits))

    assert named.fitted_output is None


@pytest.mark.parametrize("is_settled", [True, False])
async def test_a_budget_smaller_than_the_models_own_answer_says_what_is_in_the_way(
    parts: Parts, is_settled: bool
) -> None:
    """What is used, or what running calls hold; not that the model could say more than the budget in one answer."""
    limits = Limits(nanousd_per_day=budget_for(900))
    _, account = await parts.admission.admit(*call_of(parts, chat(), team=limits))
    if is_settled:
        parts.quotas.settle(account.hold, Settlement(Usage(1), budget_for(700)))

    error = await _refused(parts, chat(), limits)

    assert isinstance(error, QuotaExhausted if is_settled else RateLimited)
    assert error.headers.get("retry-after") == (None if is_settled else "1")
    assert error.headers.get("x-should-retry") == ("false" if is_settled else None)


async def test_thinking_needs_a_larger_answer(parts: Parts) -> None:
    """A model that is told to think may spend a small limit on that alone."""
    large = model("large", max_output=16_384)
    limits = Limits(nanousd_per_day=budget_for(2_000))

    for asked, spec in ((chat(reasoning_effort="high"), large), (chat(), replace(large, upstream_model="openai/o3"))):
        with pytest.raises(ExceedsLimit):
            await parts.admission.admit(*call_of(parts, asked, team=limits, models=(spec,)))


@pytest.mark.parametrize("spent", [0, budget_for(50)])
async def test_a_refused_limit_is_told_the_one_that_fits(parts: Parts, spent: int) -> None:
    """With that number the same request is admitted, with one more it is refused."""
    limits = Limits(nanousd_per_day=budget_for(300) + spent)
    await _spend(parts, limits, spent)

    error = await _refused(parts, chat(max_tokens=320), limits)
    told = int(re.findall(r"max_tokens of ([\d,]+) or less", error.message)[0].replace(",", ""))
    assert isinstance(await _refused(parts, chat(max_tokens=told + 1), limits), type(error))
    _, account = await parts.admission.admit(*call_of(parts, chat(max_tokens=told), team=limits))

    assert isinstance(error, QuotaExhausted if spent else ExceedsLimit)
    assert (error.param, error.headers["x-should-retry"]) == ("max_tokens", "false")
    assert told == 300 and account.hold.request.cost_nanousd == budget_for(300)


async def test_a_prompt_that_is_too_large_alone_is_to_be_shortened(parts: Parts) -> None:
    """No max_tokens helps, and there is none where nothing is generated."""
    limits = Limits(tokens_per_day=PROMPT - 1)

    chatting = await _refused(parts, chat(max_tokens=5), limits)
    embedding = await _refused(parts, EmbeddingRequest(model="small", input="word " * PROMPT), limits)

    assert "does not cover the prompt" in chatting.message and chatting.param is None
    assert (embedding.param, "max_tokens" in embedding.message) == ("input", False)


async def test_a_completion_that_names_no_limit_has_a_default(parts: Parts) -> None:
    """16 tokens, as its dialect documents: it is not made longer by a budget."""
    request = CompletionRequest(model="small", prompt="Hi")

    fitted, _ = await parts.admission.admit(*call_of(parts, request, team=Limits(tokens_per_day=600)))

    assert fitted.fitted_output == 16


async def test_a_call_without_a_waiting_client_waits_rather_than_be_cut(parts: Parts) -> None:
    """An item of a batch takes less than the whole only where waiting would not bring it."""
    limits = Limits(nanousd_per_day=budget_for(1_024) + budget_for(700))
    await parts.admission.admit(*call_of(parts, chat(), team=limits))

    with pytest.raises(RateLimited) as caught:
        await parts.admission.admit(*call_of(parts, chat(), team=limits, is_batch_item=True))
    fitted, _ = await parts.admission.admit(*call_of(parts, chat(), team=limits))

    assert caught.value.headers["retry-after"] == "1"
    assert fitted.fitted_output == 700


async def test_calls_that_are_made_to_fit_never_pass_a_cap_together(parts: Parts) -> None:
    """However many at once: each limit is held, as any other, in one step with the check."""
    cap = 3 * budget_for(1_024) + budget_for(600)
    calls = [call_of(parts, chat(), team=Limits(nanousd_per_day=cap)) for _ in range(30)]

    ended = await asyncio.gather(*(parts.admission.admit(*one) for one in calls), return_exceptions=True)
    rooms = [rooms["team:a"] for rooms in parts.quotas.leases.rooms.by_day.values() if "team:a" in rooms]
    limits = sorted(one[0].fitted_output or 0 for one in ended if isinstance(one, tuple))

    assert [of_money.held for _, of_money in rooms] == [cap]
    assert limits == [0, 0, 0, 600]
    assert {type(one) for one in ended if not isinstance(one, tuple)} == {RateLimited}


@pytest.mark.parametrize("passes", [0, 1, 2])  # of the loop, until it is cancelled
@pytest.mark.parametrize("stage", ["for Postgres", "held", "for Redis", "counted"])
async def test_a_caller_that_leaves_while_it_waits_takes_nothing_along(
    parts: Parts, stage: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it waits for, and when the answer was there already: the only place is free again, by one release."""
    leases, rates = parts.quotas.leases, parts.quotas.rates
    release, released = rates.release, list[str]()

    def note(request: HoldRequest) -> None:
        released.append(request.request_id)
        release(request)

    monkeypatch.setattr(rates, "release", note)
    is_there: Callable[[], object] = {
        "for Postgres": lambda: leases.callers.waiting,
        "held": lambda: len(leases.holding.calls),
        "for Redis": lambda: rates._unheard,
        "counted": lambda: rates._counted,
    }[stage]
    limits = Limits(
        requests_per_minute=1, tokens_per_minute=PROMPT + 10, concurrent_requests=1, nanousd_per_day=budget_for(10)
    )

    leaving = asyncio.create_task(parts.admission.admit(*call_of(parts, team=limits)))
    while not is_there():
        assert not leaving.done()
        await asyncio.sleep(0)
    for _ in range(passes):
        await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    if not leaving.cancelled():
        account = leaving.result()[1]
        parts.quotas.release(account.hold)
        parts.open_calls.remove(account)

    assert (len(leases.holding.calls), len(rates._counted), len(parts.open_calls)) == (0, 0, 0)
    assert len(released) <= 1
    await rates.tell()
    cast(SetClock, parts.clock).move(0.3)  # what is free again is told
    await rates.tell()
    await parts.admission.admit(*call_of(parts, team=limits))


async def test_without_postgres_a_capped_call_is_told_to_come_again(parts: Parts, database: Database) -> None:
    """503 overloaded where its team has no lease here; who has room in a lease, or no cap, goes on."""
    limits = Limits(nanousd_per_day=budget_for(1_000_000))
    quotas = cast(LimitedQuotas, parts.quotas)
    _, known = await parts.admission.admit(*call_of(parts, team=limits))
    for kind, one, of in (("team", "b", limits), ("key", "l", NONE), ("team", "c", NONE)):
        await set_limits(database, "b", scope := Scope(kind, one, of))
        quotas.limits[scope.name] = of
    away = Database(make_url(database.url).set(host="127.0.0.1", port=1, query={}).render_as_string(False))
    store, quotas.leases.store = quotas.leases.store, PostgresLeases(away, parts.clock)

    with pytest.raises(LimitUnknown) as caught:
        await parts.admission.admit(*call_of(parts, team=limits, of=("b", "l")))
    _, inside = await parts.admission.admit(*call_of(parts, team=limits))
    _, uncapped = await parts.admission.admit(*call_of(parts, of=("c", "l")))

    error = caught.value
    assert (error.status, error.code, error.headers["retry-after"]) == (503, "overloaded", "1")
    assert "cannot be checked just now" in error.message and "x-should-retry" not in error.headers
    assert len(quotas.leases.holding.calls) == len(parts.open_calls) == len({known, inside, uncapped})
    quotas.leases.store, quotas.leases.is_away = store, False  # as the next beat finds
    await parts.admission.admit(*call_of(parts, team=limits, of=("b", "l")))
    await away.close()


async def _spend(parts: Parts, limits: Limits, cost: int) -> None:
    _, account = await parts.admission.admit(*call_of(parts, chat(max_tokens=1), team=limits))
    parts.quotas.settle(account.hold, Settlement(Usage(1), cost))


async def _refused(parts: Parts, request: Request, limits: Limits) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await parts.admission.admit(*call_of(parts, request, team=limits))
    return caught.value
