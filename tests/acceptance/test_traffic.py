# Who answers, where a model is at several providers or its caller says what to fall back on; and fields that clients of
# other gateways send.

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from billing.upkeep.turns import Turns
from gateway.core.clock import Clock
from gateway.core.settings import Settings
from gateway.storage.database import Database
from gateway.telemetry.metrics import Metrics
from gateway.upstreams.resilience.canaries import CanaryWatch, Seen, why_worse
from router.catalog.catalog import Canary
from tests.support.house import House, model, serving
from tests.support.scripted_upstream import ScriptedUpstream

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _quiet(upstream: ScriptedUpstream) -> Iterator[None]:
    upstream.forget()
    yield
    upstream.forget()


@pytest.fixture(scope="module")
def traffic(house: House, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A gateway with a model at two providers: one calls it small there, and takes three calls of four."""
    settings = house.settings
    second = replace(settings.providers["upstream"], name="second")
    places = (
        model("shared", upstream_model="small", portion=3.0),
        model("shared", "second", upstream_model="large", portion=1.0),
    )
    settings = replace(
        settings,
        data_dir=tmp_path_factory.mktemp("traffic"),
        providers=settings.providers | {"second": second},
        models=settings.models | {"shared": replace(places[0], others=places[1:])},
    )
    with serving(settings) as url:
        served = House(url, house.team_id, house.team_key, house.admin_key, settings)
        served.reset_breakers()  # which it shares with the gateways of other tests
        yield served


def ask(house: House, text: str = "Hi", **more: Any) -> httpx.Response:
    with house.client() as client:
        asked = {"model": "shared", "messages": [{"role": "user", "content": text}]} | more
        return client.post(CHAT, json=asked)


def test_providers_share_a_model_and_stand_in_for_each_other(traffic: House, upstream: ScriptedUpstream) -> None:
    """Both are asked; when one fails the other answers, and the row says who."""
    seen = set[str]()
    for number in range(80):
        if len(seen) < 2:
            seen.add(traffic.record_of(ask(traffic, f"call {number}"))["provider"])
    upstream.script("status=500", model="small")
    answers = [ask(traffic, f"again {n}") for n in range(4)]

    assert seen == {"upstream", "second"}
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-model-used"] for answer in answers} == {"shared"}
    assert {traffic.record_of(answer)["provider"] for answer in answers} == {"second"}


def test_a_conversation_stays_at_its_provider(traffic: House, upstream: ScriptedUpstream) -> None:
    """From its second turn on: there its prompt is cached."""
    for number in range(4):
        turns = [{"role": "user", "content": f"topic {number}"}, {"role": "assistant", "content": "Yes."}]
        asked = []
        for more in ("And?", "More?", "Why?"):
            turns += [{"role": "user", "content": more}]
            asked.append(traffic.record_of(ask(traffic, messages=turns))["provider"])
            turns += [{"role": "assistant", "content": "So."}]
        assert len({*asked}) == 1, asked


@pytest.mark.parametrize("field", [{"models": ["large"]}, {"fallbacks": [{"model": "large"}], "route": "fallback"}])
def test_a_callers_list_stands_in(traffic: House, upstream: ScriptedUpstream, field: dict[str, Any]) -> None:
    """The second answers when the first fails; held and charged as its own, told as understood."""
    upstream.script("status=503", model="small", times=1)
    answer = ask(traffic, model="small", drop_params=True, **field)
    row = traffic.record_of(answer)

    assert (answer.status_code, answer.headers["x-model-used"]) == (200, "large")
    assert "x-tollgate-dropped" not in answer.headers
    assert (row["model_used"], len(row["attempts"])) == ("large", 2)
    assert answer.headers["x-route-reason"] == row["route_reason"] == "fallback"
    assert 0 < row["cost_usd"] * 10**9 <= row["held_nanousd"]


def test_a_provider_may_be_preferred(traffic: House, upstream: ScriptedUpstream) -> None:
    """`provider` decides where the weights would; what it leaves unsaid is told, and nobody is a 400."""
    only = [ask(traffic, f"{n}", provider={"only": ["Second"], "sort": "price"}) for n in range(4)]
    nobody = ask(traffic, provider={"only": ["azure"]})
    count = {"model": "shared", "messages": [{"role": "user", "content": "Hi"}]}
    with traffic.client() as client:
        path = "/v1/messages/count_tokens"
        counted = [client.post(path, json=count | {"provider": {"only": [name]}}) for name in ("second", "azure")]

    assert [answer.status_code for answer in counted] == [200, 400], counted[0].text
    assert (upstream.requests[-1].path, (upstream.requests[-1].body or {})["model"]) == ("/tokenize", "large")
    assert {traffic.record_of(answer)["provider"] for answer in only} == {"second"}
    assert {answer.headers["x-tollgate-dropped"] for answer in only} == {"provider.sort"}
    assert (nobody.status_code, nobody.json()["error"]["param"]) == (400, "provider")
    assert "served by" in nobody.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "param", "words"),
    [
        ({"mock_response": "Hello"}, "mock_response", "Answers come from models"),
        ({"transforms": ["middle-out"]}, "transforms", "'models'"),
        ({"drop_params": False}, "drop_params", "x-tollgate-dropped"),
        ({"api_key": "sk-own"}, "api_key", "set by its admin"),
        ({"guardrails": ["pii"]}, "guardrails", "content policy"),
        ({"provider": {"zdr": True}}, "provider.zdr", "provider.only"),
        ({"provider": {"max_price": {"prompt": 1}}}, "provider.max_price", "x-max-cost-usd"),
        ({"provider": ["openai"]}, "provider", "an object"),
        ({"provider": {"order": "openai"}}, "provider.order", "a list of providers"),
        ({"models": "large"}, "models", "a list of models"),
        ({"models": ["gone"]}, "models", "'gone' does not exist"),
        ({"models": ["large"] * 9}, "models", "8 models"),
        ({"fallbacks": [{"small": ["large"]}]}, "fallbacks", "by their names"),
        ({"cache": {"ttl": 60}}, "cache", "'on', 'all' or 'off'"),
        ({"caching": ["on"]}, "caching", "must be true or false"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    traffic: House, upstream: ScriptedUpstream, field: dict[str, Any], param: str, words: str
) -> None:
    """Before an upstream hears of the call, with what to do instead; no secret of the caller's is repeated."""
    answer = ask(traffic, **field)
    error = answer.json()["error"]

    assert (answer.status_code, error["param"]) == (404 if "does not exist" in words else 400, param), answer.text
    assert words in error["message"] and "sk-own" not in answer.text
    assert upstream.requests == []


def test_unknown_fields_are_told_and_never_dropped_in_silence(traffic: House, upstream: ScriptedUpstream) -> None:
    """What asks for nothing is passed over; what is not known is named."""
    harmless = {"usage": {"include": True}, "transforms": [], "cache": {"no-cache": True}, "caching": False}
    answer = ask(traffic, provider={"only": ["second"]}, num_retries=3, top_a=0.5, **harmless)

    assert (answer.status_code, answer.headers["x-cache"]) == (200, "off"), answer.text
    assert set(answer.headers["x-tollgate-dropped"].split(", ")) == {"num_retries", "top_a"}


def test_a_canary_that_fails_is_withdrawn_everywhere(house: House, upstream: ScriptedUpstream, tmp_path: Path) -> None:
    """Its callers are answered by what the name means; once enough calls tell, no gateway asks it any more, also after
    a restart; another configuration begins anew."""
    canary = Canary(model="large", share=0.5, least=5)
    settings = replace(house.settings, data_dir=tmp_path, canaries={"small": canary})
    upstream.script("status=500", model="large")
    like_it = replace(canary, slower=3.0)  # whose turn no gateway takes but the test's
    assert asyncio.run(withdrawn(settings, like_it)) == [frozenset()]
    with serving(settings) as url:
        other = House(url, house.team_id, house.team_key, house.admin_key, settings)
        answers = [ask(other, f"{uuid.uuid4()}", model="small") for _ in range(30)]
        rows = [other.record_of(answer) for answer in answers]
    tried = [row for row in rows if row["route_reason"] == "canary"]

    assert {answer.status_code for answer in answers} == {200}
    assert {row["model_used"] for row in rows} == {"small"}
    assert 5 <= len(tried) <= 25 and {len(row["attempts"]) for row in tried} == {2}
    found = asyncio.run(withdrawn(settings, like_it, like_it, replace(canary, share=0.4), ahead=16.0))
    assert found == [{"small"}, {"small"}, frozenset()]


async def withdrawn(settings: Settings, *canaries: Canary, ahead: float = 0.0) -> list[frozenset[str]]:
    """Return which names' canary is withdrawn, as one gateway after the other finds, so many seconds from now."""
    database, clock, found = Database(settings.database_url), Clock(), []
    clock.follow(ahead)
    try:
        for canary in canaries:
            catalog = replace(settings, canaries={"small": canary}).catalog()
            watch = CanaryWatch(
                catalog, database, Turns(database, clock, uses_server_time=False), clock, Metrics().count_rollback
            )
            await watch.look()
            found.append(watch.withdrawn)
    finally:
        await database.close()
    return found


@pytest.mark.parametrize(
    ("base", "tried", "reason"),
    [
        (Seen(calls=50, failed=5), Seen(calls=50, failed=8), "errors"),
        (Seen(calls=50, failed=5), Seen(calls=50, failed=7), None),
        (Seen(calls=49), Seen(calls=500, failed=500), None),
        (Seen(calls=500), Seen(calls=49, failed=49), None),
        (Seen(calls=50, first_token_ms=100), Seen(calls=50, first_token_ms=201), "latency"),
        (Seen(calls=50, first_token_ms=100), Seen(calls=50, first_token_ms=200), None),
        (Seen(calls=50, late=1), Seen(calls=50, late=4), "latency"),
        (Seen(calls=50, late=2), Seen(calls=50, late=4), None),
        (Seen(calls=50), Seen(calls=50, first_token_ms=9e9, cost_nanousd=9e9), None),
        (Seen(calls=50, cost_nanousd=100), Seen(calls=50, cost_nanousd=201), "cost"),
        (Seen(calls=50, cost_nanousd=0), Seen(calls=50, cost_nanousd=201), None),
    ],
)
def test_a_canary_is_worse_where_it_clearly_is(base: Seen, tried: Seen, reason: str | None) -> None:
    """More failures than the base's and five of a hundred, twice its first token or cost; of fifty calls of each."""
    assert why_worse(Canary(model="m", share=0.1), base, tried) == reason
