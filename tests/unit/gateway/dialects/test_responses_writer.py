# The events of a streamed response build what the upstream said, in whatever order it said it.

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from gateway.calls.accumulate import Collector
from gateway.dialects.parts.native_items import NativeItems
from gateway.dialects.responses_writer import ResponsesWriter
from gateway.inference.reply import Reply
from gateway.upstreams.responses.replies import ResponsesEvents
from protocol.chat import ChatReply, ChatRequest, FinishReason, ThinkingBlock
from protocol.errors import BadRequest, ServiceError
from protocol.events import Delta, Event, ReplyEnd, ToolCallDelta, UsageReport
from protocol.responses import InputItem, ResponsesRequest, ResponsesTool, upstreams_id
from protocol.responses_to_chat import thoughts_of
from protocol.usage import Usage
from tests.support.response_stream import built_response, events_in

REPLY = cast(
    Reply,
    SimpleNamespace(
        target=SimpleNamespace(model=SimpleNamespace(name="m")),
        record=SimpleNamespace(cost_nanousd=1, total_ms=2.0),
    ),
)
USAGE = Usage(3, 0, 5)
END: list[Event] = [Delta(finish_reason=FinishReason.STOP), UsageReport(USAGE), ReplyEnd()]
ASKED = ResponsesRequest(model="m", input="a", tools=(ResponsesTool(type="custom", name="tool2"),))
words = st.text(min_size=1, max_size=4)
steps = st.one_of(
    words.map(lambda text: Delta(text=text)),
    words.map(lambda text: Delta(refusal=text)),
    words.map(lambda text: Delta(reasoning=text)),
    words.map(lambda text: Delta(text=text, reasoning=text)),
    words.map(lambda text: Delta(signature=text)),
    st.tuples(st.integers(0, 2), words).map(lambda one: ("piece", *one)),
)


def stream_of(*deltas: Delta) -> str:
    writer = ResponsesWriter(ASKED, "0-1", 1)
    return b"".join(writer.pieces(REPLY, [event]) for event in [*deltas, *END]).decode()


def deltas_of(moves: list[Any]) -> list[Delta]:
    """Return the deltas; pieces of a call are those of a JSON text, after its head."""
    deltas, begun = [], set[int]()
    for move in moves:
        if isinstance(move, Delta):
            deltas.append(move)
            continue
        _, index, text = move
        head = {} if index in begun else {"id": f"call_{index}", "name": f"tool{index}"}
        begun.add(index)
        deltas.append(Delta(tool_calls=(ToolCallDelta(index, json.dumps(text)[1:-1], **head),)))
    return deltas


def test_a_native_response_that_the_gateway_ends_has_what_was_said_until_then() -> None:
    """Items that are whole as they came, a message and a call as far as they are. Their ids are ours."""
    search = {"type": "web_search_call", "id": "ws_7", "status": "completed", "action": {"type": "search"}}
    message = {"type": "message", "id": "msg_8", "role": "assistant", "status": "in_progress", "content": []}
    call = {"type": "function_call", "id": "fc_9", "call_id": "c", "name": "f", "arguments": ""}
    told = [
        {"type": "response.created", "sequence_number": 7, "response": {"id": "resp_7", "billing": {"payer": "x"}}},
        *({"type": f"response.output_item.{step}", "output_index": 0, "item": search} for step in ("added", "done")),
        {"type": "response.output_item.added", "output_index": 1, "item": message},
        {"type": "response.output_text.delta", "output_index": 1, "item_id": "msg_8", "delta": "Grü"},
        {"type": "response.output_item.added", "output_index": 2, "item": call},
        {"type": "response.function_call_arguments.delta", "output_index": 2, "item_id": "fc_9", "delta": "{"},
    ]
    feed = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in told)
    writer, events = ResponsesWriter(ASKED, "0-" + "1" * 31, 1), ResponsesEvents().feed(feed)
    ended: list[Event] = [Delta(finish_reason=FinishReason.CONTENT_FILTER), UsageReport(USAGE), ReplyEnd()]
    *_, item, rest, last = events_in((writer.pieces(REPLY, events) + writer.pieces(REPLY, ended)).decode())
    first, second, third = last["response"]["output"]

    assert last["response"]["incomplete_details"] == {"reason": "content_filter"} and item["item"] == second
    assert rest["item"] == third == call | {"id": third["id"], "arguments": "{", "status": "incomplete"}
    assert last["response"]["billing"] == {"payer": "x"} and last["response"]["id"].endswith("1" * 31)
    assert first == search | {"id": f"ws_0{'1' * 31}0000_7"} and upstreams_id(first["id"]) == "ws_7"
    assert (second["content"][0]["text"], second["status"]) == ("Grü", "incomplete")


def test_nothing_is_lost_of_an_item_that_the_gateway_ends() -> None:
    """Also what came with its beginning, at once, as a refusal, as thoughts or in several parts."""
    text = {"type": "output_text", "text": "Grü", "annotations": ["a"]}
    begun = [
        {"type": "message", "content": [text]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a"'},
        {"type": "reasoning", "summary": []},
        {"type": "message", "content": []},
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "all"},
        {"type": "mcp_call", "server_label": "a", "name": "look", "arguments": ""},
        {"type": "code_interpreter_call", "code": "x", "container_id": "cntr_1"},
    ]
    told = [
        {"type": "response.created", "response": {}},
        *(
            {"type": "response.output_item.added", "output_index": place, "item": {"id": f"i{place}"} | item}
            for place, item in enumerate(begun)
        ),
        {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": "ße"},
        {"type": "response.output_text.done", "output_index": 0, "content_index": 1, "text": "Du"},
        {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": ":1}"},
        {"type": "response.reasoning_summary_text.delta", "output_index": 2, "summary_index": 0, "delta": "Hm."},
        {"type": "response.output_text.delta", "output_index": 3, "content_index": 0, "delta": "so"},
        {"type": "response.output_text.done", "output_index": 3, "content_index": 0, "text": "thus"},
        {"type": "response.refusal.delta", "output_index": 3, "content_index": 1, "delta": "No."},
        {"type": "response.mcp_call_arguments.delta", "output_index": 5, "delta": "{"},
        {"type": "response.code_interpreter_call_code.delta", "output_index": 6, "delta": " = 1"},
    ]
    feed = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in told)
    writer, events = ResponsesWriter(ASKED, "0-1", 1), ResponsesEvents().feed(feed)
    ended: list[Event] = [Delta(finish_reason=FinishReason.CONTENT_FILTER), UsageReport(USAGE), ReplyEnd()]
    last = events_in((writer.pieces(REPLY, events) + writer.pieces(REPLY, ended)).decode())[-1]
    message, call, thoughts, refusal, custom, server, code = last["response"]["output"]
    fresh = {"type": "output_text", "annotations": [], "logprobs": []}

    assert message["content"] == [text | {"text": "Grüße"}, fresh | {"text": "Du"}]
    assert (call["arguments"], custom["input"]) == ('{"a":1}', "all")
    assert (server["arguments"], code["code"]) == ("{", "x = 1") and "content" not in server.keys() | code.keys()
    assert thoughts["summary"] == [{"type": "summary_text", "text": "Hm."}]
    assert refusal["content"] == [fresh | {"text": "thus"}, {"type": "refusal", "refusal": "No."}]


@given(st.lists(steps, max_size=20))
def test_words_thoughts_and_calls_come_whole_in_any_order(moves: list[Any]) -> None:
    """Pieces of calls between each other and between words: each call is one item, and nothing said is lost."""
    deltas = deltas_of(moves)
    items = built_response(stream_of(*deltas))["output"]
    parts = [part for item in items for part in item.get("content", ())]
    calls: dict[str, str] = {}
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        calls[f"call_{piece.index}"] = calls.get(f"call_{piece.index}", "") + piece.arguments

    def said(kind: str, field: str = "text") -> str:
        return "".join(part[field] for part in parts if part["type"] == kind)

    assert said("output_text") == "".join(delta.text for delta in deltas)
    assert said("refusal", "refusal") == "".join(delta.refusal for delta in deltas)
    assert said("reasoning_text") == "".join(delta.reasoning for delta in deltas)
    told = {item["call_id"]: item.get("arguments", item.get("input")) for item in items if "call_id" in item}
    assert told == calls
    assert len({item["id"] for item in items}) == len(items)


@given(st.lists(steps, max_size=12))
def test_a_whole_response_has_what_the_stream_has(moves: list[Any]) -> None:
    """But for the order in which words, thoughts and calls came, which a whole reply does not keep."""
    deltas = [delta for delta in deltas_of(moves) if not delta.signature]
    collector = Collector(ChatRequest(model="m", messages=()))
    for delta in [*deltas, END[0]]:
        assert isinstance(delta, Delta)
        collector.add(delta)
    reply = collector.reply()
    assert isinstance(reply, ChatReply)
    whole = json.loads(ResponsesWriter(ASKED, "0-1", 1).whole(REPLY, reply, USAGE))
    streamed = built_response(stream_of(*deltas))

    def texts(response: dict[str, Any], item_type: str) -> str:
        items = [item for item in response["output"] if item["type"] == item_type]
        return "".join(part.get("text", "") for item in items for part in item["content"])

    def calls(response: dict[str, Any]) -> list[tuple[str, str]]:
        found = [item for item in response["output"] if "call_id" in item]
        return sorted((item["call_id"], item.get("arguments", item.get("input"))) for item in found)

    assert whole.keys() == streamed.keys() and whole["usage"] == streamed["usage"]
    assert texts(whole, "message") == texts(streamed, "message")
    assert texts(whole, "reasoning") == texts(streamed, "reasoning")
    assert calls(whole) == calls(streamed)


def test_what_a_model_thought_comes_back_as_it_was_signed() -> None:
    """Each signed stretch is an item of its own; what was changed on the way is refused."""
    deltas = [
        Delta(reasoning="Hm"),
        Delta(reasoning="."),
        Delta(signature="s1"),
        Delta(reasoning="Oh"),
        Delta(text="a"),
    ]
    first, second, _ = built_response(stream_of(*deltas))["output"]
    sealed = first["encrypted_content"]

    def thoughts(content: str | None) -> list[Any]:
        return thoughts_of(InputItem(type="reasoning", encrypted_content=content))

    assert thoughts(sealed) == [ThinkingBlock("Hm.", "s1")]
    assert "encrypted_content" not in second and thoughts("another maker's") == thoughts(None) == []
    with pytest.raises(BadRequest):
        thoughts(f"{sealed}x")


def test_a_response_can_fail_before_anything_came() -> None:
    """As when the status was sent with a comment: the first event has the number 0."""
    failed, error = events_in(ResponsesWriter(ASKED, "0-1", 1).error(ServiceError("Broken.", code="x")).decode())

    assert (failed["response"]["status"], failed["response"]["output"]) == ("failed", [])
    assert (error["code"], error["message"], error["sequence_number"]) == ("x", "Broken.", 1)


def test_what_the_upstream_has_ended_is_whole() -> None:
    """Its last word on the items counts, wherever it said before that one of them stands."""
    items = NativeItems("a" * 32)
    begun = b'{"type":"message","id":"msg_b","role":"assistant","content":[]}'
    items.add(Delta(told=_told("response.output_item.added", output_index=b"7", item=begun)))
    items.add(Delta(told=_told("response.completed", response=b'{"output":[' + begun + b"]}")))

    assert items.add(Delta(finish_reason=FinishReason.CONTENT_FILTER)) == []
    assert len(items.all()) == 1


@pytest.mark.parametrize("nameless", [b"null", b'""'])
def test_items_that_their_upstream_names_by_nothing_are_told_apart(nameless: bytes) -> None:
    """By their places; events of such an item name it as it is named here."""
    items, item = NativeItems("a" * 32), b'{"type":"message","id":' + nameless + b"}"
    for place in (b"0", b"1"):
        items.add(Delta(told=_told("response.output_item.added", output_index=place, item=item)))
    (said,) = items.add(
        Delta(text="x", told=_told("response.output_text.delta", output_index=b"1", item_id=nameless, delta=b'"x"'))
    )
    items.add(Delta(told=_told("response.completed", response=b'{"output":[' + item + b"," + item + b"]}")))
    ids = [each["id"] for each in items.all()]

    assert ids == [f"item_{'a' * 32}{place:04}" for place in (0, 1)]
    assert said["item_id"] == ids[1]


def _told(kind: str, **fields: bytes) -> dict[str, Raw]:
    return {"type": Raw(msgspec.json.encode(kind)), **{name: Raw(data) for name, data in fields.items()}}
