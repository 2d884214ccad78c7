# What a product team does with OpenAI's Responses API, by the stock openai package and over the bare wire.

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import httpx
import pytest
from openai import NotFoundError, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from protocol.chat import ThinkingBlock
from protocol.responses_to_chat import seal_of
from tests.support.house import House
from tests.support.response_stream import built_response, events_in
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.upstream_scripts import Script

pytestmark = pytest.mark.usefixtures("strict_upstream")

URL = "/v1/responses"
ASK: dict[str, Any] = {"model": "small", "input": "Say something."}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": CITY | {"additionalProperties": False},
    "strict": True,
}
DROPPED = "x-tollgate-dropped"
MODELS = ["small", "claude"]  # at OpenAI's format, and at Anthropic's


class City(BaseModel):
    """What a structured answer holds."""

    city: str


def is_typed(kind: Any, value: Any) -> None:
    """Hold a value to the package's own type of it."""
    TypeAdapter(kind).validate_python(value)


@pytest.mark.parametrize("model", MODELS)
def test_the_package_has_text_usage_and_cost(openai: OpenAI, model: str) -> None:
    """A response says what was answered, what it took, and that it is stored."""
    raw = openai.responses.with_raw_response.create(model=model, input="Say something.", store=True)
    response = raw.parse()
    usage = response.usage

    assert response.output_text and response.status == "completed" and response.error is None
    assert response.id.startswith("resp_") and response.model == response.model_used == model  # type: ignore[attr-defined]
    assert usage is not None and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert Decimal(usage.cost_usd) > 0  # type: ignore[attr-defined]
    assert response.store is True and DROPPED not in raw.headers  # type: ignore[attr-defined]
    is_typed(Response, json.loads(raw.text))


@pytest.mark.parametrize("model", MODELS)
def test_the_package_streams_what_it_gets_whole(openai: OpenAI, upstream: ScriptedUpstream, model: str) -> None:
    """The stream helper builds the same response from the events as comes at the end of them."""
    upstream.script(Script(text="Grüezi 東京 🚪 there", thinking="Hm. No."))
    with openai.responses.stream(model=model, input="Say something.", reasoning={"effort": "low"}) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()

    assert response.output_text == "Grüezi 東京 🚪 there"
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert {"response.reasoning_text.delta", "response.output_text.delta", "response.output_text.done"} < set(kinds)


@pytest.mark.parametrize("model", MODELS)
def test_the_package_parses_what_has_a_schema(openai: OpenAI, model: str) -> None:
    """``text.format`` binds the answer, and comes back as it was sent."""
    response = openai.responses.parse(model=model, input="Where?", text_format=City)

    assert isinstance(response.output_parsed, City)
    assert response.text is not None and response.text.format is not None
    assert response.text.format.type == "json_schema" and response.text.format.name == "City"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_output_taken(
    openai: OpenAI, upstream: ScriptedUpstream, model: str, stream: bool
) -> None:
    """A client keeps the conversation: it sends back what it was answered, unchanged, with the outputs."""
    upstream.script(Script(thinking="They ask for the weather."), times=1)
    items: list[Any] = [{"role": "user", "content": "weather?"}]
    asked: Any = {"model": model, "tools": [WEATHER], "reasoning": {"effort": "low"}, "max_output_tokens": 9000}
    if stream:
        with openai.responses.stream(input=items, **asked) as events:
            first: Any = events.until_done().get_final_response()
    else:
        first = openai.responses.create(input=items, **asked)
    items += first.output
    [call] = [item for item in first.output if item.type == "function_call"]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "fine"})
    second = openai.responses.create(input=items, **asked)
    seen = (upstream.requests[-1].body or {})["messages"]

    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Zürich 🚪"})
    assert first.output[0].type == "reasoning" and second.output_text
    if model == "claude":  # which has its thinking back, signed
        kinds = [block["type"] for block in seen[1]["content"]]
        assert kinds == ["thinking", "tool_use"] and seen[1]["content"][0]["signature"]
        assert seen[1]["content"][0]["thinking"] == "They ask for the weather."
    else:
        assert [message["role"] for message in seen] == ["user", "assistant", "tool"]
        assert seen[1]["tool_calls"][0]["id"] == seen[2]["tool_call_id"] == call.call_id


def test_every_event_is_of_the_packages_types(client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """Text with its scores, thinking, and two calls at once: names, numbers and fields are those of the package."""
    scored = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answers = [client.post(URL, json=ASK | {"stream": True} | scored)]
    answers.append(client.post(URL, json=ASK | {"stream": True, "tools": [WEATHER], "input": "weather?"}))
    upstream.script(Script(refuses=True), times=1)
    answers.append(client.post(URL, json=ASK | {"stream": True}))
    upstream.script(Script(text="Yes.", thinking="Hm."), times=1)
    answers.append(client.post(URL, json=ASK | {"stream": True, "model": "claude", "reasoning": {"effort": "low"}}))
    kinds = set()
    for answer in answers:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        is_typed(Response, built_response(answer.text))
        for event in events_in(answer.text):
            is_typed(ResponseStreamEvent, event)
            kinds.add(event["type"].removeprefix("response."))
    [message] = built_response(answers[0].text)["output"]

    assert kinds == {
        *("created", "in_progress", "completed", "output_item.added", "output_item.done"),
        *("content_part.added", "content_part.done", "output_text.delta", "output_text.done"),
        *("refusal.delta", "refusal.done", "reasoning_text.delta", "reasoning_text.done"),
        *("function_call_arguments.delta", "function_call_arguments.done"),
    }
    scores = message["content"][0]["logprobs"]
    assert "".join(score["token"] for score in scores) == message["content"][0]["text"]
    assert all(len(score["top_logprobs"]) == 2 for score in scores)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "more", "reason"),
    [
        (Script(text="one two three four"), {"max_output_tokens": 2}, "max_output_tokens"),
        (Script(text="Well", finish="content_filter"), {}, "content_filter"),
    ],
)
def test_a_response_that_is_cut_short_is_incomplete(
    client: httpx.Client, upstream: ScriptedUpstream, script: Script, more: dict[str, Any], reason: str, stream: bool
) -> None:
    """It says why, and so does its last event."""
    upstream.script(script)
    answer = client.post(URL, json=ASK | more | {"stream": stream})
    response = built_response(answer.text) if stream else answer.json()

    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": reason})
    assert response["output"][-1]["status"] == "incomplete" and response["completed_at"] is None


def test_a_stream_that_breaks_fails(house: House, client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """What came is told, then the failure, twice as OpenAI does; the row says interrupted."""
    upstream.script("cut,after=2", times=1)
    answer = client.post(URL, json=ASK | {"stream": True})
    *_, failed, error = events_in(answer.text)

    assert (failed["type"], failed["response"]["status"], error["type"]) == ("response.failed", "failed", "error")
    assert failed["response"]["error"]["code"] == error["code"] == "upstream_error" and error["message"]
    is_typed(ResponseStreamEvent, error)
    row = house.record_of(answer)
    assert (row["status"], row["endpoint"]) == ("interrupted", "responses")


def test_items_of_every_kind_reach_the_model(client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """Instructions, roles, parts, calls that belong together, and images that a tool shows."""
    png = "data:image/png;base64,iVBORw0KGgo="
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Look:"}, {"type": "input_image", "image_url": png}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "another maker's"},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Two calls.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "weather", "arguments": '{"city":"Ulm"}'},
        {"type": "function_call", "id": "fc_2", "call_id": "b", "name": "weather", "arguments": '{"city":"Bern"}'},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image", "image_url": png}]},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "fine"}]},
    ]
    more: dict[str, Any] = {
        "reasoning": {"effort": "max", "summary": "auto", "mode": "standard"},
        "truncation": "auto",
        "include": ["reasoning.encrypted_content"],
    }
    labels = {"metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "colour": 1}
    body = ASK | {"input": items, "instructions": "Be brief.", "tools": [WEATHER]} | more | labels
    answer = client.post(URL, json=body)
    seen = upstream.requests[-1].body or {}
    image = {"type": "image_url", "image_url": {"url": png}}
    calls = [call["function"]["arguments"] for call in seen["messages"][3]["tool_calls"]]

    assert answer.status_code == 200, answer.text
    assert [message["role"] for message in seen["messages"]] == [
        *("system", "developer", "user", "assistant", "tool", "tool", "user"),
    ]
    assert seen["messages"][2]["content"] == [{"type": "text", "text": "Look:"}, image]
    assert seen["messages"][3]["content"] == "Two calls." and calls == ['{"city":"Ulm"}', '{"city":"Bern"}']
    assert seen["messages"][6]["content"] == [image]
    assert (seen["reasoning_effort"], seen["user"], seen["metadata"]) == ("xhigh", "u", {"a": "b"})
    told = set(answer.headers[DROPPED].split(", "))
    assert told == {"colour", "input.reasoning", "reasoning.summary", "truncation"}
    echoed = answer.json()
    assert (echoed["instructions"], echoed["metadata"], echoed["tools"][0]["name"]) == (
        "Be brief.",
        {"a": "b"},
        "weather",
    )


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_those_that_the_model_hears_of(
    client: httpx.Client, upstream: ScriptedUpstream, mode: str
) -> None:
    """The others stay in the response, as they were asked."""
    tools = [WEATHER, WEATHER | {"name": "clock"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "clock"}]}
    answer = client.post(URL, json=ASK | {"tools": tools, "tool_choice": choice})
    seen = upstream.requests[-1].body or {}

    assert [tool["function"]["name"] for tool in seen["tools"]] == ["clock"] and seen["tool_choice"] == mode
    assert len(answer.json()["tools"]) == 2 and answer.json()["tool_choice"] == choice


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_takes_a_text(openai: OpenAI, upstream: ScriptedUpstream, model: str, stream: bool) -> None:
    """Its model hears of a function of one text, and of the grammar in words; its caller of neither."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    tool = {"type": "custom", "name": "apply_patch", "description": "Patch files.", "format": grammar}
    items: list[Any] = [{"role": "user", "content": "apply_patch"}]
    asked: Any = {"model": model, "tools": [tool], "tool_choice": {"type": "custom", "name": "apply_patch"}}
    if stream:
        with openai.responses.stream(input=items, **asked) as events:
            kinds = {event.type for event in events}
            first: Any = events.get_final_response()
        assert {f"response.custom_tool_call_input.{step}" for step in ("delta", "done")} <= kinds
    else:
        first = openai.responses.create(input=items, **asked)
    [call] = first.output
    given = (upstream.requests[-1].body or {})["tools"][0]
    given = given.get("function", given)
    items += [*first.output, {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}]
    second = openai.responses.create(input=items, model=model, tools=[tool])  # type: ignore[list-item]
    sent = json.dumps((upstream.requests[-1].body or {})["messages"][1], ensure_ascii=False)

    assert (call.type, call.name) == ("custom_tool_call", "apply_patch") and isinstance(call.input, str) and call.input
    assert given["description"] == "Patch files.\n\nThe input must follow this lark grammar:\nstart: /.+/"
    assert call.input in sent and "apply_patch" in sent and second.output_text
    assert second.tools[0].type == "custom" and second.tools[0].name == "apply_patch"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_of_a_namespace_is_called_by_its_own_name(
    client: httpx.Client, upstream: ScriptedUpstream, model: str, stream: bool
) -> None:
    """Its model has one name for both; the caller's item says them apart, and sends them back so."""
    tools = [
        {"type": "namespace", "name": name, "description": f"All of {name}.", "tools": [WEATHER]}
        for name in ("mcp__ulm__", "bern")
    ]
    asked = {"model": model, "tools": tools, "stream": stream, "input": [{"role": "user", "content": "bern__weather"}]}
    answer = client.post(URL, json=asked)
    response = built_response(answer.text) if stream else answer.json()
    [call] = response["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "fine"}
    again = client.post(URL, json=asked | {"input": [*asked["input"], call, output]})  # type: ignore[misc]
    body = upstream.requests[-1].body or {}
    given = [tool.get("function", tool) for tool in body["tools"]]

    is_typed(Response, response)
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "bern", "weather")
    assert [tool["name"] for tool in given] == ["mcp__ulm__weather", "bern__weather"]
    assert [tool["description"] for tool in given] == ["All of mcp__ulm__.", "All of bern."]
    assert again.status_code == 200 and "bern__weather" in json.dumps(body["messages"][1])


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "in 'input'"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "'instructions'"),
    ({"background": True, "store": False}, "background", "leave 'store' out"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "type 'function'"),
    ({"tools": [{"type": "mcp", "server_label": "x", "server_url": "https://x"}]}, "tools[0].type", "'mcp'"),
    ({"tools": [{"type": "mcp", "server_label": "x", "server_url": "http://x"}]}, "tools[0].server_url", "https"),
    ({"tools": [{"type": "mcp", "server_label": "x", "server_url": "https://u:p@x"}]}, "tools[0].server_url", "https"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].server_url", "'connector_id'"),
    ({"tools": [{"type": "file_search"}]}, "tools[0].vector_store_ids", "needs"),
    ({"tools": [{"type": "code_interpreter", "container": "cntr_1"}]}, "tools[0].container", '{"type": "auto"}'),
    (
        {"tools": [{"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["file-1"]}}]},
        "tools[0].container",
        '{"type": "auto"}',
    ),
    (
        {"tools": [{"type": "code_interpreter", "container": {"type": "auto", "memory_limit": "64g"}}]},
        "tools[0].container.memory_limit",
        "no price",
    ),
    ({"tools": [{"type": "image_generation", "partial_images": 2}]}, "tools[0].partial_images", "no price"),
    (
        {"tools": [{"type": "image_generation", "input_image_mask": {"image_url": "https://10.0.0.1/a.png"}}]},
        "tools[0].input_image_mask",
        "a data URL",
    ),
    ({"tools": [{"type": "computer"}]}, "tools[0].type", "'computer'"),
    ({"tools": [{"name": "x"}]}, "tools[0].type", "needs a 'type'"),
    (
        {"input": [{"type": "additional_tools", "tools": [{"type": "web_search"}]}]},
        "input[0].tools[0].type",
        "no other",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "needs a 'name'"),
    ({"tools": [WEATHER | {"defer_loading": True}]}, "tools[0].defer_loading", "Leave"),
    ({"tools": [{"type": "custom"}]}, "tools[0].name", "needs a 'name'"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools", "needs 'tools'"),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace", "name": "m"}]}]},
        "tools[0].tools[0].type",
        "'namespace'",
    ),
    ({"tools": [WEATHER, WEATHER]}, "tools", "one name"),
    ({"tools": [{"type": "image_generation", "name": name} for name in "ab"]}, "tools", "one name"),
    ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "x"}]}, "input[0].input", "Missing"),
    ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name", "has not"),
    ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "tool_choice.type", "has not"),
    ({"tools": [WEATHER], "tool_choice": {"type": "computer"}}, "tool_choice.type", "Known here: "),
    ({"include": ["everything"]}, "include[0]", "Known here: "),
    ({"text": {"format": {"type": "text"}, "colour": 1}}, "text", "Known here: format, verbosity"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "Known here: standard"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "Known here: "),
    ({"service_tier": "priority"}, "service_tier", '"default"'),
    ({"max_output_tokens": 0}, "max_output_tokens", "from 1"),
    ({"temperature": 3}, "temperature", "from 0 to 2"),
    ({"input": []}, "input", "at least one item"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "the item itself"),
    ({"input": [{"type": "image_generation_call", "result": "a text"}]}, "input[0].result", "in base64"),
    ({"input": [{"type": "computer_call_output"}]}, "input[0].type", "Known here: "),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", "nothing that a model could read"),
    ({"input": [{"role": "user"}]}, "input[0].content", "Missing"),
    ({"input": [{"content": "Hi"}]}, "input[0].role", "Missing"),
    ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, "input[0].call_id", "Missing"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "Missing"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        "input[0].content[0].file_data",
        "a PDF's https address",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input[0].content[0].image_url",
        "data URL",
    ),
    (
        {"input": [{"type": "reasoning", "encrypted_content": "tollgate1.changed"}]},
        "input[0].encrypted_content",
        "unchanged",
    ),
]


@pytest.mark.parametrize(("more", "param", "words"), REFUSED, ids=[param for _, param, _ in REFUSED])
def test_what_cannot_be_done_is_refused_by_name(
    client: httpx.Client, upstream: ScriptedUpstream, more: dict[str, Any], param: str, words: str
) -> None:
    """400, before an upstream hears of it, with what would be right."""
    answer = client.post(URL, json=ASK | more)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and words in answer.json()["error"]["message"]
    assert upstream.requests == []


def test_what_a_chat_calls_otherwise_is_named_as_the_caller_did(client: httpx.Client) -> None:
    """Errors that come from further in name the field at fault as this API does."""
    picture = [{"role": "user", "content": [{"type": "input_image", "image_url": "ftp://x/y"}]}]
    answer = client.post(URL, json=ASK | {"model": "claude", "input": picture})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


def test_what_is_left_out_is_told_as_the_caller_named_it(client: httpx.Client) -> None:
    """What the model lacks, and thinking that only another model can read."""
    asked = {"model": "claude", "input": "Hi", "text": {"verbosity": "low"}, "reasoning": {"effort": "low"}}
    thought = seal_of(ThinkingBlock("Hm.", "signed"))
    items = [{"type": "reasoning", "encrypted_content": thought}, {"role": "assistant", "content": "Yes?"}]
    answers = [client.post(URL, json=asked)]
    answers.append(client.post(URL, json=ASK | {"input": [*items, {"role": "user", "content": "Well?"}]}))

    assert [answer.headers[DROPPED] for answer in answers] == ["text.verbosity", "input.reasoning"]


def test_nothing_is_found_that_was_not_to_be_stored(openai: OpenAI) -> None:
    """A response's id then leads nowhere, and the answer says why."""
    response = openai.responses.create(model="small", input="Say something.", store=False)
    assert response.store is False  # type: ignore[attr-defined]

    with pytest.raises(NotFoundError, match="not stored here"):
        openai.responses.retrieve(response.id)


def test_a_route_is_explained(client: httpx.Client) -> None:
    """A body with 'input' is an embedding's, unless it has what only a response can."""
    told = [client.post("/v1/route", json=ASK | more) for more in ({}, {"stream": False}, {"instructions": "x"})]

    assert [answer.status_code for answer in told] == [200, 200, 200]
    wrong = client.post("/v1/route", json=ASK | {"store": False, "background": True})
    assert wrong.json()["error"]["param"] == "background"
    assert client.post("/v1/route", json=ASK | {"input": [{"role": "user"}]}).status_code == 400
