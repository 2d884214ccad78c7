# A team's limits as its clients meet them: what is left, what is refused, and whether to try again.

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from openai import OpenAI, RateLimitError

from gateway.team_inputs import LimitsInput
from tests.support.house import House, make_team
from tests.support.scripted_upstream import ScriptedUpstream

ASK: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}


@pytest.fixture(autouse=True)
def _quiet(upstream: ScriptedUpstream) -> Iterator[None]:
    upstream.forget()
    yield
    upstream.forget()


def client_of(house: House, team: str, **limits: Any) -> OpenAI:
    """Return a stock client of a new team with limits; it retries as it does for everybody."""
    key = asyncio.run(make_team(house.settings, team, LimitsInput(**limits)))
    return OpenAI(base_url=house.url + "/v1", api_key=key)


def test_answers_say_what_is_left_of_the_minute(house: House) -> None:
    """The x-ratelimit headers count down with every call."""
    client = client_of(house, "counted", requests_per_minute=10, tokens_per_minute=100_000)
    first = client.chat.completions.with_raw_response.create(**ASK).headers
    second = client.chat.completions.with_raw_response.create(**ASK).headers

    assert first["x-ratelimit-limit-requests"] == "10"
    assert int(first["x-ratelimit-remaining-requests"]) - int(second["x-ratelimit-remaining-requests"]) == 1
    assert int(first["x-ratelimit-remaining-tokens"]) < 100_000
    assert first["x-ratelimit-reset-requests"][-1] == "s"


def test_a_full_minute_is_a_429_with_the_buckets_own_wait(house: House) -> None:
    """Past requests_per_minute: rate_limit_exceeded, retry-after within the minute, and headers that say why."""
    client = client_of(house, "hasty", requests_per_minute=2).with_options(max_retries=0)
    for _ in range(2):
        client.chat.completions.create(**ASK)
    with pytest.raises(RateLimitError) as caught:
        client.chat.completions.create(**ASK)
    headers = caught.value.response.headers

    assert caught.value.code == "rate_limit_exceeded"
    assert 1 <= int(headers["retry-after"]) <= 60
    assert headers["x-ratelimit-remaining-requests"] == "0"


def test_a_spent_budget_is_insufficient_quota_and_no_sdk_retries(house: House, upstream: ScriptedUpstream) -> None:
    """What is settled leaves no room: 429 insufficient_quota, and x-should-retry stops the SDK's own retries."""
    client = client_of(house, "spent", usd_per_day=Decimal("0.001"))
    upstream.script("tokens=100")
    with pytest.raises(RateLimitError) as caught:
        for _ in range(20):
            client.chat.completions.create(**ASK)
    asked = len(upstream.requests)

    assert caught.value.code == "insufficient_quota"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"
    assert 2 <= asked < 20


def test_a_request_that_alone_exceeds_a_limit_is_told_to_ask_for_less(house: House) -> None:
    """No waiting helps: the refusal names max_tokens and forbids the retry."""
    client = client_of(house, "greedy", tokens_per_minute=500)
    with pytest.raises(RateLimitError) as caught:
        client.chat.completions.create(**{**ASK, "max_tokens": 1000})

    assert caught.value.param == "max_tokens"
    assert "max_tokens" in caught.value.message
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_a_call_that_ends_gives_its_place_to_the_next(house: House, upstream: ScriptedUpstream) -> None:
    """concurrent_requests counts running calls only: ten in a row pass where one at a time may run."""
    client = client_of(house, "single", concurrent_requests=1).with_options(max_retries=0)
    for _ in range(10):
        client.chat.completions.create(**ASK)

    assert len(upstream.requests) >= 10


def test_a_team_may_use_only_its_models(house: House) -> None:
    """A model that exists but is not the team's is a 403, and is not in its list."""
    with house.client(house.admin_key) as admin:
        admin.post("/admin/teams", json={"id": "narrow", "allowed_models": ["small"]}).raise_for_status()
        key = admin.post("/admin/keys", json={"team_id": "narrow"}).raise_for_status().json()["key"]
    with house.client(key) as client:
        refused = client.post("/v1/chat/completions", json={**ASK, "model": "large"})
        names = [model["id"] for model in client.get("/v1/models").json()["data"]]

    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
    assert "small" in names and "large" not in names
