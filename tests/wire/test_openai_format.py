# How we ask in OpenAI's dialect, judged by the scripted upstream's own rules, and its quirks.

from __future__ import annotations

import email.utils
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.upstreams.openai.wire_format import OpenAIFormat
from gateway.upstreams.wire.errors import UpstreamBusy, UpstreamRefused, UpstreamUnable
from gateway.upstreams.wire.quirks import LEARNT_FOR, KnownQuirks, Quirks, usual_quirks
from gateway.upstreams.wire.reading import read_retry_after
from gpu_backend.server.requests.bodies import read_sender
from protocol.chat import (
    CacheControl,
    ChatReply,
    ChatRequest,
    Function,
    FunctionCall,
    ImagePart,
    ImageUrl,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    NamedTool,
    StreamOptions,
    TextPart,
    ThinkingBlock,
    Tool,
    ToolCall,
)
from protocol.completions import CompletionRequest
from protocol.decoding import decode
from protocol.embeddings import EmbeddingRequest
from protocol.events import Delta
from protocol.messages import MessagesRequest, MessageTool, TextBlock, ThinkingEnabled, Turn
from protocol.messages_to_chat import to_chat
from router.catalog.targets import Endpoint, Target
from tests.support.openai_rules import check_body, check_headers
from tests.wire.openai_traffic import DONE, ROLE, STOP, body, call_piece, chunk, failure
from tests.wire.traffic import CHAT, TARGET, asking, read_stream, sum_up

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
tool = Tool(Function("weather", "Looks out of the window.", {"type": "object", "properties": {}}, strict=True))
turns = st.lists(
    st.one_of(
        words.map(lambda said: (Message("user", said),)),
        words.map(lambda said: (Message("assistant", said),)),
        words.map(lambda said: (Message("user", (TextPart(said), ImagePart(ImageUrl("data:image/png;base64,AA==")))),)),
        words.map(
            lambda said: (
                Message("assistant", tool_calls=(ToolCall("call_1", FunctionCall("weather", "{}")),)),
                Message("tool", said, tool_call_id="call_1"),
            )
        ),
    ),
    min_size=1,
    max_size=5,
).map(lambda groups: tuple(message for group in groups for message in group))
maybe = st.none
chats = st.builds(
    ChatRequest,
    model=st.just("asked-model"),
    messages=turns,
    max_tokens=maybe() | st.integers(1, 4096),
    temperature=maybe() | st.floats(0, 2),
    top_p=maybe() | st.floats(0, 1),
    n=maybe() | st.integers(1, 4),
    stop=maybe() | words | st.lists(words, max_size=4).map(tuple),
    stream=maybe() | st.booleans(),
    tools=st.just((tool,)),
    tool_choice=st.sampled_from([None, "none", "auto", "required", NamedTool(NamedFunction("weather"))]),
    parallel_tool_calls=maybe() | st.booleans(),
    response_format=maybe() | st.just(JsonSchemaFormat(JsonSchema("answer", {"type": "object"}, strict=True))),
    seed=maybe() | st.integers(-(2**31), 2**31),
    logprobs=st.just(True),
    top_logprobs=maybe() | st.integers(0, 20),
    logit_bias=maybe() | st.dictionaries(st.sampled_from(["50256", "1"]), st.floats(-100, 100)),
    reasoning_effort=st.sampled_from([None, "low", "high"]),
    metadata=maybe() | st.dictionaries(words, words, max_size=3),
    user=maybe() | words,
)


def sent(request: Any, **more: Any) -> dict[str, Any]:
    """Return the body that goes upstream, once the judge has passed it."""
    built = OpenAIFormat().build_request(asking(request, **more))
    path = built.url.removeprefix("https://upstream.example")
    check_headers({**built.headers, "host": "upstream.example", "content-length": "1"}, has_body=True)
    return check_body(path, built.body)


@given(chats, st.booleans())
@settings(max_examples=100, deadline=None)
def test_whatever_is_asked_is_asked_by_the_rules(request: ChatRequest, streams: bool) -> None:
    """No request that we can hold is one that OpenAI refuses, and every field arrives as it was asked."""
    body = sent(request, streams=streams)

    again = decode(json.dumps(body).encode(), ChatRequest)
    assert again.messages == request.messages
    for name in ("temperature", "top_p", "n", "stop", "tools", "tool_choice", "seed", "logit_bias", "user", "metadata"):
        assert getattr(again, name) == getattr(request, name), name
    assert again.output_limit == request.output_limit
    assert (again.stream or False, again.model) == (streams, "upstream-model")


@pytest.mark.parametrize("asked", [None, StreamOptions(), StreamOptions(include_usage=False)])
def test_a_streamed_request_always_asks_for_usage(asked: StreamOptions | None) -> None:
    """We bill by the upstream's count whether or not the client wants to see it."""
    body = sent(ChatRequest(model="m", messages=CHAT.messages, stream=True, stream_options=asked), streams=True)

    assert body["stream"] is True
    assert body["stream_options"]["include_usage"] is True


def test_a_plain_request_has_no_stream_options() -> None:
    """OpenAI refuses stream_options without stream."""
    options = StreamOptions(include_usage=True)
    body = sent(ChatRequest(model="m", messages=CHAT.messages, stream=True, stream_options=options), streams=False)

    assert "stream_options" not in body and not body.get("stream")


@pytest.mark.parametrize("asked", [{"max_tokens": 7}, {"max_completion_tokens": 7}])
@pytest.mark.parametrize(
    ("base_url", "name"),
    [
        ("https://api.openai.com/v1", "max_completion_tokens"),
        ("https://house.openai.azure.com/openai/v1", "max_completion_tokens"),
        ("https://api.deepseek.com/v1", "max_tokens"),
        ("http://notopenai.com/v1", "max_tokens"),
        ("http://gpu-0:8000/v1", "max_tokens"),
    ],
)
def test_the_limit_goes_by_the_name_that_the_upstream_knows(asked: dict[str, int], base_url: str, name: str) -> None:
    """OpenAI's newer models insist on the newer name; elsewhere the older one is known to all. Never both."""
    request = ChatRequest(model="m", messages=CHAT.messages, **asked)  # type: ignore[arg-type]
    body = sent(request, quirks=usual_quirks(base_url))

    assert {key: value for key, value in body.items() if key.startswith("max_")} == {name: 7}


def refused(error: dict[str, Any]) -> UpstreamRefused:
    """Return what the format makes of a refusal."""
    failure = OpenAIFormat().read_error(400, {}, json.dumps(error).encode())
    assert isinstance(failure, UpstreamRefused)
    return failure


def unknown(field: str, message: str = "Unsupported parameter.") -> dict[str, Any]:
    """Return OpenAI's refusal of a field as such."""
    return {"error": {"message": message, "param": field, "code": "unsupported_parameter"}}


def forbidden(*path: str, kind: str = "extra_forbidden", said: str = "") -> dict[str, Any]:
    """Return FastAPI's refusal of what stands at ``path``, which repeats what it was."""
    return {"detail": [{"type": kind, "loc": ["body", *path], "msg": "Extra inputs are not permitted", "input": said}]}


@pytest.mark.parametrize(
    ("refusal", "better"),
    [
        (unknown("max_completion_tokens"), Quirks("max_tokens")),
        (forbidden("max_completion_tokens"), Quirks("max_tokens")),
        (unknown("stream_options"), Quirks(stream_options=False)),
        (forbidden("stream_options", "include_usage"), Quirks(stream_options=False)),
        ({"error": {"message": "Unsupported value", "param": "max_completion_tokens", "code": "invalid_value"}}, None),
        (forbidden("max_completion_tokens", kind="less_than_equal"), None),
        ({"error": {"message": "max_completion_tokens is too large: 9. Unsupported."}}, None),
        (unknown("temperature"), None),
        ({"error": {"message": "Unknown tool 'x'."}}, None),
        ({}, None),
    ],
    ids=str,
)  # fmt: skip
def test_manners_are_found_in_refusals_of_a_field_as_such(refusal: dict[str, Any], better: Quirks | None) -> None:
    """A value that is refused is the caller's; a name that is refused is the gateway's."""
    assert Quirks().adapted_to(refused(refusal), is_native=False) == better


@pytest.mark.parametrize("name", ["max_completion_tokens", "stream_options", "reasoning_effort"])
@pytest.mark.parametrize(
    "refusal",
    [
        lambda name: forbidden("user", said=name),
        lambda name: forbidden("metadata", name),
        lambda name: forbidden("messages", "0", name),
        lambda name: unknown("user", f"Unsupported parameter: 'user' = '{name}'."),
        lambda name: {"error": {"message": f"Unrecognized request argument supplied: {name}"}},
        lambda name: {"error": f"Unrecognized request argument supplied: {name}"},
        lambda name: {"error": {"message": f"unsupported: {name}", "code": "unsupported_parameter"}},
        lambda name: {"error": {"message": [{"type": "extra_forbidden", "loc": ["body", name]}]}},
    ],
)
def test_no_words_of_an_upstream_change_a_field(refusal: Callable[[str], dict[str, Any]], name: str) -> None:
    """A message may repeat what a caller wrote: only a place of its own in the refusal names a field."""
    assert Quirks().adapted_to(refused(refusal(name)), is_native=False) is None


@pytest.mark.parametrize(
    ("refusal", "found"),
    [
        ({"error": {"message": "Unrecognized request argument supplied: reasoning_effort"}},
         Quirks(effort=False, for_this_call=True)),
        ({"error": {"message": "Unrecognized request argument supplied: reasoning_effort and more"}}, None),
        (unknown("reasoning_effort", "This model's effort cannot be set."), Quirks(effort=False)),
        ({"error": {"message": "Unsupported value: 'reasoning_effort' does not support 'xhigh' with this model.",
          "param": "reasoning_effort", "code": "unsupported_value"}}, None),
    ],
    ids=["older models'", "an echo", "our own engine's", "a value"],
)  # fmt: skip
def test_an_effort_that_is_our_translation_may_be_left_out(refusal: dict[str, Any], found: Quirks | None) -> None:
    """What Anthropic's clients say of thinking is a measure, not an order; a caller that named an effort hears the
    refusal."""
    failure = refused(refusal)
    native = MessagesRequest(
        model="m", max_tokens=9, messages=(Turn("user", "Hi"),), thinking=ThinkingEnabled(budget_tokens=1024)
    )
    without = Quirks(effort=False)

    assert Quirks().adapted_to(failure, is_native=True) == found
    assert without.adapted_to(failure, is_native=True) is None
    assert Quirks().adapted_to(failure, is_native=False) is None
    assert sent(to_chat(native), native=native)["reasoning_effort"] == "low"
    assert "reasoning_effort" not in sent(to_chat(native), native=native, quirks=without)
    assert sent(to_chat(native), quirks=without)["reasoning_effort"] == "low"


@pytest.mark.parametrize("tools", [None, ()])
def test_what_is_said_of_no_tools_stays_here(tools: tuple[Tool, ...] | None) -> None:
    """Frameworks send an empty list and say how to choose from it; OpenAI refuses both."""
    asked = ChatRequest(model="m", messages=CHAT.messages, tools=tools, tool_choice="auto", parallel_tool_calls=False)

    assert sent(asked).keys() == {"model", "messages"}


def test_manners_are_learnt_for_an_hour() -> None:
    """What an upstream took once, it may take otherwise later; words alone are learnt for no other call."""
    known = KnownQuirks()
    known.learn(TARGET, Quirks(effort=False, for_this_call=True), now=0.0)
    assert known.of(TARGET, now=0.0) == Quirks("max_tokens")

    known.learn(TARGET, Quirks("max_completion_tokens"), now=0.0)
    assert known.of(TARGET, now=LEARNT_FOR - 1) == Quirks("max_completion_tokens")
    assert known.of(TARGET, now=LEARNT_FOR) == Quirks("max_tokens")


def test_unknown_fields_travel_only_when_allowed() -> None:
    """A field unknown to us is dropped in decoding; what the provider's allow list names comes back as extra."""
    raw = b'{"model":"m","messages":[{"role":"user","content":"Hi"}],"service_tier":"flex","x_secret":1}'
    request = decode(raw, ChatRequest)

    assert {"service_tier", "x_secret"}.isdisjoint(sent(request))
    assert sent(request, extra={"service_tier": "flex"})["service_tier"] == "flex"


def test_what_only_anthropic_knows_stays_here() -> None:
    """Signed thinking and cache marks would be refused as unknown fields."""
    marked = Message(
        "user", (TextPart("Hi", CacheControl("ephemeral")), ImagePart(ImageUrl("data:image/png;base64,AA==")))
    )
    thought = Message("assistant", "Yes?", thinking_blocks=(ThinkingBlock("Hm.", "EqQB"),))
    body = sent(ChatRequest(model="m", messages=(marked, thought)))

    assert body["messages"][0]["content"][0] == {"type": "text", "text": "Hi"}
    assert body["messages"][1] == {"role": "assistant", "content": "Yes?"}


def test_completions_and_embeddings_go_to_their_own_paths() -> None:
    """Each kind of request has its path, and none has another's fields."""
    completion = sent(CompletionRequest(model="m", prompt=[[1, 2], [3]], max_tokens=5, echo=True), streams=True)
    embedding = sent(EmbeddingRequest(model="m", input=["a", "b"], encoding_format="base64"))

    assert completion["prompt"] == [[1, 2], [3]] and completion["stream_options"] == {"include_usage": True}
    assert embedding == {"model": "upstream-model", "input": ["a", "b"], "encoding_format": "base64"}


def test_only_our_own_engine_hears_of_the_tenant() -> None:
    """Tenant, weight, tier and other replicas are engine extensions, as are return_token_ids and return_gpu_seconds."""
    own = OpenAIFormat().build_request(asking(self_hosted=True, tenant="team-a", weight=2.0, tier="batch"))
    told = (own.headers["x-tenant"], own.headers["x-weight"], own.headers["x-tier"])

    assert told == ("team-a", "2.0", "batch")
    assert "x-fails-over" not in own.headers
    among_others = OpenAIFormat().build_request(asking(self_hosted=True, fails_over=True))
    assert among_others.headers["x-fails-over"] == "1"
    assert json.loads(own.body)["return_token_ids"] is json.loads(own.body)["return_gpu_seconds"] is True
    assert {"return_token_ids", "return_gpu_seconds"}.isdisjoint(sent(CHAT))


def test_routers_between_us_and_engines_hear_what_they_place_by() -> None:
    """As gateways of inference fleets name it; nobody else hears of a team, a conversation or a replica's address."""
    more: dict[str, Any] = {"tenant": "team-a", "session": "5e55", "starts_within": 0.2504}
    own = OpenAIFormat().build_request(asking(self_hosted=True, **more)).headers
    other = OpenAIFormat().build_request(asking(**more)).headers
    told = {
        name: own[name] for name in own.keys() - other.keys() if name.startswith(("x-gateway", "x-session", "x-llm"))
    }

    assert told == {
        "x-gateway-inference-fairness-id": "team-a",
        "x-gateway-destination-endpoint": "upstream.example",
        "x-session-id": "5e55",
        "x-llm-d-slo-ttft-ms": "251",
    }
    assert not any(name.startswith("x-") for name in other)
    endless = OpenAIFormat().build_request(asking(self_hosted=True, starts_within=1e300)).headers
    assert endless["x-llm-d-slo-ttft-ms"] == str(2**31 - 1)


@pytest.mark.parametrize(("left", "told"), [(600.0, "600000"), (0.0001, "1"), (0.0, "1"), (1e9, str(2**31 - 1))])
def test_our_own_engine_hears_of_the_deadline(left: float, told: str) -> None:
    """It is told how long the call may still take, in whole milliseconds that it accepts; no other upstream is."""
    own, other = (OpenAIFormat().build_request(asking(self_hosted=own, time_left=left)) for own in (True, False))

    assert own.headers["x-deadline-ms"] == told and read_sender(own.headers).deadline_ms == int(told)
    assert "x-deadline-ms" not in other.headers


@pytest.mark.parametrize(("priority", "told"), [("high", "high"), ("low", "low"), ("normal", None)])
def test_our_own_engine_hears_of_the_priority(priority: str, told: str | None) -> None:
    """Of a call that is not like most; no other upstream does."""
    own, other = (OpenAIFormat().build_request(asking(self_hosted=own, priority=priority)) for own in (True, False))

    assert own.headers.get("x-priority") == told and read_sender(own.headers).priority == priority
    assert "x-priority" not in other.headers


def test_a_role_is_no_first_token() -> None:
    """Neither the role delta nor an empty piece counts: the time to the first token is the time to content."""
    events, _ = read_stream(OpenAIFormat().open_events(CHAT), [ROLE, chunk({"content": "Hi"}), STOP, DONE])
    deltas = [event for event in events if isinstance(event, Delta)]

    assert [delta.has_content for delta in deltas] == [False, True, False]


def test_logprobs_pass_untouched() -> None:
    """They are for the client; we neither read nor reshape them."""
    scores = {"content": [{"token": "H", "logprob": -0.25, "bytes": [72], "top_logprobs": []}], "refusal": None}
    choice = {"index": 0, "delta": {"content": "H"}, "logprobs": scores, "finish_reason": "stop"}
    stream = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n" + DONE
    events, _ = read_stream(OpenAIFormat().open_events(CHAT), [stream])

    assert isinstance(events[0], Delta) and events[0].logprobs is not None
    assert json.loads(bytes(events[0].logprobs)) == scores


def test_logprobs_that_are_no_text_come_out_as_text() -> None:
    """They are copied undecoded: what an upstream cut in the middle of a character must not spoil our own bytes."""
    said = (
        b'{"choices":[{"index":0,"delta":{"content":"H"},"message":{"content":"H"},"logprobs":{"content":["\xc3"]}}]}'
    )
    events, _ = read_stream(OpenAIFormat().open_events(CHAT), [b"data: " + said + b"\n\n"])
    reply, _ = OpenAIFormat().read_reply(CHAT, said)

    assert isinstance(events[0], Delta) and isinstance(reply, ChatReply)
    for scores in (events[0].logprobs, reply.choices[0].logprobs):
        assert scores is not None and json.loads(bytes(scores).decode()) == {"content": ["\N{REPLACEMENT CHARACTER}"]}


def test_logprobs_of_many_lines_come_out_on_one() -> None:
    """JSON that is printed for people comes as an event of many lines; in a client's event a newline would end it."""
    choice = {
        "index": 0,
        "delta": {"content": "H"},
        "logprobs": {"content": [{"token": "\n"}]},
        "finish_reason": "stop",
    }
    printed = json.dumps({"choices": [choice]}, indent=2).encode()
    stream = b"data: " + printed.replace(b"\n", b"\ndata: ") + b"\n\n" + DONE
    events, _ = read_stream(OpenAIFormat().open_events(CHAT), [stream])

    assert isinstance(events[0], Delta) and events[0].logprobs is not None
    assert b"\n" not in bytes(events[0].logprobs)
    assert json.loads(bytes(events[0].logprobs)) == choice["logprobs"]


def test_reasoning_of_compatible_services_is_kept() -> None:
    """Some services send their reasoning beside the text; it is content, and no part of the text."""
    stream = [chunk({"reasoning_content": "Hm. "}), chunk({"content": "Yes."}), STOP, DONE]
    events, _ = read_stream(OpenAIFormat().open_events(CHAT), stream)
    first = events[0]

    assert isinstance(first, Delta) and first.reasoning == "Hm. " and first.has_content
    assert sum_up(events, 1).text == ("Yes.",)


def test_a_tool_call_without_arguments_has_an_empty_object() -> None:
    """Arguments are a JSON text; services that send none or nothing mean "{}"."""
    calls = [{"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": ""}}]
    reply, _ = OpenAIFormat().read_reply(CHAT, body({"content": None, "tool_calls": calls}, "tool_calls"))
    message = reply.choices[0].message  # type: ignore[union-attr]

    assert message.tool_calls is not None  # type: ignore[union-attr]
    assert message.tool_calls[0].function.arguments == "{}"  # type: ignore[union-attr]


def test_the_head_of_a_call_comes_once() -> None:
    """Services that repeat it, empty, would make clients forget the id."""
    head = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "clock", "arguments": ""}}
    again = {"index": 0, "id": "", "type": "function", "function": {"name": "", "arguments": "{}"}}
    stream = [chunk({"tool_calls": [head]}), chunk({"tool_calls": [again]}), chunk({}, "tool_calls"), DONE]
    events, _ = read_stream(OpenAIFormat().open_events(CHAT), stream)
    pieces = [piece for event in events if isinstance(event, Delta) for piece in event.tool_calls]

    assert [(piece.id, piece.name, piece.arguments) for piece in pieces] == [
        ("call_1", "clock", ""),
        (None, None, "{}"),
    ]


def test_a_piece_of_a_call_without_arguments_is_no_fault() -> None:
    """The first piece may carry no arguments at all, or null."""
    first = {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "clock"}}]}
    stream = [ROLE, chunk(first), chunk(call_piece(0, "{}")), chunk({}, "tool_calls"), DONE]
    events, outcome = read_stream(OpenAIFormat().open_events(CHAT), stream)

    assert outcome is None
    assert sum_up(events, 1).calls == (("call_1", "clock", "{}"),)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after-ms": "1500", "retry-after": "2"}, 1.5),
        ({"retry-after-ms": "soon", "retry-after": "2"}, 2.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "1e308"}, 86400.0),
        ({"retry-after": "Fri, 01 Jan 9999 00:00:00 GMT"}, 86400.0),
        ({"retry-after": "99999999999999999999 Jan 2026 00:00:00"}, None),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0.0),
    ],
)
def test_retry_after_is_read_in_all_its_ways(headers: dict[str, str], seconds: float | None) -> None:
    """Milliseconds before seconds, seconds or a date; what makes no sense was not said."""
    assert read_retry_after(headers) == seconds


def test_retry_after_as_a_date_counts_from_now() -> None:
    """An HTTP date says when, not how long."""
    headers = {"retry-after": email.utils.formatdate(time.time() + 30, usegmt=True)}

    assert read_retry_after(headers) == pytest.approx(30, abs=2)


def test_a_429_tells_the_client_how_long_to_wait() -> None:
    """Whole seconds, rounded up, one at least: clients obey this header."""
    status, said = failure(429, "requests", "rate_limit_exceeded")
    error = OpenAIFormat().read_error(status, {"retry-after-ms": "1200"}, said)

    assert isinstance(error, UpstreamBusy) and error.retry_after == 1.2
    assert error.headers["retry-after"] == "2"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"error": "model is loading"}, "model is loading"),
        ({"message": "Too hot.", "type": "BadRequest", "code": 400}, "Too hot."),
        ({"detail": "Too hot."}, "Too hot."),
        ({"detail": [{"loc": ["body", "n"], "msg": "Too many."}]}, '[{"loc":["body","n"],"msg":"Too many."}]'),
        ({"error": {"message": "Too hot.", "code": 7, "param": ["n"]}}, "Too hot."),
        ({"error": {"message": "x" * 9000}}, "x" * 2000),
        ({"error": None}, "The upstream refused the request."),
        ([], "The upstream refused the request."),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_refusal_is_understood_in_each_of_its_shapes(said: object, words: str) -> None:
    """Compatible services put their words in different places; none of them costs the caller the reason."""
    error = OpenAIFormat().read_error(400, {}, json.dumps(said).encode())

    assert (error.status, error.message, error.code, error.param) == (400, words, None, None)


def test_a_refusal_of_the_request_keeps_the_upstreams_words() -> None:
    """The client is told what the upstream found wrong, and where."""
    told = {"message": "Too hot.", "type": "invalid_request_error", "param": "temperature", "code": "invalid_value"}
    said = json.dumps({"error": told}).encode()
    error = OpenAIFormat().read_error(400, {}, said)

    assert (error.message, error.param, error.code, error.status) == ("Too hot.", "temperature", "invalid_value", 400)


def test_long_names_of_users_and_caches_go_as_digests() -> None:
    """Several upstreams end them at 64 characters; the same name has the same digest, our own engine gets it whole."""
    names = {"user": "u" * 160, "safety_identifier": "s" * 65, "prompt_cache_key": "k"}
    long = ChatRequest(model="m", messages=CHAT.messages, **names)
    body, again = sent(long), sent(EmbeddingRequest(model="m", input="a", user="u" * 160))

    assert (len(body["user"]), len(body["safety_identifier"]), body["prompt_cache_key"]) == (64, 64, "k")
    assert body["user"] == again["user"] != body["safety_identifier"]
    assert sent(ChatRequest(model="m", messages=CHAT.messages, user="u" * 64))["user"] == "u" * 64
    own = OpenAIFormat().build_request(asking(long, self_hosted=True))
    assert json.loads(own.body)["user"] == "u" * 160


def test_what_only_claude_knows_is_left_out_and_told() -> None:
    """Marks for its cache, its signed thinking, and a top_k; each under the name that the caller gave it."""
    mark = CacheControl("ephemeral")
    thought = Message("assistant", "Yes.", thinking_blocks=(ThinkingBlock("Hm.", "EqQB"),))
    chat = ChatRequest(model="m", messages=(Message("user", (TextPart("Hi", mark),)), thought, Message("user", "?")))
    native = MessagesRequest(
        model="m", max_tokens=9, messages=(Turn("user", "Hi"),), system=(TextBlock("Be brief.", mark),)
    )

    def dropped(request: ChatRequest, **more: Any) -> tuple[str, ...]:
        return OpenAIFormat().build_request(asking(request, **more)).dropped

    assert dropped(CHAT) == dropped(CHAT, self_hosted=True) == ()
    assert dropped(ChatRequest(model="m", messages=CHAT.messages, verbosity="low"), self_hosted=True) == ("verbosity",)
    assert dropped(chat) == ("thinking_blocks", "cache_control")
    assert dropped(to_chat(native), native=native, left_out=("top_k",)) == ("top_k", "cache_control")


def test_a_tool_that_claude_alone_knows_is_refused_by_name() -> None:
    """Its schema is in no request; another target of the route may be one of Claude's."""
    tools = (MessageTool("bash", type="bash_20250124"),)
    native = MessagesRequest(model="m", max_tokens=9, messages=(Turn("user", "Hi"),), tools=tools)
    with pytest.raises(UpstreamUnable, match="bash_20250124") as caught:
        OpenAIFormat().build_request(asking(to_chat(native), native=native))

    assert (caught.value.param, caught.value.moves_on) == ("tools", True)


@pytest.mark.parametrize(
    ("credentials", "header"),
    [
        ({"api_key": "sk-house"}, ("api-key", "sk-house")),
        ({"api_key": None, "token": "entra"}, ("authorization", "Bearer entra")),
    ],
)
def test_azure_is_asked_by_deployment(credentials: dict[str, Any], header: tuple[str, str]) -> None:
    """A version of the API makes the model a deployment in the path; no name of either leaves its place there."""
    named = replace(TARGET.model, upstream_model="our deployment?/x")
    target = Target(named, Endpoint("us", "https://ours.openai.azure.com"))
    for request, path in (
        (CHAT, "/chat/completions"),
        (CompletionRequest(model="m", prompt="Once"), "/completions"),
        (EmbeddingRequest(model="m", input="Once"), "/embeddings"),
    ):
        built = OpenAIFormat().build_request(asking(request, target=target, api_version="2024-10-21&x", **credentials))

        deployments = "https://ours.openai.azure.com/openai/deployments"
        assert built.url == f"{deployments}/our%20deployment%3F%2Fx{path}?api-version=2024-10-21%26x"
        assert {name: value for name, value in built.headers.items() if name in ("api-key", "authorization")} == {
            header[0]: header[1]
        }


def test_the_newer_api_of_azure_is_openais() -> None:
    """Below /openai/v1 nothing is special: keys and tokens of Entra are bearer tokens."""
    target = Target(TARGET.model, Endpoint("us", "https://ours.openai.azure.com/openai/v1"))
    for credentials in ({"api_key": "k"}, {"api_key": None, "token": "k"}):
        built = OpenAIFormat().build_request(asking(target=target, **credentials))

        assert built.url == "https://ours.openai.azure.com/openai/v1/chat/completions"
        assert built.headers["authorization"] == "Bearer k" and "api-key" not in built.headers


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2024-06-01", "max_tokens"),
        ("2024-09-01-preview", "max_completion_tokens"),
        ("2024-10-21", "max_completion_tokens"),
        (None, "max_completion_tokens"),
    ],
)
def test_an_older_version_of_azures_api_is_told_the_limit_by_its_older_name(version: str | None, name: str) -> None:
    """It refuses the newer one in words alone, from which nothing is learned."""
    request = ChatRequest(model="m", messages=(Message("user", "Hi"),), max_tokens=9)
    built = OpenAIFormat().build_request(asking(request, api_version=version, quirks=Quirks("max_completion_tokens")))

    assert {key: value for key, value in json.loads(built.body).items() if key.startswith("max_")} == {name: 9}
