# One conversation, asked in each dialect of a model behind each format, and behind Azure, plain and streamed: the same
# answer in all ways. What a fault looks like at each pair is in test_fault_table.py.

from __future__ import annotations

import json
from itertools import product
from typing import Any

import httpx
import pytest
from msgspec import Struct
from msgspec.structs import replace

from tests.support.house import House
from tests.support.message_stream import built_of
from tests.support.response_stream import built_response
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.upstream_scripts import Script

pytestmark = pytest.mark.usefixtures("strict_upstream")

PNG = "iVBORw0KGgo="
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SCHEMA: dict[str, Any] = CITY | {"additionalProperties": False}
WEATHER = ("weather", {"city": "Zürich 🚪"})
CLOCK = ("clock", {})
# The last word for why a reply ended, in both dialects.
REASONS = {
    "stop": ("stop", "end_turn"),
    "stopped": ("stop", "stop_sequence"),
    "length": ("length", "max_tokens"),
    "tools": ("tool_calls", "tool_use"),
    "withheld": ("content_filter", "refusal"),
}


class Asked(Struct, frozen=True, kw_only=True):
    """A conversation in no dialect. Turns are (role, words); calls and results are of the turn between."""

    turns: tuple[tuple[str, str], ...] = (("user", "Say something."),)
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()  # made after the first turn, and answered with "fine"
    system: str | None = None
    tools: bool = False
    choice: str | None = None  # "must", "weather", "none"
    one_at_a_time: bool = False
    image: str | None = None
    most: int = 500
    stop: str | None = None
    schema: bool = False
    thinks: bool = False


class Heard(Struct, frozen=True, kw_only=True):
    """An answer in no dialect."""

    text: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    thought: str = ""
    why: str = "stop"
    cached: int = 0  # tokens
    written: int = 0
    said: int = 0


class Case(Struct, frozen=True, kw_only=True):
    """One scenario. ``told_apart``: only Anthropic's upstream says which stop sequence it was."""

    asked: Asked
    script: Script = Script(text="Grüezi 東京 🚪 there")
    heard: Heard = Heard(text="Grüezi 東京 🚪 there", said=4)


TWO = Heard(calls=(WEATHER, CLOCK), why="tools", said=-1)
CASES = {
    "text": Case(asked=Asked()),
    "instructions": Case(asked=Asked(system="Be brief.")),
    "several turns": Case(asked=Asked(turns=(("user", "Hi."), ("assistant", "Yes?"), ("user", "Well?")))),
    "two users in a row": Case(asked=Asked(turns=(("user", "Hi."), ("user", "Well?")))),
    "a beginning to go on with": Case(asked=Asked(turns=(("user", "Hi."), ("assistant", "It is"), ("user", "Go on.")))),
    "usage with cache reads and writes": Case(
        asked=Asked(),
        script=Script(text="Grüezi 東京 🚪 there", cached_tokens=3, cache_write_tokens=2),
        heard=Heard(text="Grüezi 東京 🚪 there", cached=3, written=2, said=4),
    ),
    "an image": Case(asked=Asked(image=PNG)),
    "two tools at once": Case(asked=Asked(turns=(("user", "weather and clock"),), tools=True), heard=TWO),
    "one tool at a time": Case(
        asked=Asked(turns=(("user", "weather and clock"),), tools=True, one_at_a_time=True),
        heard=Heard(calls=(WEATHER,), why="tools", said=-1),
    ),
    "some tool": Case(asked=Asked(tools=True, choice="must"), heard=Heard(calls=(WEATHER,), why="tools", said=-1)),
    "this tool": Case(asked=Asked(tools=True, choice="weather"), heard=Heard(calls=(WEATHER,), why="tools", said=-1)),
    "no tool": Case(asked=Asked(turns=(("user", "weather?"),), tools=True, choice="none")),
    "the results of two tools": Case(
        asked=Asked(turns=(("user", "weather and clock"), ("user", "Well?")), calls=(WEATHER, CLOCK), tools=True)
    ),
    "the limit": Case(asked=Asked(most=2), heard=Heard(text="Grüezi 東京", why="length", said=2)),
    "a stop sequence": Case(asked=Asked(stop=" 🚪"), heard=Heard(text="Grüezi 東京", why="stopped", said=2)),
    "withheld": Case(
        asked=Asked(),
        script=Script(text="Well", finish="content_filter"),
        heard=Heard(text="Well", why="withheld", said=1),
    ),
    "a schema": Case(
        asked=Asked(schema=True), script=Script(), heard=Heard(text='{"city": "Zürich 🚪"}', said=-1)
    ),
    "thinking": Case(
        asked=Asked(thinks=True),
        script=Script(text="Yes.", thinking="Hm. 東京? No."),
        heard=Heard(text="Yes.", thought="Hm. 東京? No.", said=1),
    ),
}  # fmt: skip
WAYS = list(product(("openai", "responses", "anthropic"), ("small", "gpt", "claude", "gemini"), (False, True)))
PATHS = {"openai": "/v1/chat/completions", "responses": "/v1/responses", "anthropic": "/v1/messages"}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_all_pairs_say_the_same(house: House, upstream: ScriptedUpstream, case: Case) -> None:
    """Whatever is asked, and of whom, and in which dialect: text, calls, thinking, reason and counts are the same."""
    upstream.script(case.script)
    with house.client() as client:
        for dialect, model, streams in WAYS:
            if dialect == "responses" and case.asked.stop:
                continue  # this API has no stop sequences
            ask = ASK[dialect]
            heard = ask(client, case.asked, model, streams)
            expected = case.heard
            # OpenAI has one word for both ends; and of its upstreams nobody tells which stop sequence it was.
            if expected.why == "stopped" and (dialect, model) != ("anthropic", "claude"):
                expected = replace(expected, why="stop")
            if model == "gemini":  # it writes caches unasked, and does not say so
                expected = replace(expected, written=0)
            if expected.said < 0:
                assert heard.said > 0
                expected = replace(expected, said=heard.said)

            assert heard == expected, (dialect, model, streams)


def test_a_refusal_is_told_in_every_dialect(house: House, upstream: ScriptedUpstream) -> None:
    """The upstream's own words reach the client, as its dialect has them."""
    upstream.script("400")
    with house.client() as client:
        for dialect, model, streams in WAYS:
            turns = [{"role": "user", "content": "Hi."}]
            body = {"input": turns} if dialect == "responses" else {"messages": turns, "max_tokens": 9}
            answer = client.post(PATHS[dialect], json={"model": model, **body, "stream": streams})

            assert answer.status_code == 400, (dialect, model, streams)
            assert "That is not a value." in answer.json()["error"]["message"]
            assert answer.json()["error"]["type"] == "invalid_request_error"


def ask_openai(client: httpx.Client, asked: Asked, model: str, streams: bool) -> Heard:
    """Ask in OpenAI's dialect."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": asked.system}] if asked.system else []
    for place, (role, words) in enumerate(asked.turns):
        messages.append({"role": role, "content": words})
        if place == 0 and asked.image:
            url = {"url": f"data:image/png;base64,{asked.image}"}
            messages[-1]["content"] = [{"type": "text", "text": words}, {"type": "image_url", "image_url": url}]
        if place == 0 and asked.calls:
            made = [
                {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
                for n, (name, given) in enumerate(asked.calls)
            ]
            messages.append({"role": "assistant", "content": None, "tool_calls": made})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "fine"} for call in made]
    body: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": asked.most, "stream": streams}
    if streams:
        body["stream_options"] = {"include_usage": True}
    if asked.tools:
        tools = [{"name": "weather", "parameters": SCHEMA}, {"name": "clock", "parameters": {"type": "object"}}]
        body["tools"] = [{"type": "function", "function": tool} for tool in tools]
        named = {"type": "function", "function": {"name": asked.choice}}
        body["tool_choice"] = {None: "auto", "must": "required", "none": "none"}.get(asked.choice, named)
        if asked.one_at_a_time:
            body["parallel_tool_calls"] = False
    if asked.stop:
        body["stop"] = asked.stop
    if asked.schema:
        schema = {"name": "answer", "schema": SCHEMA, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if asked.thinks:
        body["reasoning_effort"] = "low"
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return heard_in_chunks(answer.text) if streams else heard_in_completion(answer.json())


def heard_in_completion(body: dict[str, Any]) -> Heard:
    [choice], usage = body["choices"], body["usage"]
    message = choice["message"]
    return Heard(
        text=message["content"] or "",
        calls=tuple(
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        ),
        thought=message.get("reasoning_content") or "",
        why=neutral(choice["finish_reason"], 0),
        cached=usage["prompt_tokens_details"]["cached_tokens"],
        written=usage["prompt_tokens_details"].get("cache_write_tokens", 0),
        said=usage["completion_tokens"],
    )


def heard_in_chunks(stream: str) -> Heard:
    assert stream.endswith("data: [DONE]\n\n")
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish, usage = None, None
    for line in stream.splitlines():
        if not line or line == "data: [DONE]":
            continue
        chunk = json.loads(line.removeprefix("data: "))
        usage = chunk["usage"] or usage
        for choice in chunk["choices"]:
            finish = choice["finish_reason"] or finish
            message["content"] += choice["delta"].get("content") or ""
            message["reasoning_content"] += choice["delta"].get("reasoning_content") or ""
            for piece in choice["delta"].get("tool_calls") or ():
                if "id" in piece:
                    assert piece["index"] == len(message["tool_calls"]) and piece["type"] == "function"
                    message["tool_calls"].append({"function": {"name": piece["function"]["name"], "arguments": ""}})
                message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return heard_in_completion({"choices": [{"message": message, "finish_reason": finish}], "usage": usage})


def ask_responses(client: httpx.Client, asked: Asked, model: str, streams: bool) -> Heard:
    """Ask as a response."""
    items: list[dict[str, Any]] = []
    for place, (role, words) in enumerate(asked.turns):
        items.append({"role": role, "content": words})
        if place == 0 and asked.image:
            url = f"data:image/png;base64,{asked.image}"
            items[-1]["content"] = [
                {"type": "input_text", "text": words},
                {"type": "input_image", "image_url": url, "detail": "auto"},
            ]
        if place == 0 and asked.calls:
            items += [
                {"type": "function_call", "call_id": f"call_{n}", "name": name, "arguments": json.dumps(given)}
                for n, (name, given) in enumerate(asked.calls)
            ]
            items += [
                {"type": "function_call_output", "call_id": f"call_{n}", "output": "fine"}
                for n in range(len(asked.calls))
            ]
    body: dict[str, Any] = {"model": model, "input": items, "max_output_tokens": asked.most, "stream": streams}
    if asked.system:
        body["instructions"] = asked.system
    if asked.tools:
        body["tools"] = [
            {"type": "function", "name": "weather", "parameters": SCHEMA},
            {"type": "function", "name": "clock", "parameters": {"type": "object"}},
        ]
        named = {"type": "function", "name": asked.choice}
        body["tool_choice"] = {None: "auto", "must": "required", "none": "none"}.get(asked.choice, named)
        if asked.one_at_a_time:
            body["parallel_tool_calls"] = False
    if asked.schema:
        body["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}
    if asked.thinks:
        body["reasoning"] = {"effort": "low"}
    answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    return heard_in_response(built_response(answer.text) if streams else answer.json())


def heard_in_response(response: dict[str, Any]) -> Heard:
    items, usage = response["output"], response["usage"]
    parts = [(item["type"], part) for item in items for part in item.get("content") or ()]
    calls = tuple((item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call")
    ended = {None: "tools" if calls else "stop", "max_output_tokens": "length", "content_filter": "withheld"}
    return Heard(
        text="".join(part["text"] for kind, part in parts if kind == "message"),
        calls=calls,
        thought="".join(part["text"] for kind, part in parts if kind == "reasoning"),
        why=ended[(response["incomplete_details"] or {}).get("reason")],
        cached=usage["input_tokens_details"]["cached_tokens"],
        written=usage["input_tokens_details"]["cache_write_tokens"],
        said=usage["output_tokens"],
    )


def ask_anthropic(client: httpx.Client, asked: Asked, model: str, streams: bool) -> Heard:
    """Ask in Anthropic's dialect."""
    turns: list[dict[str, Any]] = []
    for place, (role, words) in enumerate(asked.turns):
        content: list[dict[str, Any]] = [{"type": "text", "text": words}]
        if place == 0 and asked.image:
            source = {"type": "base64", "media_type": "image/png", "data": asked.image}
            content.append({"type": "image", "source": source})
        if place == 1 and asked.calls:
            made = [{"id": f"toolu_{n}", "name": name, "input": given} for n, (name, given) in enumerate(asked.calls)]
            turns.append({"role": "assistant", "content": [{"type": "tool_use", **call} for call in made]})
            results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "fine"} for call in made]
            content = [*results, *content]
        if turns and turns[-1]["role"] == role:  # this dialect's users may merge them or not; its judge does not
            turns[-1]["content"] += content
        else:
            turns.append({"role": role, "content": content})
    body: dict[str, Any] = {"model": model, "max_tokens": asked.most, "messages": turns, "stream": streams}
    if asked.system:
        body["system"] = asked.system
    if asked.tools:
        body["tools"] = [
            {"name": "weather", "input_schema": SCHEMA},
            {"name": "clock", "input_schema": {"type": "object"}},
        ]
        named = {"type": "tool", "name": asked.choice}
        kinds = {None: {"type": "auto"}, "must": {"type": "any"}, "none": {"type": "none"}}
        body["tool_choice"] = kinds.get(asked.choice, named)
        if asked.one_at_a_time:
            body["tool_choice"]["disable_parallel_tool_use"] = True
    if asked.stop:
        body["stop_sequences"] = [asked.stop]
    if asked.schema:
        body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    if asked.thinks:
        body |= {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}
    answer = client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    return heard_in_message(built_of(answer.text) if streams else answer.json())


def heard_in_message(message: dict[str, Any]) -> Heard:
    blocks = message["content"]
    return Heard(
        text="".join(block["text"] for block in blocks if block["type"] == "text"),
        calls=tuple((block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"),
        thought="".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        why=neutral(message["stop_reason"], 1),
        cached=message["usage"]["cache_read_input_tokens"],
        written=message["usage"]["cache_creation_input_tokens"],
        said=message["usage"]["output_tokens"],
    )


ASK = {"openai": ask_openai, "responses": ask_responses, "anthropic": ask_anthropic}


def neutral(word: str, dialect: int) -> str:
    return next(name for name, words in REASONS.items() if words[dialect] == word)
