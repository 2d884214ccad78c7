# What Anthropic's dialect makes of a chat request: each trap between the two dialects is a case.

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gateway.upstreams.anthropic.request import CACHED_FROM
from gateway.upstreams.anthropic.wire_format import AnthropicFormat
from gateway.upstreams.wire.errors import UpstreamRefused
from gateway.upstreams.wire.unsayable import Unsayable
from protocol.chat import (
    CacheControl,
    ChatRequest,
    Function,
    FunctionCall,
    ImagePart,
    ImageUrl,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    NamedTool,
    RedactedThinkingBlock,
    TextPart,
    ThinkingBlock,
    Tool,
    ToolCall,
)
from protocol.completions import CompletionRequest
from protocol.messages import MessagesRequest, Turn
from protocol.messages_to_chat import to_chat
from router.catalog.targets import Endpoint, Target
from tests.support.anthropic_rules import check_body
from tests.wire.traffic import TARGET, asking

HELLO = Message("user", "Hello")
WEATHER = Tool(Function("weather", "Tells the weather.", {"type": "object", "properties": {"city": {}}}))


def sent(*messages: Message, **more: Any) -> dict[str, Any]:
    """Return the body that goes out for a conversation."""
    request = ChatRequest(model="asked", messages=messages or (HELLO,), **more)
    return json.loads(AnthropicFormat().build_request(asking(request)).body)


def said(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


def call(ident: str, arguments: str = "{}") -> ToolCall:
    return ToolCall(ident, FunctionCall("weather", arguments))


def test_headers_are_anthropics() -> None:
    """The key travels as x-api-key, with the version that we speak."""
    built = AnthropicFormat().build_request(asking())

    assert built.url.endswith("/v1/messages") and "authorization" not in built.headers
    assert (built.headers["x-api-key"], built.headers["anthropic-version"]) == ("sk-house", "2023-06-01")


def test_instructions_are_hoisted_from_wherever_they_stand() -> None:
    """This dialect has one place for system and developer messages: the top."""
    body = sent(Message("system", "Be brief."), HELLO, Message("developer", "Be kind."))

    assert body["system"] == [*said("Be brief."), *said("Be kind.")]
    assert body["messages"] == [{"role": "user", "content": said("Hello")}]


def test_roles_alternate() -> None:
    """Neighbours of one role become one turn, and the user begins."""
    body = sent(Message("assistant", "Hi."), HELLO, Message("user", "World"), Message("assistant", "Yes?"))

    assert [turn["role"] for turn in body["messages"]] == ["user", "assistant", "user", "assistant"]
    assert body["messages"][2]["content"] == [*said("Hello"), *said("World")]


def test_blank_text_is_left_out() -> None:
    """A block without a word would be refused."""
    body = sent(HELLO, Message("assistant", ""), Message("user", (TextPart(""), TextPart(" \n"), TextPart("Well?"))))

    assert body["messages"] == [{"role": "user", "content": [*said("Hello"), *said("Well?")]}]


def test_reply_to_go_on_with_ends_without_white_space() -> None:
    """A prefill that ends in white space would be refused."""
    assert sent(HELLO, Message("assistant", "The answer is \n"))["messages"][-1]["content"] == said("The answer is")
    assert [turn["role"] for turn in sent(HELLO, Message("assistant", " "))["messages"]] == ["user"]


def test_results_of_parallel_calls_are_one_turn_with_the_results_first() -> None:
    """Every call is answered in the very next turn, before anything else is said there."""
    body = sent(
        HELLO,
        Message("assistant", tool_calls=(call("a", '{"city": "Bern"}'), call("b"))),
        Message("tool", "sunny", tool_call_id="a"),
        Message("user", "Hurry!"),
        Message("tool", "", tool_call_id="b"),
    )

    assert body["messages"][1]["content"] == [
        {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Bern"}},
        {"type": "tool_use", "id": "b", "name": "weather", "input": {}},
    ]
    assert body["messages"][2] == {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": said("sunny")},
            {"type": "tool_result", "tool_use_id": "b"},
            *said("Hurry!"),
        ],
    }


def test_thinking_goes_back_before_what_was_said() -> None:
    """Verbatim, where it is signed or withheld; a turn of thinking alone would be refused, and so would an unsigned."""
    thought, hidden, foreign = ThinkingBlock("Hm.", "EqQB"), RedactedThinkingBlock("Ej0K"), ThinkingBlock("Aha.")
    said_then = Message("assistant", "Yes?", tool_calls=(call("a"),), thinking_blocks=(thought, foreign, hidden))
    body = sent(HELLO, said_then, Message("tool", "fine", tool_call_id="a"))

    assert body["messages"][1]["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": "EqQB"},
        {"type": "redacted_thinking", "data": "Ej0K"},
        *said("Yes?"),
        {"type": "tool_use", "id": "a", "name": "weather", "input": {}},
    ]
    assert len(sent(HELLO, Message("assistant", "", thinking_blocks=(thought,)), HELLO)["messages"]) == 1


def test_marks_of_the_caller_stand_in_place_of_ours() -> None:
    """Whoever says where a stable prefix ends knows better."""
    long, mark = "x" * CACHED_FROM, CacheControl("ephemeral")
    body = sent(Message("system", (TextPart(long, mark), TextPart("Be brief."))), HELLO)

    assert body["system"] == [
        {"type": "text", "text": long, "cache_control": {"type": "ephemeral"}},
        *said("Be brief."),
    ]


@pytest.mark.parametrize("arguments", ["{", "[]", "3", '"x"'])
def test_arguments_that_are_no_object_are_the_callers_fault(arguments: str) -> None:
    """OpenAI has a text there and takes anything; this dialect needs an object."""
    with pytest.raises(UpstreamRefused) as caught:
        sent(HELLO, Message("assistant", tool_calls=(call("a", arguments),)))

    assert (caught.value.status, caught.value.moves_on, caught.value.param) == (400, False, "messages")


def test_tools_and_their_choice() -> None:
    """Parameters become the input schema; the words for the choice differ."""
    bare = Tool(Function("clock"))

    def chosen(choice: Any, **more: Any) -> Any:
        return sent(tools=(WEATHER, bare), tool_choice=choice, **more).get("tool_choice")

    assert sent(tools=(WEATHER, bare))["tools"] == [
        {
            "name": "weather",
            "input_schema": {"type": "object", "properties": {"city": {}}},
            "description": "Tells the weather.",
        },
        {"name": "clock", "input_schema": {"type": "object", "properties": {}}},
    ]
    assert (chosen(None), chosen("auto"), chosen("none")) == (None, None, {"type": "none"})
    assert chosen("required", parallel_tool_calls=False) == {"type": "any", "disable_parallel_tool_use": True}
    assert chosen(NamedTool(NamedFunction("clock"))) == {"type": "tool", "name": "clock"}
    assert chosen(None, parallel_tool_calls=False) == {"type": "auto", "disable_parallel_tool_use": True}


def test_images_are_data_or_https() -> None:
    """A data URL is unpacked; an address is passed on for the upstream to fetch; nothing else is let through."""
    image = Message("user", (ImagePart(ImageUrl("data:image/PNG;base64,iVBO")), ImagePart(ImageUrl("https://a/b.png"))))

    assert [block["source"] for block in sent(image)["messages"][0]["content"]] == [
        {"type": "base64", "media_type": "image/png", "data": "iVBO"},
        {"type": "url", "url": "https://a/b.png"},
    ]
    for url in ("http://a/b.png", "file:///etc/passwd", "data:text/html;base64,PGI+", "data:image/png,raw"):
        with pytest.raises(UpstreamRefused):
            sent(Message("user", (ImagePart(ImageUrl(url)),)))


def test_limits_and_sampling() -> None:
    """An output limit is always sent; temperature ends at 1; a top_p of 1 says nothing."""
    assert sent()["max_tokens"] == 4096
    assert sent(max_tokens=7)["max_tokens"] == sent(max_completion_tokens=7)["max_tokens"] == 7
    assert [sent(temperature=value)["temperature"] for value in (0, 0.5, 2)] == [0, 0.5, 1.0]
    assert "top_p" not in sent(top_p=1) and sent(top_p=0.5)["top_p"] == 0.5
    assert sent(stop="END")["stop_sequences"] == ["END"] and sent(stop=("a", "b"))["stop_sequences"] == ["a", "b"]
    assert sent(user="u1")["metadata"] == {"user_id": "u1"}
    assert len(sent(user="u" * 300)["metadata"]["user_id"]) == 64  # a digest: 256 characters are the most


def test_effort_and_schema() -> None:
    """How hard to think and what to answer in have a place of their own."""
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
    body = sent(reasoning_effort="high", response_format=JsonSchemaFormat(JsonSchema("a", schema)))

    assert body["thinking"] == {"type": "adaptive"}
    assert body["output_config"] == {"effort": "high", "format": {"type": "json_schema", "schema": schema}}
    assert sent(reasoning_effort="none")["thinking"] == {"type": "disabled"}
    assert "thinking" not in sent() and "output_config" not in sent()


# As pydantic writes a model with bounds, a choice, and another model in it.
BOUNDED: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$defs": {"Town": {"type": "object", "title": "Town", "properties": {"name": {"type": "string", "minLength": 1}}}},
    "type": "object",
    "properties": {
        "age": {"type": "integer", "description": "In years.", "minimum": 0, "maximum": 120},
        "town": {"$ref": "#/$defs/Town", "description": "Where."},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"}, "minItems": 2, "maxItems": 3},
        "sign": {"oneOf": [{"const": "a"}, {"enum": ["b", None]}], "default": "a"},
        "seen": {"type": "string", "format": "date-time"},
        "code": {"type": "string", "format": "isbn"},
    },
    "required": ["age", "town"],
}
BOUND: dict[str, Any] = {
    "$defs": {
        "Town": {
            "type": "object",
            "title": "Town",
            "properties": {"name": {"type": "string", "description": "(minLength: 1)"}},
            "additionalProperties": False,
        }
    },
    "type": "object",
    "properties": {
        "age": {"type": "integer", "description": "In years. (minimum: 0, maximum: 120)"},
        "town": {"$ref": "#/$defs/Town"},
        "tags": {
            "type": "array",
            "items": {"type": "string", "description": "(pattern: ^[a-z]+$)"},
            "description": "(minItems: 2, maxItems: 3)",
        },
        "sign": {"anyOf": [{"const": "a"}, {"enum": ["b", None]}], "default": "a"},
        "seen": {"type": "string", "format": "date-time"},
        "code": {"type": "string", "description": "(format: isbn)"},
    },
    "required": ["age", "town"],
    "additionalProperties": False,
}


def test_bounds_that_are_not_binding_are_told_in_words() -> None:
    """Claude refuses them in a schema that it is held to; a tool that is not strict keeps its own."""
    form = JsonSchemaFormat(JsonSchema("a", BOUNDED, strict=True))
    strict, loose = Tool(Function("f", None, BOUNDED, strict=True)), Tool(Function("g", None, BOUNDED))
    body = sent(response_format=form, tools=(strict, loose))
    check_body(json.dumps(body).encode())

    assert body["output_config"]["format"]["schema"] == BOUND
    assert [tool["input_schema"] for tool in body["tools"]] == [BOUND, BOUNDED]


OPEN = [
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"any": {"type": "object"}}},
    {"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, {"type": ["object", "null"]}]}}},
]


@pytest.mark.parametrize("schema", OPEN, ids=json.dumps)
def test_an_object_that_must_be_open_stays_so(schema: dict[str, Any]) -> None:
    """Closed, it would always be empty: the answer is the input of a tool then, and a tool is not held to its own.
    A model that cannot be made to call one refuses it by its name."""
    form = JsonSchemaFormat(JsonSchema("a", schema))
    body = sent(response_format=form)
    built = AnthropicFormat().build_request(
        asking(ChatRequest(model="asked", messages=(HELLO,), tools=(Tool(Function("f", None, schema, strict=True)),)))
    )
    newest = replace(TARGET, model=replace(TARGET.model, upstream_model="claude-opus-5-5"))
    with pytest.raises(Unsayable) as caught:
        AnthropicFormat().build_request(
            asking(ChatRequest(model="asked", messages=(HELLO,), response_format=form), target=newest)
        )

    assert "output_config" not in body and body["tools"][0]["input_schema"] == schema
    assert json.loads(built.body)["tools"] == [{"name": "f", "input_schema": schema}]
    assert built.dropped == ("tools.function.strict",) and caught.value.param == "response_format"


def test_an_object_that_may_be_null_is_closed_as_well() -> None:
    """Claude refuses an open one whatever stands beside it."""
    inner = {"type": ["object", "null"], "properties": {"b": {"type": "string"}}}
    form = JsonSchemaFormat(JsonSchema("a", {"type": "object", "properties": {"a": inner}}))
    schema = sent(response_format=form)["output_config"]["format"]["schema"]

    assert schema["properties"]["a"] == inner | {"additionalProperties": False}


def test_a_tool_takes_an_object_whether_or_not_its_schema_says_so() -> None:
    """OpenAI takes a schema without a type, which Claude refuses."""
    (tool,) = sent(tools=(Tool(Function("f", None, {"properties": {"a": {}}})),))["tools"]

    assert tool["input_schema"] == {"type": "object", "properties": {"a": {}}}


def test_calls_that_are_numbered_anew_in_every_turn_keep_their_results() -> None:
    """Some services do so, or give a call no id; Claude takes each id once."""

    def turns(*idents: str) -> list[Message]:
        results = [Message("tool", f"of {ident}", tool_call_id=ident) for ident in idents]
        return [Message("assistant", tool_calls=tuple(map(call, idents))), *results]

    body = sent(HELLO, *turns("call_0", "call_1"), HELLO, *turns("call_0"), *turns("", ""))
    check_body(json.dumps(body).encode())
    blocks = [block for turn in body["messages"] for block in turn["content"]]
    made = [block["id"] for block in blocks if block["type"] == "tool_use"]

    assert made[:2] == ["call_0", "call_1"] and len(set(made)) == 5
    assert [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"] == made


def test_blank_text_of_anthropics_own_clients_is_left_out() -> None:
    """Wherever it stands: as instructions, as a turn, and in the result of a tool."""
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": " "}], "is_error": True}
    turns = [
        {"role": "user", "content": " \n"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": [{"type": "text", "text": ""}, use]},
        {"role": "user", "content": [result | {"content": "  "}]},
    ]
    for inner in (result, result | {"content": "  "}):
        turns[-1]["content"] = [inner]
        asked = {"model": "m", "max_tokens": 9, "messages": turns, "system": [{"type": "text", "text": ""}]}
        native = msgspec.convert(asked, MessagesRequest)
        body = check_body(AnthropicFormat().build_request(asking(to_chat(native), native=native)).body)

        assert "system" not in body and [turn["role"] for turn in body["messages"]] == ["user", "assistant", "user"]
        assert body["messages"][1]["content"] == [use]
        assert body["messages"][2]["content"] == [{"type": "tool_result", "tool_use_id": "a", "is_error": True}]


def test_how_closely_to_look_at_an_image_is_told_to_be_left_out() -> None:
    """Claude looks at all of them alike."""
    image = Message("user", (ImagePart(ImageUrl("https://a/b.png", "low")),))
    built = AnthropicFormat().build_request(asking(ChatRequest(model="asked", messages=(image,))))

    assert built.dropped == ("messages.content.image_url.detail",)


@pytest.mark.parametrize("native", [None, MessagesRequest(model="m", max_tokens=9, messages=(Turn("user", "Hi"),))])
def test_fields_beside_a_chat_fit_the_model_too(native: MessagesRequest | None) -> None:
    """What a provider may be sent beyond our own fields is no way past what its model refuses."""
    request = ChatRequest(model="asked", messages=(HELLO,), max_tokens=9)
    newest = replace(TARGET, model=replace(TARGET.model, upstream_model="claude-opus-4-7"))
    asked = asking(request, native=native, target=newest, extra={"top_k": 5, "thinking": {"type": "adaptive"}})
    built = AnthropicFormat().build_request(asked)
    body = check_body(built.body)

    assert built.dropped == ("top_k",) and "top_k" not in body and body["thinking"] == {"type": "adaptive"}


@pytest.mark.parametrize(
    "asked",
    [
        {"n": 2},
        {"logprobs": True},
        {"logit_bias": {"1": -100}},
        {"stop": " \n"},
    ],
    ids=str,
)
def test_what_cannot_be_said_is_refused_by_name(asked: dict[str, Any]) -> None:
    """What changes the meaning of a request; another target of the route may know the parameter."""
    with pytest.raises(Unsayable) as caught:
        sent(**asked)

    assert (caught.value.status, caught.value.code, caught.value.moves_on) == (400, "unsupported_parameter", True)
    assert caught.value.param == next(iter(asked))


def test_only_chats_are_known() -> None:
    """There is no completion and no embedding in this dialect."""
    with pytest.raises(Unsayable):
        AnthropicFormat().build_request(asking(CompletionRequest(model="m", prompt="Once")))


def test_harmless_values_are_no_obstacle() -> None:
    """What clients send without meaning anything by it does not refuse the call."""
    assert sent(n=1, logprobs=False, presence_penalty=0, frequency_penalty=0.0, logit_bias={"1": 0})["messages"]


def test_stable_prefixes_are_marked_for_the_cache() -> None:
    """Long instructions and conversations that go on are cached; a short or a first question is not."""
    long = "x" * CACHED_FROM
    marked = {"type": "ephemeral"}

    def marks(body: dict[str, Any]) -> list[str]:
        blocks = [("tools", block) for block in body.get("tools", ())]
        blocks += [("system", block) for block in body.get("system", ())]
        blocks += [("turns", block) for turn in body["messages"] for block in turn["content"]]
        assert all(block.get("cache_control") in (None, marked) for _, block in blocks)
        return [where for where, block in blocks if "cache_control" in block]

    assert marks(sent(Message("system", "short"), HELLO)) == []
    assert marks(sent(Message("user", long))) == []
    assert marks(sent(Message("system", long), HELLO)) == ["system"]
    assert marks(sent(HELLO, tools=(Tool(replace(WEATHER.function, description=long)),))) == ["tools"]
    assert marks(sent(Message("user", long), Message("assistant", "Yes?"), HELLO)) == ["turns"]


def test_json_without_a_schema_is_the_input_of_a_tool() -> None:
    """Structured outputs need a schema with closed objects: the model is made to call a tool that takes any object."""
    bare = JsonObjectFormat()
    body = sent(response_format=bare)
    (tool,) = body["tools"]

    assert (tool["name"], tool["input_schema"]) == ("json_answer", {"type": "object"})
    assert body["tool_choice"] == {"type": "tool", "name": "json_answer", "disable_parallel_tool_use": True}
    assert sent(response_format=JsonSchemaFormat(JsonSchema("a")))["tools"] == [tool]
    check_body(json.dumps(body).encode())


def test_json_beside_the_callers_tools() -> None:
    """The model calls one of them or answers; where it must call one, or none, nothing else is to be said."""
    bare, own = JsonObjectFormat(), Tool(Function("json_answer"))

    def asked(tool: Tool, choice: Any) -> tuple[list[str], Any]:
        body = sent(response_format=bare, tools=(tool,), tool_choice=choice)
        return [tool["name"] for tool in body["tools"]], body.get("tool_choice")

    alone = {"type": "tool", "name": "json_answer", "disable_parallel_tool_use": True}
    assert asked(WEATHER, "auto") == (["weather", "json_answer"], {"type": "any"})
    assert asked(WEATHER, "none") == (["weather", "json_answer"], alone)
    assert asked(WEATHER, "required") == (["weather"], {"type": "any"})
    assert asked(own, None) == (["json_answer", "json_answer_"], {"type": "any"})


def test_a_name_that_claude_does_not_take_goes_out_in_a_safe_form() -> None:
    """In the tool, its choice and its calls; the ids of calls that another service made, too."""
    name, ident = "städte.wetter", "functions.wetter:0"
    body = sent(
        HELLO,
        Message("assistant", tool_calls=(ToolCall(ident, FunctionCall(name, "{}")),)),
        Message("tool", "sunny", tool_call_id=ident),
        tools=(Tool(Function(name)), Tool(Function("städte_wetter")), WEATHER),
        tool_choice=NamedTool(NamedFunction(name)),
    )
    called, answered = body["messages"][1]["content"][0], body["messages"][2]["content"][0]
    check_body(json.dumps(body).encode())

    assert body["tools"][2]["name"] == "weather" and len({tool["name"] for tool in body["tools"]}) == 3
    assert body["tools"][0]["name"] == body["tool_choice"]["name"] == called["name"] != name
    assert called["id"] == answered["tool_use_id"] != ident


@pytest.mark.parametrize(("streams", "method"), [(False, "rawPredict"), (True, "streamRawPredict")])
def test_vertex_has_the_model_in_the_path_and_the_version_in_the_body(streams: bool, method: str) -> None:
    """Everything else is a message's request; a token takes the key's place. A mark of the whole request, which only
    Anthropic's own API sets by itself, is its last block's."""
    base_url = (
        "https://europe-west1-aiplatform.googleapis.com/v1/projects/p/locations/europe-west1/publishers/anthropic"
    )
    target = Target(replace(TARGET.model, upstream_model="claude-sonnet-4-5@20250929"), Endpoint("eu", base_url))
    built = AnthropicFormat().build_request(asking(target=target, token="ya29", api_key=None, streams=streams))
    body, mark = json.loads(built.body), {"type": "ephemeral"}
    said = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], "cache_control": mark}
    native = msgspec.convert(said, MessagesRequest)
    whole = AnthropicFormat().build_request(asking(to_chat(native), target=target, native=native, token="ya29"))
    cached = json.loads(whole.body)

    assert built.url == f"{base_url}/models/claude-sonnet-4-5@20250929:{method}"
    assert "cache_control" not in cached
    assert cached["messages"][0]["content"] == [{"type": "text", "text": "Hi", "cache_control": mark}]
    assert built.headers["authorization"] == "Bearer ya29"
    assert not built.headers.keys() & {"x-api-key", "anthropic-version"}
    assert body.pop("anthropic_version") == "vertex-2023-10-16" and "model" not in body
    check_body(json.dumps(body | {"model": "claude-sonnet-4-5-20250929"}).encode())
