# Models behind deployments of Azure OpenAI: how they are asked, with a key or as a client of Entra, and what becomes of
# what the content filter says. Answers themselves are compared in test_every_pair.py.

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.support.azure_rules import TOKENS
from tests.support.house import House
from tests.support.scripted_upstream import ScriptedUpstream

CHAT = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 9}


@pytest.fixture(autouse=True)
def _strict(house: House, upstream: ScriptedUpstream) -> Iterator[None]:
    upstream.forget()
    yield
    assert upstream.violations == []
    upstream.forget()
    house.reset_breakers()


def ask(house: House, model: str, **more: object) -> httpx.Response:
    with house.client() as client:
        return client.post("/v1/chat/completions", json={"model": model, **CHAT, **more})


def test_a_deployment_is_asked_with_the_key_of_its_resource(house: House, upstream: ScriptedUpstream) -> None:
    """The path names the deployment and the version, the key has a header of its own, and the usage is billed."""
    answer = ask(house, "gpt")

    [seen] = upstream.requests
    assert seen.path == "/openai/deployments/gpt/chat/completions?api-version=2024-10-21"
    assert (seen.headers["api-key"], "authorization" in seen.headers) == ("sk-upstream", False)
    assert seen.body is not None and seen.body["max_tokens"] == 9
    assert house.record_of(answer)["output_tokens"] == answer.json()["usage"]["completion_tokens"]


def test_a_providers_headers_go_along_and_what_it_refuses_stays(house: House, upstream: ScriptedUpstream) -> None:
    """As tollgate.yaml has it; the caller hears what was left out, an embedding's fields are none of it."""
    answer = ask(house, "gpt", seed=7, store=True, user="u")
    with house.client() as client:
        vectors = client.post("/v1/embeddings", json={"model": "gpt", "input": "Hi."})

    seen = upstream.requests[0]
    assert seen.headers["x-ms-useragent"] == "tollgate"
    assert seen.body is not None and not seen.body.keys() & {"seed", "store"} and seen.body["user"] == "u"
    assert answer.headers["x-tollgate-dropped"] == "seed"
    assert vectors.status_code == 200 and "x-tollgate-dropped" not in vectors.headers


def test_embeddings_and_completions_go_to_deployments(house: House, upstream: ScriptedUpstream) -> None:
    """The other endpoints are below the deployment, too."""
    with house.client() as client:
        client.post("/v1/embeddings", json={"model": "gpt", "input": "Hi."}).raise_for_status()
        client.post("/v1/completions", json={"model": "gpt", "prompt": "Hi."}).raise_for_status()

    paths = [seen.path.removeprefix("/openai/deployments/gpt").partition("?")[0] for seen in upstream.requests]
    assert paths == ["/embeddings", "/completions"]


def test_one_token_of_entra_serves_many_calls_until_it_is_refused(house: House, upstream: ScriptedUpstream) -> None:
    """A token is asked for as a client, used until its end is near, and dropped when the deployment refuses it."""
    for _ in range(3):
        ask(house, "gpt-entra").raise_for_status()
    first = {seen.api_key for seen in upstream.requests if seen.path != TOKENS}
    upstream.forget()
    upstream.script("401", times=1)
    refused = ask(house, "gpt-entra")
    answered = ask(house, "gpt-entra")

    assert len(first) == 1 and first.pop().startswith("sk-entra-")
    assert (refused.status_code, answered.status_code) == (502, 200)
    assert [seen.path == TOKENS for seen in upstream.requests] == [False, True, False]
    assert upstream.requests[0].api_key != upstream.requests[2].api_key
    assert "sk-" not in refused.text and "sesame" not in refused.text


@pytest.mark.parametrize("streams", [False, True])
def test_a_filtered_prompt_is_the_callers_and_costs_no_key(
    house: House, upstream: ScriptedUpstream, *, streams: bool
) -> None:
    """Azure's 400 names the category; the next call goes through at once."""
    upstream.script("400,code=content_filter,message=The response was filtered.", times=1)
    refused = ask(house, "gpt", stream=streams)

    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "content_policy_violation", "prompt")
    assert "(violence)" in error["message"]
    assert ask(house, "gpt").status_code == 200


def test_what_the_filter_says_of_an_answer_stays_with_azure(house: House, upstream: ScriptedUpstream) -> None:
    """Chunks without a choice or a delta are no words of the model: a client sees chunks as OpenAI sends them."""
    upstream.script("tokens=3")
    answer = ask(house, "gpt", stream=True)

    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert all(chunk["id"] and chunk["choices"] for chunk in chunks)
    assert "filter" not in answer.text
