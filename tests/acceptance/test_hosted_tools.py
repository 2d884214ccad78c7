# Tools that an upstream runs for a response: files searched, code run, pictures made, MCP servers called. They pass
# where the provider has them and its operator allows them, are held and charged by the call, and refused elsewhere.

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support import response_answers
from tests.support.house import House
from tests.support.response_stream import events_in
from tests.support.scripted_upstream import ScriptedUpstream

pytestmark = pytest.mark.usefixtures("strict_upstream")

URL = "/v1/responses"
FILES: dict[str, Any] = {"type": "file_search", "vector_store_ids": ["vs_all"], "max_num_results": 5}
CODE: dict[str, Any] = {"type": "code_interpreter", "container": {"type": "auto"}}
PICTURE: dict[str, Any] = {"type": "image_generation", "quality": "low", "size": "1024x1024", "output_format": "webp"}
SERVER: dict[str, Any] = {"type": "mcp", "server_label": "tolls", "server_url": "https://mcp.example.com/mcp"}
SECRETS = {"authorization": "Bearer of-the-caller", "headers": {"x-tenant": "of-the-caller"}}
CALLED = SERVER | SECRETS | {"require_approval": "never", "allowed_tools": ["look"]}
EVERY = [{"type": "web_search"}, FILES, CODE, PICTURE, CALLED]
ASK: dict[str, Any] = {"model": "native", "input": "search it"}
EACH = {"web_searches": 0.01, "file_searches": 0.0025, "containers": 0.03, "images": 0.01}  # dollars


def sent(upstream: ScriptedUpstream) -> dict[str, Any]:
    """Return what the upstream was asked last."""
    body = upstream.requests[-1].body
    assert body is not None
    return body


@pytest.mark.parametrize("stream", [False, True])
def test_each_is_told_as_it_came_and_charged_by_the_call(
    client: httpx.Client, house: House, upstream: ScriptedUpstream, stream: bool
) -> None:
    """Code by its container, which two calls share; a server's tools for nothing but their tokens."""
    asked = ASK | {"tools": EVERY, "stream": stream, "max_tool_calls": 4}
    most = 4 * sum(EACH.values())  # and the tokens
    refused = client.post(URL, json=asked, headers={"x-max-cost-usd": str(most)})
    assert (refused.status_code, refused.json()["error"]["code"]) == (
        400,
        "max_cost_exceeded",
    ) and not upstream.requests
    answer = client.post(URL, json=asked)
    events = events_in(answer.text) if stream else []
    response = events[-1]["response"] if stream else answer.json()
    row, tools = house.record_of(answer), sent(upstream)["tools"]
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)

    assert tools == [tool | ({"model": "gpt-image-2"} if tool == PICTURE else {}) for tool in EVERY]
    assert (row["status"], row["units"]) == ("answered", dict.fromkeys(EACH, 1))
    tokens = row["input_tokens"] * 1e-6 + row["output_tokens"] * 2e-6
    assert row["cost_usd"] == pytest.approx(sum(EACH.values()) + tokens, abs=2e-9)
    TypeAdapter(Response).validate_python(response)
    assert client.get(f"{URL}/{response['id']}").json() == response
    assert "of-the-caller" not in json.dumps(response["tools"])


def test_what_was_run_before_a_stream_breaks_is_charged(
    client: httpx.Client, house: House, upstream: ScriptedUpstream
) -> None:
    """The provider bills it, whatever became of the answer."""
    upstream.script("cut,after=2", times=1)
    row = house.record_of(client.post(URL, json=ASK | {"tools": [FILES, PICTURE], "stream": True}))

    assert (row["status"], row["units"]) == ("interrupted", {"file_searches": 1, "images": 1})
    assert row["cost_usd"] >= EACH["file_searches"] + EACH["images"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_run_is_charged_where_no_usage_is_told(
    client: httpx.Client, house: House, upstream: ScriptedUpstream, stream: bool
) -> None:
    """The answer's items tell it."""
    upstream.script("no-usage", times=1)
    row = house.record_of(client.post(URL, json=ASK | {"tools": [FILES, CODE], "stream": stream}))

    assert (row["status"], row["units"]) == ("answered", {"file_searches": 1, "containers": 1})


@pytest.mark.parametrize(("stream", "script"), [(False, None), (True, None), (True, "no-stream")])
def test_no_answer_of_theirs_is_kept(
    client: httpx.Client, house: House, upstream: ScriptedUpstream, stream: bool, script: str | None
) -> None:
    """They may have done something, or have read what is one team's alone: a cache would not."""
    if script is not None:
        upstream.script(script, times=2)
    asked = ASK | {"tools": [CALLED], "stream": stream}
    answers = [client.post(URL, json=asked, headers={"x-cache": "all"}) for _ in range(2)]
    house.record_of(answers[-1])

    assert [answer.headers["x-cache"] for answer in answers] == ["miss", "miss"] and len(upstream.requests) == 2


@pytest.mark.parametrize("by", ["items", "previous_response_id", "conversation"])
def test_what_they_did_goes_back_as_it_came(
    openai: OpenAI, client: httpx.Client, upstream: ScriptedUpstream, by: str
) -> None:
    """With the upstream's ids, sent again or from here; a model that is asked for a chat is told nothing of it."""
    held = {"conversation": openai.conversations.create().id} if by == "conversation" else {}
    first = client.post(URL, json=ASK | held | {"tools": EVERY}).json()
    again = {"role": "user", "content": "And?"}
    said: dict[str, Any] = {"input": [again]} | held
    if by == "items":
        said["input"] = [{"role": "user", "content": "search it"}, *first["output"], again]
    elif by == "previous_response_id":
        said[by] = first["id"]
    client.post(URL, json=ASK | said | {"store": False}).raise_for_status()
    items, other = sent(upstream)["input"][1:-2], None
    code = next(item for item in items if item["type"] == "code_interpreter_call")
    told_as = next(item for item in first["output"] if item["type"] == "code_interpreter_call")["container_id"]
    if by == "items":
        other = client.post(URL, json=said | {"model": "small"})

    assert [item["type"] for item in items] == [item["type"] for item in first["output"][:-1]]
    assert all(item["id"].split("_")[1].startswith("up") for item in items)
    assert code["container_id"].startswith("cntr_") and len(code["container_id"]) < len(told_as)
    foreign = [code | {"container_id": code["container_id"]}, {"role": "user", "content": "What lies there?"}]
    before = len(upstream.requests)
    refused = client.post(URL, json=ASK | {"tools": [CODE], "input": foreign})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0].container_id")
    assert len(upstream.requests) == before
    if other is not None:
        told = {f"input.{item['type']}" for item in items}
        assert (other.status_code, set(other.headers["x-tollgate-dropped"].split(", "))) == (200, told)


@pytest.mark.parametrize("by", ["previous_response_id", "conversation"])
def test_an_item_of_an_unknown_type_cannot_be_gone_on_from(
    openai: OpenAI, client: httpx.Client, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """It is answered as it came; what goes on from it is told which it is."""
    monkeypatch.setattr(response_answers, "hosted_items", lambda tool, tag: iter([{"id": "x", "type": "new_call"}]))
    held = {"conversation": openai.conversations.create().id} if by == "conversation" else {}
    first = client.post(URL, json=ASK | held | {"tools": [CODE]}).json()
    error = client.post(URL, json=ASK | (held or {by: first["id"]})).json()["error"]

    assert first["output"][0]["type"] == "new_call"
    assert error["code"] == "stored_response_unreadable" and "'new_call'" in error["message"]


def test_a_call_of_a_server_is_approved(client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """By the id under which the caller was asked; the upstream is told its own."""
    first = client.post(URL, json=ASK | {"tools": [SERVER]}).json()
    [request] = [item for item in first["output"] if item["type"] == "mcp_approval_request"]
    approved = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
    second = client.post(URL, json=ASK | {"input": [approved], "previous_response_id": first["id"], "tools": [SERVER]})
    told = sent(upstream)["input"]

    assert second.status_code == 200, second.text
    assert told[-1]["approval_request_id"] in [item.get("id") for item in told] and told[-1]["approve"] is True


def test_the_one_that_is_chosen_is_called(client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """Alone, or among those that are allowed."""
    chosen = {"type": "mcp", "server_label": "tolls", "name": "look"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "file_search"}, chosen]}
    for choice in ({"type": "image_generation"}, chosen, allowed):
        client.post(URL, json=ASK | {"tools": EVERY, "tool_choice": choice}).raise_for_status()

        assert sent(upstream)["tool_choice"] == choice


NOT_HERE: list[tuple[dict[str, Any], str, str]] = [
    (FILES | {"vector_store_ids": ["vs_all", "vs_theirs"]}, "vector_store_ids", "vs_theirs"),
    (SERVER | {"server_url": "https://elsewhere.example.com/mcp"}, "server_url", "elsewhere.example.com"),
    (SERVER | {"server_url": "https://mcp.example.com:8443/mcp"}, "server_url", "mcp.example.com:8443"),
    (SERVER | {"server_url": None, "connector_id": "connector_drive"}, "server_url", "connector_drive"),
    (PICTURE | {"model": "gpt-image-1"}, "model", "gpt-image-2"),
    (PICTURE | {"quality": "ultra"}, "quality", "ultra"),
    (PICTURE | {"size": "2x2"}, "size", "2x2"),
]


@pytest.mark.parametrize(("tool", "field", "words"), NOT_HERE, ids=[words for _, _, words in NOT_HERE])
def test_what_was_not_allowed_is_refused_by_name(
    client: httpx.Client, upstream: ScriptedUpstream, tool: dict[str, Any], field: str, words: str
) -> None:
    """Another team's files, another server, another picture model, a picture without a price: nothing is sent."""
    error = client.post(URL, json=ASK | {"tools": [{"type": "web_search"}, tool]}).json()["error"]

    assert (error["param"], error["code"]) == (f"tools[1].{field}", "unsupported_parameter")
    assert words in error["message"] and not upstream.requests


@pytest.mark.parametrize("tool", [FILES, CODE, PICTURE], ids=["files", "code", "picture"])
def test_one_without_a_price_is_refused(client: httpx.Client, upstream: ScriptedUpstream, tool: dict[str, Any]) -> None:
    """What it would cost is not known."""
    error = client.post(URL, json=ASK | {"model": "native-unpriced", "tools": [tool]}).json()["error"]

    assert (error["param"], error["code"]) == ("tools[0].type", "unsupported_parameter")
    assert "is not known" in error["message"] and not upstream.requests
