# What a product team does with the stock openai package.

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from openai import AzureOpenAI, BadRequestError, InternalServerError, NotFoundError, OpenAI

from tests.support.house import House
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.waiting import until

ASK: Any = [{"role": "user", "content": "Say something."}]


@pytest.fixture(autouse=True)
def _strict(upstream: ScriptedUpstream) -> Any:
    upstream.violations.clear()
    yield
    assert upstream.violations == []


def test_a_chat_completion_has_text_usage_and_cost(openai: OpenAI) -> None:
    """An answer carries the upstream's tokens and what they cost at our price, to the nano-dollar."""
    reply = openai.chat.completions.create(model="small", messages=ASK)
    usage = reply.usage

    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "stop"
    assert usage is not None and usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens or 0
    dollars = Decimal(usage.prompt_tokens - cached + 2 * usage.completion_tokens) + cached * Decimal("0.5")
    assert Decimal(usage.cost_usd) == dollars / 1_000_000  # type: ignore[attr-defined]


def test_a_stream_says_what_the_plain_answer_says(openai: OpenAI) -> None:
    """Streaming changes how an answer travels, not what it is."""
    plain = openai.chat.completions.create(model="small", messages=ASK, seed=1)
    chunks = list(
        openai.chat.completions.create(
            model="small", messages=ASK, seed=1, stream=True, stream_options={"include_usage": True}
        )
    )

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and plain.usage is not None
    assert chunks[-1].usage.total_tokens == plain.usage.total_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_usage_comes_only_when_asked_for(openai: OpenAI) -> None:
    """Without include_usage no chunk has empty choices, although the gateway asks the upstream for usage."""
    chunks = list(openai.chat.completions.create(model="small", messages=ASK, stream=True))

    assert all(chunk.choices for chunk in chunks)


def test_completions_and_their_stream(openai: OpenAI) -> None:
    """The older endpoint works the same way."""
    plain = openai.completions.create(model="small", prompt="Once", seed=1)
    stream = openai.completions.create(model="small", prompt="Once", seed=1, stream=True)

    assert "".join(chunk.choices[0].text for chunk in stream) == plain.choices[0].text
    assert plain.usage is not None and plain.usage.completion_tokens > 0


def test_an_echoed_prompt_alone_costs_no_output(openai: OpenAI) -> None:
    """OpenAI's completions take max_tokens 0, which benchmarks of models send to have a prompt scored."""
    plain = openai.completions.create(model="small", prompt="Once", echo=True, max_tokens=0)
    stream = openai.completions.create(model="small", prompt="Once", echo=True, max_tokens=0, stream=True)

    assert (plain.choices[0].text, plain.choices[0].finish_reason) == ("Once", "length")
    assert plain.usage is not None and plain.usage.completion_tokens == 0
    assert "".join(chunk.choices[0].text for chunk in stream) == "Once"


def test_embeddings_travel_as_base64_or_floats(openai: OpenAI) -> None:
    """The package asks for base64; floats asked for by name are the same numbers."""
    packed = openai.embeddings.create(model="small", input=["one", "two"])
    floats = openai.embeddings.create(model="small", input=["one", "two"], encoding_format="float")

    assert [item.index for item in packed.data] == [0, 1]
    for one, other in zip(packed.data, floats.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, rel=1e-6)


def test_models_are_listed_and_shown(openai: OpenAI) -> None:
    """The list has models, automatic routes and aliases; each can be shown."""
    names = [model.id for model in openai.models.list()]

    named = ["small", "large", "claude", "gpt", "gpt-entra", "native-before", "native-unpriced", "conversed", "gemini"]
    others = ["painter", "brush", "native", "sketch", "canvas", "voice", "actor", "scribe", "clerk"]
    assert names == [*named, *others, "talker", "classic-talker", "speaker", "silent", "ranker", "auto", "old-name"]
    assert openai.models.retrieve("old-name").id == "old-name"


def test_auto_chooses_and_says_what_answered(openai: OpenAI) -> None:
    """`model` is what was asked, `model_used` and a header what answered, and a header says why."""
    raw = openai.chat.completions.with_raw_response.create(model="auto", messages=ASK)
    reply = raw.parse()

    assert reply.model == "auto"
    assert reply.model_used in {"small", "large"}  # type: ignore[attr-defined]
    assert raw.headers["x-model-used"] == reply.model_used  # type: ignore[attr-defined]
    assert raw.headers["x-route-reason"] in {"auto_small", "auto_large"}
    assert float(raw.headers["x-tollgate-overhead-ms"]) >= 0


def test_an_alias_answers_by_what_it_means(openai: OpenAI) -> None:
    """A retired name goes on working, and says what it now is."""
    reply = openai.chat.completions.create(model="old-name", messages=ASK)

    assert (reply.model, reply.model_used) == ("old-name", "large")  # type: ignore[attr-defined]


def test_usage_soon_shows_exactly_these_calls(house: House, openai: OpenAI) -> None:
    """The statement of today grows by the tokens and dollars of the calls just made."""
    with house.client() as client:

        def usage() -> Any:
            return client.get("/v1/usage", params={"team_id": house.team_id}).raise_for_status().json()

        until(lambda: not client.get("/health/ready").json()["journal_backlog"])  # calls of the tests before
        before = usage()
        replies = [openai.chat.completions.create(model="small", messages=ASK) for _ in range(3)]
        until(lambda: usage()["requests"] >= before["requests"] + 3)
        after = usage()

    used = [reply.usage for reply in replies if reply.usage is not None]
    assert after["requests"] - before["requests"] == 3
    assert after["input_tokens"] - before["input_tokens"] == sum(usage.prompt_tokens for usage in used)
    assert after["output_tokens"] - before["output_tokens"] == sum(usage.completion_tokens for usage in used)
    cost = sum(Decimal(usage.cost_usd) for usage in used)  # type: ignore[attr-defined]
    assert Decimal(str(after["cost_usd"])) - Decimal(str(before["cost_usd"])) == cost


def test_the_request_id_is_the_ledgers(house: House, openai: OpenAI) -> None:
    """x-request-id finds the call's row, with its attempts and times."""
    raw = openai.chat.completions.with_raw_response.create(
        model="small", messages=ASK, extra_headers={"x-client-request-id": "mine-1"}
    )
    request_id = raw.headers["x-request-id"]
    row = house.record_of(raw.http_response)

    assert raw.headers["x-client-request-id"] == "mine-1"
    assert (row["request_id"], row["team_id"], row["model_used"]) == (request_id, house.team_id, "small")
    assert row["status"] == "answered"
    assert row["attempts"][0]["outcome"] == "ok"


def test_an_error_names_its_request_and_where_it_failed(
    openai: OpenAI, house: House, upstream: ScriptedUpstream
) -> None:
    """In the body that the package keeps; of what was refused before an upstream was asked, the request alone."""
    upstream.script("403")
    with pytest.raises(InternalServerError) as failed:
        openai.chat.completions.create(model="small", messages=ASK)
    upstream.forget()
    house.reset_breakers()
    with pytest.raises(BadRequestError) as refused:
        openai.chat.completions.create(model="small", messages=ASK, temperature=9)

    body: Any = failed.value.body
    assert (body["request_id"], body["model"]) == (failed.value.request_id, "small") and "/" in body["endpoint"]
    refusal: Any = refused.value.body
    assert refusal["request_id"] == refused.value.request_id and "endpoint" not in refusal


def test_azures_client_reaches_the_model_that_its_deployment_names(house: House) -> None:
    """AzureOpenAI names the model in the path, where Azure goes by it alone, and sends the key in a header of its own;
    whole, in a stream, among what is no deployment's, and at Azure's newer address."""
    with AzureOpenAI(azure_endpoint=house.url, api_key=house.team_key, api_version="2024-10-21") as azure:
        raw = azure.chat.completions.with_raw_response.create(model="small", messages=ASK)
        chunks = list(azure.chat.completions.create(model="small", messages=ASK, stream=True))
        fixed = azure.copy(base_url=f"{house.url}/openai/deployments/small")
        other = fixed.chat.completions.create(model="gpt-4o", messages=ASK)
        models = [model.id for model in azure.models.list()]
        lists: list[Any] = [
            azure.files.list(limit=1),
            azure.batches.list(limit=1),
            azure.chat.completions.list(limit=1),
        ]
        with pytest.raises(NotFoundError, match="The model 'none/such' does not exist"):
            azure.chat.completions.create(model="none/such", messages=ASK)
    with OpenAI(base_url=house.url + "/openai/v1", api_key=house.team_key) as newer:
        newest = newer.responses.create(model="small", input="Say something.", store=False)

    reply = raw.parse()
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert reply.choices[0].message.content and other.choices[0].message.content and newest.output_text and text
    assert house.record_of(raw.http_response)["model_used"] == "small" and other.model_dump()["model_used"] == "small"
    assert "small" in models and all(isinstance(each.data, list) for each in lists)


def test_a_deployment_in_the_path_takes_a_body_without_a_model(house: House) -> None:
    """What is written by hand for Azure has no model in its body; a body with a key twice stays refused there."""
    path, key = "/openai/deployments/small/chat/completions?api-version=2024-10-21", {"api-key": house.team_key}
    with house.client() as client:
        client.headers.pop("authorization")
        plain = client.post(path, json={"messages": ASK, "max_tokens": 4}, headers=key)
        twice = client.post(path, content=b'{"messages": [], "messages": []}', headers=key)
        unknown = client.post("/openai/deployments/small/chat", json={"messages": ASK}, headers=key)
        listed = client.get("/openai/deployments", headers=key)

    assert (plain.status_code, plain.json()["model_used"]) == (200, "small")
    assert twice.json()["error"]["code"] == "duplicate_key"
    assert (unknown.status_code, listed.status_code) == (404, 404)
