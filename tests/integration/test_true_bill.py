# What a call is charged by the edition of a price that its row names, and what its upstream would bill for it: the same
# to the nano-dollar, over dialects, formats, streams, caches, tools and service tiers; and of a cancelled stream, no
# more than was sent.

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from billing.core.money import to_nano
from billing.core.prices import Price, times
from billing.ledger.price_editions import edition_of
from tests.support.house import (
    House,
    anthropic_provider,
    bedrock_provider,
    gemini_provider,
    model,
    running_house,
    settings_for,
)
from tests.support.scripted_upstream import ScriptedUpstream, Seen
from tests.support.servers import database_of_its_own
from tests.support.temporary_stores import temporary_valkey

RATES = {"input": "1.25", "output": "10", "cached_input": "0.125", "cache_write": "1.5625"}
PRICE = Price(**{name: to_nano(rate) for name, rate in RATES.items()})
FACTORS = {"flex": 0.5, "priority": 1.75}
TIERS = tuple((tier, times(PRICE, factor)) for tier, factor in FACTORS.items())
CONVERSED = "us.anthropic.claude-v1"
CHATS = {"gpt": "/v1/chat/completions", "claude": "/v1/messages", "gemini": "/v1/responses"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def upstream() -> Iterator[ScriptedUpstream]:
    """The providers."""
    with ScriptedUpstream(models=("gpt", "gpt-5", "claude", "gemini-3-flash", CONVERSED)) as upstream:
        yield upstream
        assert upstream.violations == []


@pytest.fixture(scope="module")
def house(upstream: ScriptedUpstream, postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A gateway with a model of each format at one price, with tiers at OpenAI."""
    with database_of_its_own(postgres_url) as url, temporary_valkey() as valkey:
        settings = settings_for(url, valkey.url, upstream.url, tmp_path_factory.mktemp("house"))
        root = upstream.root_url
        others = (anthropic_provider(root), gemini_provider(root), bedrock_provider(root))
        models = {
            "gpt": model("gpt", price=PRICE, service_tiers=TIERS),
            "claude": model("claude", "anthropic", price=PRICE),
            "gemini": model("gemini", "gemini", upstream_model="gemini-3-flash", price=PRICE),
            "bedrock": model("bedrock", "bedrock", upstream_model=CONVERSED, price=PRICE),
            "native": model("native", "native", upstream_model="gpt-5", price=PRICE, service_tiers=TIERS),
        }
        providers = {"native": replace(settings.providers["upstream"], name="native", responses=True)}
        providers |= settings.providers | {one.name: one for one in others}
        with running_house(replace(settings, providers=providers, models=models)) as house:
            yield house


def asked(path: str, name: str, *, stream: bool, tool: bool, tier: str | None) -> dict[str, Any]:
    """Return a body of one of the dialects."""
    body: dict[str, Any] = {"model": name, "stream": stream}
    if path == "/v1/responses":
        body |= {"input": "How are you?", "max_output_tokens": 40, "store": False}
        body |= {"tools": [{"type": "function", **TOOL["function"]}]} if tool else {}  # type: ignore[dict-item]
    elif path == "/v1/messages":
        body |= {"messages": [{"role": "user", "content": "How are you?"}], "max_tokens": 40}
        body |= {"tools": [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]} if tool else {}
    else:
        body |= {"messages": [{"role": "user", "content": "How are you?"}], "max_tokens": 40}
        body |= {"tools": [TOOL]} if tool else {}
    return body | ({"service_tier": tier} if tier else {})


def bill_of(seen: Seen) -> Fraction:
    """Return what an upstream bills for an answer by its own words, in nano-dollars: as its price list has it."""
    assert seen.billed is not None
    whole, details = seen.billed, dict[str, int]()
    if (told := whole.get("usageMetadata")) is not None:
        prompt, cached, written = told["promptTokenCount"], told.get("cachedContentTokenCount", 0), 0
        output = told["candidatesTokenCount"] + told.get("thoughtsTokenCount", 0)
    elif "inputTokens" in whole["usage"]:
        told = whole["usage"]
        cached, written = told["cacheReadInputTokens"], told["cacheWriteInputTokens"]
        prompt, output = told["inputTokens"] + cached + written, told["outputTokens"]
    elif "input_tokens_details" in (told := whole["usage"]):
        details = told["input_tokens_details"]
        cached, written = details["cached_tokens"], details.get("cache_write_tokens", 0)
        prompt, output = told["input_tokens"], told["output_tokens"]
    elif "input_tokens" in told:
        cached, written = told.get("cache_read_input_tokens") or 0, told.get("cache_creation_input_tokens") or 0
        prompt, output = told["input_tokens"] + cached + written, told["output_tokens"]
    else:
        details = told.get("prompt_tokens_details") or {}
        cached, written = details.get("cached_tokens", 0), details.get("cache_write_tokens", 0)
        prompt, output = told["prompt_tokens"], told["completion_tokens"]
    rates = {name: Fraction(rate) * 1000 for name, rate in RATES.items()}  # nano-dollars a token
    sums = (prompt - cached - written) * rates["input"] + cached * rates["cached_input"]
    sums += written * rates["cache_write"] + output * rates["output"]
    return sums * Fraction(str(FACTORS.get(whole.get("service_tier", ""), 1)))


def call(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    """Make a call to its end; return its answer."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


PAIRS = [*product(("gpt", "claude", "gemini", "bedrock"), CHATS.values()), ("native", "/v1/responses")]


@pytest.mark.parametrize(("name", "path"), PAIRS)
def test_a_call_is_charged_what_its_upstream_bills(
    house: House, upstream: ScriptedUpstream, name: str, path: str
) -> None:
    """Whole or streamed, with a cached prompt or a tool or neither, in every tier that the model has."""
    upstream_name = {"gemini": "gemini-3-flash", "bedrock": CONVERSED, "native": "gpt-5"}.get(name, name)
    tiers = (None, *FACTORS) if name in ("gpt", "native") and path != "/v1/messages" else (None,)
    made = []
    with house.client() as client:
        for stream, cached, tool, tier in product((False, True), (0, 3), (False, True), tiers):
            upstream.script(f"tokens=7,cached_tokens={cached}", model=upstream_name, times=1)
            answer = call(client, path, asked(path, name, stream=stream, tool=tool, tier=tier))
            made.append((answer, bill_of(upstream.requests[-1]), tier))

    assert name != "native" or upstream.requests[-1].path == path
    for answer, bill, tier in reversed(made):  # once the last is in the ledger, all are
        row = house.record_of(answer)
        assert row["status"] == "answered"
        assert 0 <= round(float(row["cost_usd"]) * 1e9) - bill < 1  # rounded up, once
        assert row["price"] == edition_of(dict(TIERS).get(tier or "", PRICE))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("served", ["default", "flex", "priority"])
def test_the_tier_that_was_served_prices_the_row(
    house: House, upstream: ScriptedUpstream, served: str, stream: bool
) -> None:
    """Whatever was asked: an upstream that has no room in a tier answers in another, and bills that."""
    upstream.script(f"tokens=7,served={served}", model="gpt", times=1)
    body = asked("/v1/chat/completions", "gpt", stream=stream, tool=False, tier="priority")
    with house.client() as client:
        row = house.record_of(call(client, "/v1/chat/completions", body))

    sent = upstream.requests[-1]
    assert sent.body is not None and sent.body["service_tier"] == "priority"
    assert 0 <= round(float(row["cost_usd"]) * 1e9) - bill_of(sent) < 1
    assert row["price"] == edition_of(dict(TIERS).get(served, PRICE))


def test_a_tier_without_a_price_is_refused(house: House, upstream: ScriptedUpstream) -> None:
    """By name, before an upstream hears of it: what it would cost is not known."""
    upstream.requests.clear()
    with house.client() as client:
        body = asked("/v1/chat/completions", "claude", stream=False, tool=False, tier="flex")
        answer = client.post("/v1/chat/completions", json=body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "service_tier")
    assert answer.json()["error"]["code"] == "unsupported_parameter" and upstream.requests == []


@pytest.mark.parametrize(("name", "tier"), [*product(["gpt"], [None, *FACTORS]), ("native", None)])
def test_of_a_cancelled_stream_no_more_is_charged_than_was_sent(
    house: House, upstream: ScriptedUpstream, name: str, tier: str | None
) -> None:
    """The prompt and the tokens until its client left, at the price of the tier that was asked for."""
    upstream.script("tokens=30,pace=0.03", model="gpt-5" if name == "native" else name, times=1)
    path = "/v1/responses" if name == "native" else "/v1/chat/completions"
    body = asked(path, name, stream=True, tool=False, tier=tier)
    with house.client() as client, client.stream("POST", path, json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        for line in lines:
            event = json.loads(line[6:])
            if event.get("delta") or event.get("choices", [{}])[0].get("delta", {}).get("content"):
                break
    row = house.record_of(httpx.Response(200, headers={"x-request-id": answer.headers["x-request-id"]}))
    factor = Fraction(str(FACTORS.get(tier or "", 1)))
    sums = row["input_tokens"] * Fraction("1250") + row["output_tokens"] * Fraction("10000")

    assert row["status"] == "interrupted"
    assert 1 <= row["output_tokens"] <= upstream.requests[-1].tokens_sent < 30
    assert 0 <= round(float(row["cost_usd"]) * 1e9) - sums * factor < 1
    assert row["price"] == edition_of(dict(TIERS).get(tier or "", PRICE))
