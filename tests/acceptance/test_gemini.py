# Models behind Gemini's own API: signatures that come back, prompts that are blocked, clients that leave, keys that are
# none. Answers themselves are compared in test_every_pair.py, faults in test_fault_table.py.

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.gemini_rules import UNSIGNED, sign
from tests.support.house import House
from tests.support.message_stream import built_of
from tests.support.response_stream import built_response
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.waiting import until

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
ASKED = {"role": "user", "content": "weather?"}


@pytest.fixture(autouse=True)
def _strict(house: House, upstream: ScriptedUpstream) -> Iterator[None]:
    upstream.forget()
    yield
    assert upstream.violations == []
    upstream.forget()
    house.reset_breakers()


def message_of_chunks(stream: str) -> dict[str, Any]:
    """Put a streamed message together as OpenAI's packages do, fields that they do not know among them."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [], "thinking_blocks": []}
    for line in stream.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            for block in choice["delta"].get("thinking_blocks") or ():
                message["thinking_blocks"].append({key: block[key] for key in ("type", "thinking", "signature")})
            for piece in choice["delta"].get("tool_calls") or ():
                if "id" in piece:
                    message["tool_calls"].append({"id": piece["id"], "type": "function", "function": piece["function"]})
                else:
                    message["tool_calls"][-1]["function"]["arguments"] += piece["function"]["arguments"]
    return message


def openai_turns(client: httpx.Client, streams: bool) -> None:
    """Ask for a call, and answer it, in OpenAI's dialect."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    body = {"model": "gemini", "messages": [ASKED], "tools": tools, "stream": streams, "reasoning_effort": "low"}
    answer = client.post("/v1/chat/completions", json=body)
    message = message_of_chunks(answer.text) if streams else answer.json()["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "fine"} for call in message["tool_calls"]]
    client.post("/v1/chat/completions", json=body | {"messages": [ASKED, message, *results]}).raise_for_status()


def anthropic_turns(client: httpx.Client, streams: bool) -> None:
    """The same in Anthropic's."""
    body: dict[str, Any] = {"model": "gemini", "max_tokens": 999, "stream": streams, "thinking": {"type": "adaptive"}}
    body |= {"tools": [{"name": "weather", "input_schema": SCHEMA}], "messages": [ASKED]}
    answer = client.post("/v1/messages", json=body)
    said = (built_of(answer.text) if streams else answer.json())["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "fine"}
        for block in said
        if block["type"] == "tool_use"
    ]
    turns = [ASKED, {"role": "assistant", "content": said}, {"role": "user", "content": results}]
    client.post("/v1/messages", json=body | {"messages": turns}).raise_for_status()


def response_turns(client: httpx.Client, streams: bool) -> None:
    """And as responses."""
    body: dict[str, Any] = {"model": "gemini", "stream": streams, "reasoning": {"effort": "low"}, "input": [ASKED]}
    body |= {"tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]}
    answer = client.post("/v1/responses", json=body)
    items = (built_response(answer.text) if streams else answer.json())["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "fine"}
        for item in items
        if item["type"] == "function_call"
    ]
    client.post("/v1/responses", json=body | {"input": [ASKED, *items, *results]}).raise_for_status()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("turns", [openai_turns, anthropic_turns, response_turns])
def test_a_signature_comes_back_in_every_dialect(
    house: House, upstream: ScriptedUpstream, turns: Any, *, streams: bool
) -> None:
    """A client that sends back what came gives Gemini its signature again, where it was; with a thought or without."""
    for thinking in ("Hm.", None):
        upstream.script(f"thinking={thinking}" if thinking else "latency=0", times=1)
        with house.client() as client:
            turns(client, streams)

    told = [seen.body for seen in upstream.requests if seen.body is not None][1::2]
    signatures = [body["contents"][1]["parts"][-1]["thoughtSignature"] for body in told]
    assert signatures == [sign("weather")] * 2


def test_a_call_of_another_model_is_marked_as_such(house: House, upstream: ScriptedUpstream) -> None:
    """A conversation that another model began, or whose client keeps no thoughts, goes on here."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    turns = [ASKED, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "f"}]
    with house.client() as client:
        client.post("/v1/chat/completions", json={"model": "gemini", "messages": turns}).raise_for_status()

    [seen] = upstream.requests
    assert seen.body is not None
    assert seen.body["contents"][1]["parts"][0]["thoughtSignature"] == UNSIGNED


@pytest.mark.parametrize("streams", [False, True])
def test_a_blocked_prompt_is_the_callers(house: House, upstream: ScriptedUpstream, *, streams: bool) -> None:
    """Under a 200 as Google has it, a 400 as its client has it; no key rests."""
    upstream.script("finish=prompt")
    with house.client() as client:
        chat = client.post("/v1/chat/completions", json={"model": "gemini", "messages": [ASKED], "stream": streams})
        message = client.post(
            "/v1/messages", json={"model": "gemini", "max_tokens": 9, "messages": [ASKED], "stream": streams}
        )
        upstream.forget()
        client.post("/v1/chat/completions", json={"model": "gemini", "messages": [ASKED]}).raise_for_status()

    assert (chat.status_code, chat.json()["error"]["code"]) == (400, "content_policy_violation")
    assert (message.status_code, message.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "(prohibited content)" in chat.text and "(prohibited content)" in message.text


def test_a_client_that_leaves_ends_the_call_at_google(house: House, upstream: ScriptedUpstream) -> None:
    """At once, and it is booked by what Google had counted so far, thoughts among it."""
    upstream.script("tokens=500,pace=0.02,reasoning_tokens=40")
    body = {"model": "gemini", "messages": [ASKED], "stream": True, "reasoning_effort": "low"}
    with house.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
        seen = 0
        for line in answer.iter_lines():
            seen += '"content":"' in line
            if seen > 5:
                break
    left = time.monotonic()
    [asked] = upstream.requests
    until(lambda: asked.closed_at is not None)
    record = house.record_of(answer)

    assert asked.closed_at is not None and asked.closed_at - left < 5.0
    assert record["status"] == "interrupted"
    assert record["reasoning_tokens"] == 40 and 45 <= record["output_tokens"] < 100


def test_a_key_that_is_none_rests_and_is_nobodys_business(house: House, upstream: ScriptedUpstream) -> None:
    """Google says so with a 400, and gives the reason in its details."""
    upstream.script("400,code=API_KEY_INVALID,message=API key not valid. Please pass a valid API key.", times=1)
    with house.client() as client:
        answer = client.post("/v1/chat/completions", json={"model": "gemini", "messages": [ASKED]})

    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")
    assert "API key" not in answer.text and "sk-" not in answer.text


def test_how_long_google_asks_to_wait_is_told(house: House, upstream: ScriptedUpstream) -> None:
    """From the details of its error, where no header says it."""
    upstream.script("429,retry_after=7", times=1)
    with house.client() as client:
        answer = client.post("/v1/chat/completions", json={"model": "gemini", "messages": [ASKED]})

    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")


def test_texts_become_vectors(house: House, upstream: ScriptedUpstream) -> None:
    """The same as at OpenAI's upstream, in both ways that vectors travel, and billed by Google's count."""
    body: dict[str, Any] = {"input": ["Grüezi", "東京 🚪"], "dimensions": 4, "user": "u"}
    with house.client() as client:
        for form in ({}, {"encoding_format": "base64"}):
            theirs, ours = (client.post("/v1/embeddings", json=body | form | {"model": m}) for m in ("small", "gemini"))

            assert ours.json()["data"] == theirs.json()["data"]
            assert ours.json()["usage"] == theirs.json()["usage"]
            assert ours.headers["x-tollgate-dropped"] == "user"
        tokens = client.post("/v1/embeddings", json={"input": [1, 2], "model": "gemini"})
    assert (tokens.status_code, tokens.json()["error"]["param"]) == (400, "input")
