# Documents ranked by a query, over HTTP: answered by services of Jina's, vLLM's and Cohere's kind, each charged by what
# it counts, tokens or search units.

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import httpx
import pytest

from tests.support.house import House
from tests.support.leaving import ask_and_leave
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.waiting import until

ASK: dict[str, Any] = {
    "model": "small",
    "query": "the toll of a gate",
    "documents": ["rain and wind", {"text": "the toll of a gate is two coins"}, "a gate"],
}


@pytest.fixture(autouse=True)
def _strict(upstream: ScriptedUpstream) -> Iterator[None]:
    upstream.forget()
    upstream.violations.clear()
    yield
    violations = upstream.violations
    upstream.forget()
    assert violations == []


@pytest.fixture
def client(house: House) -> Iterator[httpx.Client]:
    """The team's client."""
    with house.client() as client:
        yield client


def test_documents_are_ranked_and_their_tokens_charged(
    house: House, client: httpx.Client, upstream: ScriptedUpstream
) -> None:
    """The upstream gets texts alone; documents come back as the request has them, and its count is what is paid."""
    answer = client.post("/v1/rerank", json={**ASK, "top_n": 2, "return_documents": True}).raise_for_status()
    told, row, (sent,) = answer.json(), house.record_of(answer), upstream.requests

    assert [each["index"] for each in told["results"]] == [1, 2] and told["model_used"] == "small"
    assert told["results"][0] == {"index": 1, "relevance_score": 1.0, "document": {"text": ASK["documents"][1]["text"]}}
    assert sent.body == {**ASK, "documents": [ASK["documents"][0], ASK["documents"][1]["text"], "a gate"], "top_n": 2}
    tokens = 3 * 5 + 4 + 8 + 2  # the query with each document, by the scripted count
    assert told["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens, "cost_usd": f"{tokens / 10**6:.6f}"}
    assert (row["endpoint"], row["input_tokens"], row["output_tokens"], row["units"]) == ("rerank", tokens, 0, None)
    assert row["held_tokens"] >= tokens and row["held_nanousd"] >= tokens * 1_000


def test_search_units_are_held_charged_and_shown(
    house: House, client: httpx.Client, upstream: ScriptedUpstream
) -> None:
    """What Cohere counts is what it bills: a unit for a hundred documents, a long one cut into pieces."""
    long = [f"the toll of road {number} " * 150 for number in range(60)]
    answer = client.post("/v1/rerank", json={**ASK, "model": "ranker", "documents": long}).raise_for_status()
    told, row = answer.json(), house.record_of(answer)
    price = client.get("/v1/models/ranker").json()["price"]

    assert told["meta"] == {"billed_units": {"search_units": 2}} and row["units"] == {"search_units": 2}
    assert price["search_unit"] == 0.002 and Decimal(told["usage"]["cost_usd"]) == Decimal("0.004")
    assert Decimal(str(row["cost_usd"])) == Decimal("0.004") and row["held_nanousd"] >= 4_000_000
    assert row["input_tokens"] > 0 and "document" not in told["results"][0]


def test_an_upstream_that_counts_nothing_is_paid_by_estimate(
    house: House, client: httpx.Client, upstream: ScriptedUpstream
) -> None:
    """Never more than was held."""
    for told in ("none", "wrong"):
        upstream.script(f"x:usage={told}".partition(":")[2])
        row = house.record_of(client.post("/v1/rerank", json=ASK).raise_for_status())

        assert 15 <= row["input_tokens"] <= row["held_tokens"]


def test_who_leaves_owes_the_units_of_a_whole_ranking(
    house: House, client: httpx.Client, upstream: ScriptedUpstream
) -> None:
    """The upstream has it all, and bills it."""
    upstream.script("hang-before-headers")
    asked = {**ASK, "model": "ranker", "user": "leaves"}
    ask_and_leave(house, "/v1/rerank", asked, lambda: upstream.requests)

    def calls() -> list[dict[str, Any]]:
        return list(client.get("/v1/calls?user=leaves").raise_for_status().json()["data"])

    until(calls)
    row = client.get(f"/v1/calls/{calls()[0]['request_id']}").raise_for_status().json()

    unit = {"kind": "search_unit", "count": 1, "usd": 0.002, "cost_usd": 0.002}
    assert (row["status"], row["cost_usd"]) == ("interrupted", 0.002) and unit in row["price"]["lines"]


def test_the_cache_answers_again_and_says_what_it_saved(house: House, client: httpx.Client) -> None:
    """A ranking is the likeliest answer by nature; its search unit is not paid twice."""
    asked = {**ASK, "model": "ranker", "query": "a query of the cache"}
    first, second = (client.post("/v1/rerank", json=asked, headers={"x-cache": "on"}) for _ in range(2))
    until(lambda: client.post("/v1/rerank", json=asked, headers={"x-cache": "on"}).headers["x-cache"] == "hit")
    row = house.record_of(client.post("/v1/rerank", json=asked, headers={"x-cache": "on"}))

    assert first.json()["results"] == second.json()["results"]
    assert (row["cost_usd"], row["saved_usd"]) == (0, 0.002)


@pytest.mark.parametrize(
    ("wrong", "param", "words"),
    [
        ({"documents": []}, "documents", "at least one text"),
        ({"documents": ["a"] * 10_001}, "documents", "at most 10000"),
        ({"documents": [{"image": "https://a.example/a.png"}]}, "documents[0].text", "text"),
        ({"query": ""}, "query", "must not be empty"),
        ({"top_n": 0}, "top_n", "from 1 to 10000"),
        ({"model": "claude"}, "model", "chat completions alone"),
        ({"stream": True}, None, None),
    ],
)
def test_bad_input_is_told_what_would_be_right(
    client: httpx.Client, wrong: dict[str, Any], param: str | None, words: str | None
) -> None:
    """As anywhere: a 400 that names the field; a field that is unknown is left out and told."""
    answer = client.post("/v1/rerank", json={**ASK, **wrong})
    if param is None:
        assert answer.headers["x-tollgate-dropped"] == "stream"
        return
    error = answer.json()["error"]

    assert (answer.status_code, error["param"]) == (400, param) and words in error["message"]


def test_a_ranking_that_is_none_fails_over(client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """Places that are not those of the request's documents are a fault of the upstream; the next model answers."""
    upstream.script("not-json", model="large")
    answer = client.post("/v1/rerank", json={**ASK, "model": "large", "models": ["small"]}).raise_for_status()

    assert answer.json()["model_used"] == "small"
