# Hedged requests: a second target beside a first that is slow to begin. Who begins first answers; what both upstreams
# served is in the books, and nothing else.

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from gateway.core.settings import HedgeSettings, ProviderSettings
from gateway.upstreams.resilience.breakers import Breakers, Permit
from router.catalog.targets import Endpoint, Target
from tests.support.audits import lasting_differences
from tests.support.house import NEVER_OPENS, ONCE, House, model, running_house, settings_for
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import database_of_its_own

ASKED = {"model": "small", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 20}
AFTER = 0.15  # seconds
SLOW = "first_token=5"


@pytest.fixture(scope="module")
def upstreams() -> Iterator[tuple[ScriptedUpstream, ScriptedUpstream]]:
    """Of the first target, and of the second."""
    with ScriptedUpstream(models=("small",)) as first, ScriptedUpstream(models=("wide",)) as second:
        yield first, second


@pytest.fixture(scope="module")
def hedging(
    upstreams: tuple[ScriptedUpstream, ScriptedUpstream],
    postgres_url: str,
    redis_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[House]:
    """A gateway whose model "small" is hedged with "wide", at another provider and a dearer price."""
    with database_of_its_own(postgres_url) as database_url:
        settings = settings_for(database_url, redis_url, upstreams[0].url, tmp_path_factory.mktemp("hedging"))
        kept = {"retries": ONCE, "breaker": NEVER_OPENS}
        providers = {
            name: ProviderSettings(
                name=name, format="openai", api_keys=("sk-upstream",), endpoints=(Endpoint("local", at.url),), **kept
            )
            for name, at in zip(("upstream", "other"), upstreams, strict=True)
        }
        models = {"small": model("small"), "wide": model("wide", "other", context=100_000)}
        more = {"fallbacks": {"small": ("wide",)}, "auto": {}, "aliases": {}}
        hedges = {"small": HedgeSettings(AFTER)}
        settings = replace(settings, providers=providers, models=models, hedges=hedges, **more)
        with running_house(settings) as house:
            yield house


@pytest.fixture(autouse=True)
def _books(hedging: House, upstreams: tuple[ScriptedUpstream, ScriptedUpstream]) -> Iterator[None]:
    for upstream in upstreams:
        upstream.forget()
    yield
    assert lasting_differences(hedging.settings.database_url) == []


def ask(house: House, **more: Any) -> tuple[httpx.Response, dict[str, Any]]:
    with house.client() as client:
        answer = client.post("/v1/chat/completions", json=ASKED | {"stream": True} | more)
    return answer, house.record_of(answer)


def counted(house: House) -> tuple[Any, ...]:
    """Return today's requests by daily sums, by calls and by minutes, and what they cost."""
    with house.client() as client:
        of_day, by_call = client.get("/v1/usage").json(), client.get("/v1/usage?group_by=user").json()
        charted = client.get("/v1/series?metric=requests").json()
    requests = of_day["requests"], by_call["total"]["requests"], charted["total"]["requests"]["total"]
    return (*requests, Decimal(of_day["cost_usd_exact"]))


def beside(house: House, answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the rows of second attempts of a call, once there is one."""
    ident, until = answer.headers["x-request-id"], time.monotonic() + 10
    while time.monotonic() < until:
        with house.client() as client:
            rows = client.get("/v1/calls", params={"limit": "50"}).json()["data"]
        if found := [dict(row) for row in rows if row.get("client_request_id") == ident]:
            return found
        time.sleep(0.05)
    return []


def attempts(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["target"].split("/")[0], one["outcome"]) for one in row["attempts"]]


def test_the_next_target_answers_where_the_first_is_slow(
    hedging: House, upstreams: tuple[ScriptedUpstream, ScriptedUpstream]
) -> None:
    """Its row tells both attempts; the first, cancelled, has its prompt in a row of its own: it costs, and is no
    request of a statement or a chart."""
    upstreams[0].script(SLOW)
    before = counted(hedging)
    answer, row = ask(hedging)
    (lost,) = beside(hedging, answer)
    after = counted(hedging)

    assert answer.status_code == 200 and "[DONE]" in answer.text
    assert (row["model_used"], row["status"]) == ("wide", "answered")
    assert attempts(row) == [("upstream", "hedge_lost"), ("other", "ok")]
    assert (lost["model_used"], lost["status"], lost["output_tokens"]) == ("small", "interrupted", 0)
    assert lost["input_tokens"] > 0 and lost["route_reason"] == "hedge" and float(lost["cost_usd"]) > 0
    assert [new - old for new, old in zip(after[:-1], before[:-1], strict=True)] == [1, 1, 1]
    assert after[-1] - before[-1] == Decimal(row["cost_usd_exact"]) + Decimal(lost["cost_usd_exact"])


def test_a_second_that_answers_while_the_first_waits_for_leave_is_booked(
    hedging: House, upstreams: tuple[ScriptedUpstream, ScriptedUpstream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its target's breaker is half open, and whether it may be probed is asked of a Redis that is slow: the call is in
    the journal all the same before the second upstream hears of it."""
    enter = Breakers.enter

    async def slow(breakers: Breakers, target: Target, tokens: int | None = None) -> Permit:
        if target.model.name == "small":
            await asyncio.sleep(2)
        return await enter(breakers, target, tokens)

    monkeypatch.setattr(Breakers, "enter", slow)
    before = counted(hedging)
    answer, row = ask(hedging)
    after = counted(hedging)

    assert answer.status_code == 200 and upstreams[0].requests == []
    assert (row["model_used"], row["status"], attempts(row)) == ("wide", "answered", [("other", "ok")])
    assert after[-1] - before[-1] == Decimal(row["cost_usd_exact"]) > 0


def test_a_first_token_in_time_asks_nobody_else(
    hedging: House, upstreams: tuple[ScriptedUpstream, ScriptedUpstream]
) -> None:
    """Nothing is held twice for it."""
    answer, row = ask(hedging)

    assert attempts(row) == [("upstream", "ok")] and upstreams[1].requests == []
    assert answer.status_code == 200


def test_the_first_answers_where_both_are_slow(
    hedging: House, upstreams: tuple[ScriptedUpstream, ScriptedUpstream]
) -> None:
    """The second is cancelled, and its prompt owed."""
    upstreams[0].script("first_token=0.6")
    upstreams[1].script(SLOW)
    answer, row = ask(hedging)
    (lost,) = beside(hedging, answer)

    assert (row["model_used"], attempts(row)) == ("small", [("other", "hedge_lost"), ("upstream", "ok")])
    assert (lost["model_used"], lost["status"]) == ("wide", "interrupted") and float(lost["cost_usd"]) > 0


@pytest.mark.parametrize("ill", ["500", "400"])
def test_a_second_that_fails_costs_nothing(
    hedging: House, upstreams: tuple[ScriptedUpstream, ScriptedUpstream], ill: str
) -> None:
    """The first is waited for as if there were none."""
    upstreams[0].script("first_token=0.6")
    upstreams[1].script(ill)
    answer, row = ask(hedging)
    (failed,) = beside(hedging, answer)

    assert (row["model_used"], row["status"]) == ("small", "answered")
    assert (failed["status"], float(failed["cost_usd"])) == ("failed", 0)


def test_where_both_fail_the_first_says_why(
    hedging: House, upstreams: tuple[ScriptedUpstream, ScriptedUpstream]
) -> None:
    """Neither is owed, and the second is asked once."""
    upstreams[0].script("500,latency=0.4")
    upstreams[1].script("500")
    answer, row = ask(hedging)
    (failed,) = beside(hedging, answer)

    assert answer.status_code == 502 and (row["status"], failed["status"]) == ("failed", "failed")
    assert len(upstreams[1].requests) == 1 and float(row["cost_usd"]) == float(failed["cost_usd"]) == 0


def test_a_client_that_leaves_in_between_owes_both_prompts(
    hedging: House, upstreams: tuple[ScriptedUpstream, ScriptedUpstream]
) -> None:
    """Both upstreams have them, and both are let go."""
    for upstream in upstreams:
        upstream.script(SLOW)
    with hedging.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/chat/completions", json=ASKED | {"stream": True, "user": "leaver"}, timeout=0.8)
    until, rows = time.monotonic() + 10, list[dict[str, Any]]()
    while len(rows) < 2 and time.monotonic() < until:
        with hedging.client() as client:
            found = client.get("/v1/calls", params={"limit": "50"}).json()["data"]
        rows = [dict(row) for row in found if row.get("user") == "leaver" or row.get("user_tag") == "leaver"]
        time.sleep(0.05)

    assert sorted((row["model_used"], row["status"]) for row in rows) == [
        ("small", "interrupted"),
        ("wide", "interrupted"),
    ]
    assert all(float(row["cost_usd"]) > 0 for row in rows)


def test_a_limit_without_room_for_both_leaves_the_first_alone(
    hedging: House, upstreams: tuple[ScriptedUpstream, ScriptedUpstream]
) -> None:
    """Both attempts are held, or one."""
    upstreams[0].script("first_token=0.6")
    with hedging.client(hedging.admin_key) as admin:
        limits = {"tokens_per_day": 300}
        made = admin.post("/admin/keys", json={"team_id": hedging.team_id, "limits": limits}).raise_for_status().json()
    with hedging.client(made["key"]) as client:
        answer = client.post("/v1/chat/completions", json=ASKED | {"stream": True})
    row = hedging.record_of(answer)

    assert 150 < row["held_tokens"] <= 300 and attempts(row) == [("upstream", "ok")]
    assert upstreams[1].requests == []


@pytest.mark.soak
@pytest.mark.parametrize("wait", [0.28, 0.29, 0.3, 0.31, 0.32] * 4)
def test_two_that_begin_at_once_are_one_answer(
    hedging: House, upstreams: tuple[ScriptedUpstream, ScriptedUpstream], wait: float
) -> None:
    """Whichever is first by a hair: one answers, the other's prompt is owed."""
    upstreams[0].script(f"first_token={wait}")
    upstreams[1].script("first_token=0.15")
    answer, row = ask(hedging)
    (lost,) = beside(hedging, answer)

    assert {row["model_used"], lost["model_used"]} == {"small", "wide"}
    assert (row["status"], lost["status"]) == ("answered", "interrupted") and lost["input_tokens"] > 0


def test_a_plain_answer_is_not_hedged(hedging: House, upstreams: tuple[ScriptedUpstream, ScriptedUpstream]) -> None:
    """It has no first token to wait for."""
    upstreams[0].script("first_token=0.4")
    _, row = ask(hedging, stream=False)

    assert attempts(row) == [("upstream", "ok")] and upstreams[1].requests == []
