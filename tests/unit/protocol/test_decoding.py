# Bodies are read one way or not at all.

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.accounts.schemas import KeyPatch, TeamPatch
from protocol.chat import ChatRequest, FunctionCall, Message, StreamOptions, ToolCall, check_arguments
from protocol.decoding import MAX_DEPTH, convert, decode, decode_with_extra, has_more_values
from protocol.errors import BadRequest, TooLarge
from protocol.messages import MessagesRequest

CHAT = '{"model": "m", "messages": [{"role": "user", "content": "hi"}]%s}'


def refusal(fields: str) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        decode((CHAT % fields).encode(), ChatRequest)
    return caught.value


def test_a_sound_request_decodes() -> None:
    """Known fields land in the struct."""
    request = decode((CHAT % ', "temperature": 0.5').encode(), ChatRequest)

    assert (request.model, request.messages[0].content, request.temperature) == ("m", "hi", 0.5)


def test_unknown_fields_are_returned_beside_the_request() -> None:
    """Only top-level fields that the type lacks are extra."""
    _, extra = decode_with_extra((CHAT % ', "n": 1, "top_k": 4, "x": {"n": [1]}').encode(), ChatRequest)

    assert extra == {"top_k": 4, "x": {"n": [1]}}


@pytest.mark.parametrize(
    ("fields", "param", "code", "words"),
    [
        (', "temperature": "hot"', "temperature", "invalid_type", "expected number or null, got string"),
        (', "n": 1.5', "n", "invalid_type", "expected integer or null, got number"),
        (', "n": true', "n", "invalid_type", "got boolean"),
        (', "logit_bias": {"5": "x"}', "logit_bias[...]", "invalid_type", "expected number, got string"),
        (', "reasoning_effort": "huge"', "reasoning_effort", "invalid_value", "'huge'"),
        (', "tools": [{"function": {}}]', "tools[0].function.name", "missing_required_parameter", "Missing required"),
        (', "model": "n"', "model", "duplicate_key", "twice"),
        (', "a": {"b": [{"x": 0, "c": 1, "\\u0063": 2}]}', "c", "duplicate_key", "twice"),
        (', "a": NaN', None, "invalid_json", "NaN"),
        (', "a": -Infinity', None, "invalid_json", "-Infinity"),
        (', "a": 1e999', None, "invalid_value", "too large"),
        (', "a": ' + "9" * 5000, None, "invalid_value", "too large"),
        (', "a": "\\ud800"', None, "invalid_json", "surrogate"),
        (', "a": "\\ude00\\ud83d"', None, "invalid_json", "surrogate"),
        (', "a": "\\ud83d\\\\ude00"', None, "invalid_json", "surrogate"),
        (', "a": ' + "[" * 200 + "]" * 200, None, "invalid_json", "nested"),
        (', "a": ' + '{"a":' * 200 + "1" + "}" * 200, None, "invalid_json", "nested"),
        (', "a": ' + "[" * 100_000 + "]" * 100_000, None, "invalid_json", "nested"),
        (', "a": [1,]', None, "invalid_json", "line 1"),
        (', "a": "\t"', None, "invalid_json", "control character"),
        ("} {", None, "invalid_json", "line 1"),
    ],
)
def test_what_could_be_misunderstood_is_refused(fields: str, param: str | None, code: str | None, words: str) -> None:
    """Each fault has a stable code, names its field where there is one, and says what is wrong."""
    error = refusal(fields)

    assert (error.status, error.param, error.code) == (400, param, code)
    assert words in error.message


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (ChatRequest, {"model": "m", "messages": [{"role": "usr"}]}, "assistant, developer, system, tool, user"),
        (TeamPatch, {"safety": {"input": "blok"}}, "block, flag, off"),
        (TeamPatch, {"safety": {"levels": {"secrets": "blok"}}}, "block, flag, off, redact"),
        (TeamPatch, {"safety": {"inputs": "block"}}, "input, output, levels, redacts"),
    ],
)
def test_where_few_names_are_right_they_are_named(kind: type, body: object, words: str) -> None:
    """Of values and of fields, however deep. Of moments, one."""
    with pytest.raises(BadRequest, match=f"Known here: {words}[.]"):
        decode(json.dumps(body).encode(), kind)
    with pytest.raises(BadRequest, match="a moment such as 2027"):
        decode(b'{"expires_at": "soon"}', KeyPatch)
    with pytest.raises(BadRequest, match=r"a number such as 12[.]5"):
        decode(b'{"limits": {"usd_per_day": "lots"}}', KeyPatch)


@pytest.mark.parametrize(
    ("body", "words"),
    [(b"", "not valid JSON"), (b"[1]", "expected object, got array"), (b"\xff{}", "UTF-8 at byte 0"), (b"{", "JSON")],
)
def test_bodies_that_are_no_object_are_refused(body: bytes, words: str) -> None:
    """Nothing at all, another type and other encodings are all a 400."""
    with pytest.raises(BadRequest, match=words):
        decode(body, ChatRequest)


def test_too_many_values_are_refused_before_they_are_read() -> None:
    """Millions of tiny values would hold up everyone else; a long text with as many commas does not."""
    many = "1," * 500_000
    long = 'a,\\"' * 500_000
    with pytest.raises(TooLarge, match="400000"):
        decode((CHAT % f', "a": [{many}1]').encode(), ChatRequest)

    assert len(decode((CHAT % f', "user": "{long}"').encode(), ChatRequest).user or "") == 1_500_000


@pytest.mark.parametrize("inner", ["[[],[]]", '{"a":{}}', "[1,2]", '{"a":1}'])
def test_every_object_and_array_counts_as_a_value(inner: str) -> None:
    """However values are nested, more of them than the limit are refused before they are built."""
    with pytest.raises(TooLarge, match="400000"):
        decode((CHAT % f', "a": [{",".join([inner] * 210_000)}]').encode(), ChatRequest)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (b"[1,2]", 2),
        (b'{"a":[{},{}]}', 5),
        (b'[",[{",""]', 2),
        (rb'["\\",[]]', 3),
        (rb'["\",[]]', 1),  # the string has no end
        (rb'["a,', 1),
        (b'["a,\\', 1),
        (b"", 0),
    ],
)
def test_values_are_counted_outside_of_strings(body: bytes, count: int) -> None:
    """A comma, a bracket or a brace counts, and none that stands in a string."""
    assert not has_more_values(body, count)
    assert not count or has_more_values(body, count - 1)


USER = {"role": "user", "content": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (ChatRequest, {"messages": [USER] * 16_385}, "messages"),
        (
            ChatRequest,
            {"messages": [USER, USER | {"content": [{"type": "text", "text": "x"}] * 16_385}]},
            "messages[1].content",
        ),
        (
            ChatRequest,
            {"messages": [{"role": "assistant", "tool_calls": [CALL] * 16_385}]},
            "messages[0].tool_calls",
        ),
        (ChatRequest, {"messages": [], "tools": [{"type": "function", "function": {"name": "f"}}] * 4_097}, "tools"),
        (MessagesRequest, {"messages": [USER] * 16_385}, "messages"),
        (
            MessagesRequest,
            {"messages": [USER | {"content": [{"type": "text", "text": "x"}] * 16_385}]},
            "messages[0].content",
        ),
        (MessagesRequest, {"messages": [], "tools": [{"name": "f", "input_schema": {}}] * 4_097}, "tools"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_more_entries_than_any_model_reads_are_refused_by_name(
    kind: type[ChatRequest | MessagesRequest], fields: dict[str, Any], param: str
) -> None:
    """Messages, parts, calls and tools have a number: each is translated one by one."""
    with pytest.raises(BadRequest, match="Send fewer") as caught:
        decode(json.dumps({"model": "m", "max_tokens": 1, **fields}).encode(), kind)

    assert (caught.value.param, caught.value.code) == (param, "invalid_value")


def test_the_arguments_of_tool_calls_are_counted_as_a_body_is() -> None:
    """They are a text in the body and are decoded after it, so that nested arrays could hide there."""
    calls = tuple(ToolCall("c", FunctionCall("f", '{"a": [%s[]]}' % ("[]," * 110_000))) for _ in range(2))
    request = ChatRequest(model="m", messages=(Message("assistant", tool_calls=calls),))
    with pytest.raises(BadRequest, match="400000 values") as caught:
        check_arguments(request)
    check_arguments(replace(request, messages=(Message("assistant", tool_calls=calls[:1]),)))

    assert caught.value.param == "messages"


def test_missing_fields_are_named() -> None:
    """The param of a missing field is its path."""
    with pytest.raises(BadRequest) as caught:
        decode(b'{"model": "m"}', ChatRequest)

    assert (caught.value.param, caught.value.code) == ("messages", "missing_required_parameter")


def test_extra_fields_convert_with_the_same_errors() -> None:
    """A field refused after decoding is named as one refused by it."""
    with pytest.raises(BadRequest) as caught:
        convert({"include_usage": "yes"}, StreamOptions)

    assert (caught.value.param, caught.value.code) == ("include_usage", "invalid_type")


def test_nesting_is_allowed_up_to_the_limit() -> None:
    """The body's own object counts as the first level."""
    depth = MAX_DEPTH - 1
    _, extra = decode_with_extra((CHAT % f', "a": {"[" * depth}{"]" * depth}').encode(), ChatRequest)

    assert "a" in extra


@given(st.text())
def test_every_text_survives_however_it_is_escaped(text: str) -> None:
    """Escaped or not, a string of real characters decodes to itself."""
    for ascii_only in (True, False):
        body = json.dumps({"model": "m", "messages": [], "user": text}, ensure_ascii=ascii_only).encode()
        assert decode(body, ChatRequest).user == text


@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(), st.lists, max_leaves=20))
def test_sound_json_is_never_refused(value: object) -> None:
    """Whatever the standard library writes of finite values is read back as an extra field."""
    body = json.dumps({"model": "m", "messages": [], "anything": value}).encode()

    assert decode_with_extra(body, ChatRequest)[1] == {"anything": value}
