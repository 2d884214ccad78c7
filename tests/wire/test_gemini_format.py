# How we ask in Gemini's format, judged by the scripted upstream's own rules, and what is peculiar to it.

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.upstreams.anthropic.wire_format import AnthropicFormat
from gateway.upstreams.gemini.wire_format import GeminiFormat
from gateway.upstreams.wire.errors import UpstreamBusy, UpstreamError, UpstreamRefused, UpstreamUnable
from protocol.chat import (
    CacheControl,
    ChatReply,
    ChatRequest,
    FilePart,
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
    PdfFile,
    TextPart,
    ThinkingBlock,
    Tool,
    ToolCall,
)
from protocol.completions import CompletionRequest
from protocol.embeddings import EmbeddingRequest
from protocol.events import Delta
from router.catalog.targets import Endpoint, Target
from tests.support.gemini_rules import UNSIGNED, check_body, check_embeds, check_headers
from tests.wire.gemini_traffic import CALL, THOUGHT, TOOLS, body, failure, piece, retry
from tests.wire.traffic import CHAT, TARGET, asking, read_stream

PNG = "data:image/png;base64,AA=="
PLACE = Endpoint("any", "https://generativelanguage.googleapis.com/v1beta")
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
schema = {"type": "object", "properties": {"city": {"type": "string", "minLength": 2}}}
tool = Tool(Function("weather", "Looks out of the window.", schema, strict=True))
turns = st.lists(
    st.one_of(
        words.map(lambda said: (Message("system", said),)),
        words.map(lambda said: (Message("user", said),)),
        words.map(lambda said: (Message("assistant", said),)),
        words.map(lambda said: (Message("user", (TextPart(said), ImagePart(ImageUrl(PNG)))),)),
        words.map(
            lambda said: (
                Message("assistant", said, tool_calls=(ToolCall("call_1", FunctionCall("weather", "{}")),)),
                Message("tool", said, tool_call_id="call_1"),
            )
        ),
    ),
    min_size=1,
    max_size=6,
).map(lambda some: tuple(message for turn in some for message in turn))


def target(model: str) -> Target:
    return Target(replace(TARGET.model, upstream_model=model), PLACE)


def asked(request: ChatRequest, model: str = "gemini-3-flash", **more: Any) -> dict[str, Any]:
    """Return the body that goes out, once the judge has passed it."""
    built = GeminiFormat().build_request(asking(request, target=target(model), **more))
    check_headers({name.lower(): value for name, value in built.headers.items()})
    return check_body(built.body, model)


def chat(*messages: Message, **more: Any) -> ChatRequest:
    return ChatRequest(model="m", messages=messages or (Message("user", "Hi"),), **more)


@given(messages=turns, with_tools=st.booleans())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("model", ["gemini-2.5-flash", "gemini-3-pro-preview"])
def test_any_conversation_is_one_that_gemini_takes(model: str, messages: tuple[Message, ...], with_tools: bool) -> None:
    """Turns alternate, results follow their calls, nothing is empty, calls are signed where they must be."""
    asked(chat(*messages, tools=(tool,) if with_tools else None, temperature=1.5, stop="x", seed=7), model)


def test_a_key_is_in_a_header_and_never_in_a_url() -> None:
    """A URL stands in logs on its way; a token takes the key's place."""
    for streams, method in ((False, "generateContent"), (True, "streamGenerateContent?alt=sse")):
        built = GeminiFormat().build_request(asking(target=target("models/gemini-3-flash"), streams=streams))

        assert built.url == f"{PLACE.base_url}/models/gemini-3-flash:{method}"
        assert built.headers["x-goog-api-key"] == "sk-house" and "sk-house" not in built.url
    built = GeminiFormat().build_request(asking(target=target("m"), token="sk-token", api_key=None))
    assert built.headers["authorization"] == "Bearer sk-token" and "x-goog-api-key" not in built.headers


def test_vertex_is_another_place_with_a_token() -> None:
    """Its base URL ends in the publisher; the judge knows no difference."""
    base_url = "https://europe-west4-aiplatform.googleapis.com/v1/projects/p/locations/europe-west4/publishers/google"
    place = Target(replace(TARGET.model, upstream_model="gemini-3-flash"), Endpoint("eu", base_url))
    built = GeminiFormat().build_request(asking(target=place, token="sk-token", api_key=None, streams=True))

    assert built.url == f"{base_url}/models/gemini-3-flash:streamGenerateContent?alt=sse"
    check_headers({name.lower(): value for name, value in built.headers.items()})
    check_body(built.body, "gemini-3-flash")


@pytest.mark.parametrize(
    ("model", "effort", "thinking", "dropped"),
    [
        ("gemini-2.5-flash", "low", {"thinkingBudget": 1024, "includeThoughts": True}, []),
        ("gemini-2.5-flash", "xhigh", {"thinkingBudget": 24576, "includeThoughts": True}, []),
        ("gemini-2.5-flash", "none", {"thinkingBudget": 0}, []),
        ("gemini-2.5-pro", "none", {"thinkingBudget": 128}, ["reasoning_effort"]),
        ("gemini-2.5-flash-lite", "none", {"thinkingBudget": 0}, []),
        ("gemini-3-pro-preview", "minimal", {"thinkingLevel": "low", "includeThoughts": True}, []),
        ("gemini-3-pro-preview", "medium", {"thinkingLevel": "high", "includeThoughts": True}, []),
        ("gemini-3.1-pro-preview", "medium", {"thinkingLevel": "medium", "includeThoughts": True}, []),
        ("gemini-3-flash-preview", "minimal", {"thinkingLevel": "minimal", "includeThoughts": True}, []),
        ("gemini-flash-latest", "none", {"thinkingLevel": "minimal"}, ["reasoning_effort"]),
        ("gemini-2.0-flash", "high", None, ["reasoning_effort"]),
        ("gemma-3-27b-it", "none", None, []),
        ("gemini-3-flash", None, None, []),
    ],
)
def test_each_generation_is_asked_to_think_in_its_way(
    model: str, effort: Any, thinking: dict[str, Any] | None, dropped: list[str]
) -> None:
    """By a budget up to 2.5, by a level from 3 on; what cannot be done is told."""
    request = chat(reasoning_effort=effort, max_tokens=50_000)
    built = GeminiFormat().build_request(asking(request, target=target(model)))

    assert check_body(built.body, model)["generationConfig"].get("thinkingConfig") == thinking
    assert [*built.dropped] == dropped


@pytest.mark.parametrize(
    ("model", "budget"), [("gemini-2.5-flash", 80), ("gemini-2.5-pro", 128), ("gemini-2.5-flash-lite", 512)]
)
def test_a_budget_leaves_room_for_the_answer(model: str, budget: int) -> None:
    """Four fifths of the limit, and no less than the model takes: else all of a short answer would be thoughts."""
    told = asked(chat(reasoning_effort="high", max_tokens=100), model)

    assert told["generationConfig"]["thinkingConfig"]["thinkingBudget"] == budget


def test_vectors_are_asked_for_all_at_once() -> None:
    """At Gemini's own API; Vertex AI has another one for them."""
    request = EmbeddingRequest(model="m", input=["a", "b"], dimensions=3, user="u")
    built = GeminiFormat().build_request(asking(request, target=target("gemini-embedding-001")))
    vertex = Endpoint("eu", "https://x-aiplatform.googleapis.com/v1/projects/p/locations/x/publishers/google")

    assert built.url == f"{PLACE.base_url}/models/gemini-embedding-001:batchEmbedContents"
    assert [one["outputDimensionality"] for one in check_embeds(built.body)["requests"]] == [3, 3]
    assert built.dropped == ("user",)
    with pytest.raises(UpstreamUnable):
        GeminiFormat().build_request(asking(request, target=Target(TARGET.model, vertex)))
    for said in (b'{"embeddings":[]}', b'{"embeddings":[{"values":[]},{"values":[1]}]}', b"{}"):
        with pytest.raises(UpstreamError):
            GeminiFormat().read_reply(request, said)


def test_fields_of_geminis_own_go_where_they_are_allowed() -> None:
    """As `allow_fields` has them, beside what the gateway says."""
    settings_ = [{"category": "HARM_CATEGORY_HATE_SPEECH", "threshold": "BLOCK_NONE"}]

    assert asked(chat(), extra={"safetySettings": settings_})["safetySettings"] == settings_


def test_a_signature_comes_back_where_it_was() -> None:
    """A call's signature is told as that of a thought, and stands at the first call again when the results come."""
    reply, _ = GeminiFormat().read_reply(TOOLS, body(THOUGHT, CALL))
    assert isinstance(reply, ChatReply)
    said = reply.choices[0].message
    events, _ = read_stream(GeminiFormat().open_events(TOOLS), [piece(THOUGHT), piece(CALL, finish="STOP")])
    [signed] = [event for event in events if isinstance(event, Delta) and event.signature]

    assert [(one.text, one.signature) for one in said.reasoning] == [("Hm.", "gemini:EqQB")]
    assert signed.signature == "gemini:EqQB"
    thought = ThinkingBlock("Hm.", "gemini:EqQB")
    calls = (*(said.tool_calls or ()), ToolCall("b", FunctionCall("clock", "{}")))
    told = chat(
        Message("user", "?"),
        Message("assistant", tool_calls=calls, thinking_blocks=(ThinkingBlock("x", "EqQB"), thought)),
        Message("tool", "fine", tool_call_id="fc-1"),
        Message("tool", "noon", tool_call_id="b"),
    )
    built = GeminiFormat().build_request(asking(told, target=target("gemini-3-flash")))
    _, turn, results = json.loads(built.body)["contents"]
    assert [part.get("thoughtSignature") for part in turn["parts"]] == ["EqQB", None]
    assert results["parts"][0]["functionResponse"] == {"id": "fc-1", "name": "weather", "response": {"output": "fine"}}
    assert built.dropped == ()


def test_no_maker_is_shown_a_thought_of_another() -> None:
    """Claude would refuse Gemini's signatures, Gemini those of Claude: each call goes without, and is told."""
    call = (ToolCall("a", FunctionCall("weather", "{}")),)
    for signature, answers in (("gemini:EqQB", AnthropicFormat()), ("EqQB", GeminiFormat())):
        told = chat(
            Message("user", "?"),
            Message("assistant", tool_calls=call, thinking_blocks=(ThinkingBlock("x", signature),)),
            Message("tool", "fine", tool_call_id="a"),
        )
        built = answers.build_request(asking(told, target=target("gemini-3-flash")))

        assert b"EqQB" not in built.body
    assert UNSIGNED.encode() in built.body and built.dropped == ("thinking_blocks",)


def test_a_schema_loses_nothing() -> None:
    """What Gemini does not know is told in words; constants are enums, one of several is any of them."""
    given = {
        "$schema": "x",
        "type": "object",
        "properties": {
            "kind": {"const": "a"},
            "name": {"type": "string", "pattern": "^a", "description": "A name."},
            "more": {"oneOf": [{"type": "null"}, {"$ref": "#/definitions/more"}]},
            "list": {"type": "array", "items": {"type": "integer", "multipleOf": 2}, "uniqueItems": True},
        },
        "definitions": {"more": {"type": "object", "properties": {"a": {"type": "string", "default": "x"}}}},
        "required": ["kind"],
        "additionalProperties": False,
    }
    form = JsonSchemaFormat(JsonSchema("answer", given, strict=True))
    config = asked(chat(response_format=form))["generationConfig"]

    assert config["responseMimeType"] == "application/json"
    assert config["responseJsonSchema"] == {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a"]},
            "name": {"type": "string", "description": "A name. (pattern: ^a)"},
            "more": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/more"}]},
            "list": {
                "type": "array",
                "items": {"type": "integer", "description": "(multipleOf: 2)"},
                "description": "(uniqueItems: true)",
            },
        },
        "$defs": {"more": {"type": "object", "properties": {"a": {"type": "string"}}}},
        "required": ["kind"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("choice", "calling"),
    [
        (None, {"mode": "AUTO"}),
        ("none", {"mode": "NONE"}),
        ("required", {"mode": "ANY"}),
        (NamedTool(NamedFunction("weather")), {"mode": "ANY", "allowedFunctionNames": ["weather"]}),
    ],
)
def test_tools_are_functions(choice: Any, calling: dict[str, Any]) -> None:
    """Their schemas bind; one without a value in it goes without a schema, which Gemini would refuse."""
    empty = Tool(Function("clock", None, {"type": "object", "properties": {}, "additionalProperties": False}))
    told = asked(chat(tools=(tool, empty), tool_choice=choice))

    weather, clock = told["tools"][0]["functionDeclarations"]
    assert weather["parametersJsonSchema"]["properties"]["city"]["description"] == "(minLength: 2)"
    assert clock == {"name": "clock", "description": "clock"}
    assert told["toolConfig"] == {"functionCallingConfig": calling}


UNSAYABLE: list[tuple[Any, str, str]] = [
    (chat(n=2), "n", "gemini-3-flash"),
    (chat(logprobs=True), "logprobs", "gemini-3-flash"),
    (chat(logit_bias={"1": -100}), "logit_bias", "gemini-3-flash"),
    (chat(tools=(tool,), response_format=JsonObjectFormat()), "response_format", "gemini-2.5-pro"),
    (chat(Message("user", (ImagePart(ImageUrl("https://a/b.png")),))), "messages", "gemini-2.0-flash"),
    (CompletionRequest(model="m", prompt="Once"), "model", "gemini-3-flash"),
    (EmbeddingRequest(model="m", input=[1, 2]), "input", "gemini-embedding-001"),
]


@pytest.mark.parametrize(("request_", "param", "model"), UNSAYABLE, ids=lambda value: str(value)[:20])
def test_what_cannot_be_said_is_refused_by_name(request_: Any, param: str, model: str) -> None:
    """Another model of the route may know it."""
    with pytest.raises(UpstreamUnable) as raised:
        GeminiFormat().build_request(asking(request_, target=target(model)))

    assert (raised.value.param, raised.value.moves_on) == (param, True)


@pytest.mark.parametrize(
    "message",
    [
        Message("user", (ImagePart(ImageUrl("data:image/png,AA")),)),
        Message("user", (ImagePart(ImageUrl("data:application/pdf;base64,AA==")),)),  # held as one picture
        Message("assistant", tool_calls=(ToolCall("a", FunctionCall("f", "[1]")),)),
    ],
)
def test_what_no_model_would_take_is_the_callers(message: Message) -> None:
    """No other target is asked."""
    with pytest.raises(UpstreamRefused) as raised:
        GeminiFormat().build_request(asking(chat(message), target=target("gemini-3-flash")))

    assert not raised.value.moves_on


def test_what_changes_nothing_is_left_out_and_told() -> None:
    """Whatever this API lacks, by the caller's names."""
    marked = Message("user", (TextPart("Hi", cache_control=CacheControl("ephemeral")),), name="ann")
    request = chat(marked, presence_penalty=1.0, user="u", verbosity="low", logit_bias={"1": 5.0})
    built = GeminiFormat().build_request(asking(request, target=target("gemini-3-flash"), left_out=("x",)))

    check_body(built.body, "gemini-3-flash")
    assert {*built.dropped} == {
        *("x", "presence_penalty", "user", "verbosity", "logit_bias", "messages.name", "cache_control")
    }


def test_how_long_to_wait_stands_in_the_error() -> None:
    """Google says it in the body; a header goes first."""
    status, said = failure(429, "RESOURCE_EXHAUSTED", "Quota", retry("34.07s"))
    for headers, wait in (({}, 34.07), ({"retry-after": "2"}, 2.0)):
        error = GeminiFormat().read_error(status, headers, said)

        assert isinstance(error, UpstreamBusy) and error.retry_after == wait
    assert GeminiFormat().read_error(*_plain(failure(429, "x", "y", retry("soon")))).retry_after is None


def _plain(failed: tuple[int, bytes]) -> tuple[int, dict[str, str], bytes]:
    return failed[0], {}, failed[1]


def test_thinking_is_told_apart_from_words() -> None:
    """Thoughts come as reasoning, whole and streamed."""
    reply, _ = GeminiFormat().read_reply(CHAT, body(THOUGHT, {"text": "Yes."}))
    events, _ = read_stream(GeminiFormat().open_events(CHAT), [piece(THOUGHT), piece({"text": "Yes."}, finish="STOP")])

    assert isinstance(reply, ChatReply)
    assert (reply.choices[0].message.reasoning_content, reply.choices[0].message.content) == ("Hm.", "Yes.")
    assert [event.reasoning or event.text for event in events if isinstance(event, Delta)][:2] == ["Hm.", "Yes."]


def of_file(url: str, kind: str) -> ChatRequest:
    part = FilePart(PdfFile(url)) if kind == "application/pdf" else ImagePart(ImageUrl(url))
    return chat(Message("user", (part, TextPart("Hi"))))


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("https://a.example/b.PNG?c=d.e", "image/png"),
        ("https://a.example:8443/b", "image/jpeg"),
        ("https://a.example/b.png", "application/pdf"),
    ],
)
def test_a_file_that_lies_elsewhere_is_fetched_by_gemini(url: str, kind: str) -> None:
    """From 2.5 on; a model before says so, and another target may be asked."""
    parts = asked(of_file(url, kind))["contents"][0]["parts"]

    assert parts[0] == {"fileData": {"mimeType": kind, "fileUri": url}}
    with pytest.raises(UpstreamUnable, match="in base64") as raised:
        GeminiFormat().build_request(asking(of_file(url, kind), target=target("gemini-2.0-flash")))
    assert (raised.value.param, raised.value.moves_on) == ("messages", True)


@pytest.mark.parametrize("kind", ["image/png", "application/pdf"])
@pytest.mark.parametrize(
    "url",
    [
        "https://generativelanguage.googleapis.com/v1beta/files/abc",
        "https://STORAGE.googleapis.com/bucket/a.png",
        "gs://bucket/a.png",
        "files/abc",
        "http://a.example/a.png",
        "https://www.youtube.com/watch?v=abc",
        "https://youtu.be/abc",
        "https://youtu%2ebe/abc",
        "https://ann@a.example/a.png",
    ],
)
def test_files_of_the_account_and_films_are_refused_by_name(url: str, kind: str) -> None:
    """The first are another team's, the second cost by the second and are held as one picture."""
    with pytest.raises(UpstreamUnable, match="base64") as raised:
        GeminiFormat().build_request(asking(of_file(url, kind), target=target("gemini-3-flash")))

    assert (raised.value.param, raised.value.code, raised.value.moves_on) == ("messages", "invalid_image_url", True)
