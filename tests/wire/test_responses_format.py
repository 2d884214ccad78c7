# How a response is asked of an upstream's own Responses API.

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from billing.core.money import to_nano
from gateway.core.settings import DROPPABLE, HostedTools
from gateway.dialects.responses import check_response
from gateway.upstreams.responses.wire_format import ResponsesFormat
from gateway.upstreams.wire.quirks import Quirks
from gateway.upstreams.wire.unsayable import Unsayable, without_fields
from protocol.chat import ThinkingBlock
from protocol.errors import BadRequest
from protocol.events import Delta
from protocol.messages import MOST_SEARCHES
from protocol.responses import (
    AllowedTools,
    InputItem,
    ReasoningConfig,
    ResponsesRequest,
    ResponsesTool,
    SearchChoice,
    TextConfig,
)
from protocol.responses_to_chat import seal_of, to_chat
from router.catalog.targets import TeamKeys
from router.prompt_size.bounds import hosted_most
from tests.wire.traffic import TARGET, asking

ASKED = ResponsesRequest(
    model="m",
    input="Hi",
    tools=(ResponsesTool(type="function", name="f"),),
    parallel_tool_calls=True,
    reasoning=ReasoningConfig(effort="max", summary="auto"),
    text=TextConfig(verbosity="low"),
    metadata={"a": "b"},
    user="u",
    safety_identifier="s" * 65,
    prompt_cache_key="k",
    conversation="conv_1",
    previous_response_id="resp_1",
    background=True,
    store=True,
)


def sent(asked: ResponsesRequest, without: tuple[str, ...] = (), **more: object) -> dict[str, object]:
    """Return what is sent to a provider that refuses some fields."""
    chat, _ = without_fields(to_chat(asked), without)
    built = ResponsesFormat().build_request(asking(chat, response=asked, **more))
    body: dict[str, object] = msgspec.json.decode(built.body)
    return body


def test_what_is_kept_here_is_not_told_and_names_are_as_short_as_they_must_be() -> None:
    """The rest goes as its caller said it."""
    body = sent(ASKED, streams=True)

    assert not {"conversation", "previous_response_id", "background"} & body.keys() and body["store"] is False
    assert body["reasoning"] == {"effort": "max", "summary": "auto"} and body["text"] == {"verbosity": "low"}
    assert (body["user"], body["parallel_tool_calls"], body["stream"]) == ("u", True, True)
    assert body["safety_identifier"] != "s" * 65 and len(str(body["safety_identifier"])) <= 64


def test_what_a_provider_refuses_is_left_out() -> None:
    """By the names that a chat has for it."""
    body = sent(ASKED, DROPPABLE)

    assert body.keys() == {"model", "input", "include", "store", "tools", "reasoning"}
    assert body["reasoning"] == {"summary": "auto"}


HOSTED = (
    ResponsesTool(type="web_search"),
    ResponsesTool(type="file_search", vector_store_ids=("vs_1",)),
    ResponsesTool(type="code_interpreter", container={"type": "auto"}),
    ResponsesTool(type="image_generation"),
    ResponsesTool(type="mcp", server_label="a", connector_id="connector_mail"),
)


@pytest.mark.parametrize("tool", HOSTED, ids=[tool.type for tool in HOSTED])
def test_a_tool_that_the_provider_may_not_run_is_refused(tool: ResponsesTool) -> None:
    """Whatever is known of its price: but for searches of the web none may, until an operator says so."""
    prices = dict.fromkeys(("web_search", "file_search", "code_interpreter", "image"), to_nano(1))
    target = replace(TARGET, model=replace(TARGET.model, price=replace(TARGET.model.price, **prices)))
    hosted = HostedTools(web_search=False) if tool.type == "web_search" else HostedTools()
    with pytest.raises(Unsayable, match=f"may not run '{tool.type}'"):
        sent(replace(ASKED, tools=(tool,)), target=target, hosted=hosted)


def test_a_team_with_a_key_of_its_own_searches_its_own_files() -> None:
    """They lie in its account, so that no operator has to name them."""
    price = replace(TARGET.model.price, file_search=to_nano(1))
    target = replace(TARGET, model=replace(TARGET.model, price=price), own=TeamKeys("team"))
    body = sent(replace(ASKED, tools=(HOSTED[1],)), target=target)

    assert body["tools"] == [{"type": "file_search", "vector_store_ids": ["vs_1"]}]


def test_a_search_has_one_name_whatever_its_date() -> None:
    """A function of that name hid it from what is held, where tools were chosen by their names."""
    dated, function = ResponsesTool(type="web_search_2025_08_26"), ResponsesTool(type="function", name="web_search")
    for choice in (SearchChoice(), AllowedTools("auto", (SearchChoice(),))):
        asked = ResponsesRequest(model="m", input="Hi", tools=(dated,), tool_choice=choice)
        check_response(asked)

        assert hosted_most(to_chat(asked)) == {"web_searches": MOST_SEARCHES}
        for other in (function, ResponsesTool(type="web_search")):
            with pytest.raises(BadRequest, match="Two of 'tools' have one name"):
                check_response(replace(asked, tools=(dated, other)))


def test_no_call_is_held_for_where_none_may_be_made() -> None:
    """As where a conversation is compacted: its tools are known, and none is called."""
    asked = ResponsesRequest(model="m", input="Hi", tools=HOSTED, tool_choice="none")

    assert not any(hosted_most(to_chat(asked)).values())
    assert hosted_most(to_chat(replace(asked, tool_choice="auto")))["images"] == MOST_SEARCHES


def test_fields_of_other_tools_and_items_are_not_sent() -> None:
    """The chat that is judged has no place for them."""
    inner = ResponsesTool(type="function", name="g", headers={"x": "SECRET"})
    tools = (ResponsesTool(type="function", name="f", server_url="https://SECRET"),)
    tools += (ResponsesTool(type="namespace", name="n", tools=(inner,)),)
    item = InputItem(role="user", content="Hi", code="SECRET", queries=("SECRET",), result="iVBORw0KGgoSECRET")
    item = replace(
        item, action={"SECRET": 1}, execution="SECRET", tools=(ResponsesTool(type="web_search", name="SECRET"),)
    )
    body = sent(replace(ASKED, input=(item,), tools=tools))

    assert "SECRET" not in str(body) and [tool["type"] for tool in body["tools"]] == ["function", "namespace"]  # type: ignore[attr-defined]


def test_what_tools_did_elsewhere_keeps_its_id() -> None:
    """An upstream wants one of such an item, and none of a message that another gave; what it is told is judged."""
    given = (
        InputItem(type="web_search_call", id="ws_1", status="completed", action={"type": "search", "query": "q"}),
        InputItem(type="message", id="msg_1", role="assistant", content="Yes."),
    )
    asked = replace(ASKED, input=given)

    assert [item.get("id") for item in sent(asked)["input"]] == ["ws_1", None]
    assert "ws_1" in asked.beside_chat() and "msg_1" not in asked.beside_chat()


def test_only_what_an_upstream_sealed_goes_back_to_it() -> None:
    """Not what was sealed here, nor what is thought in words; nothing where it refuses it."""
    thoughts = [
        InputItem(type="reasoning", encrypted_content=seal)
        for seal in ("gAAA", seal_of(ThinkingBlock("Hm.", "s")), None)
    ]
    asked = replace(ASKED, input=(*thoughts, InputItem(role="user", content="Hi", id="msg_1")))
    told = [sent(asked, quirks=Quirks(takes_seals=takes))["input"] for takes in (True, False)]
    message = {"type": "message", "role": "user", "content": "Hi"}

    assert told == [[{"type": "reasoning", "encrypted_content": "gAAA", "summary": []}, message], [message]]


TEXT = {"type": "output_text", "text": "words", "annotations": []}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f"}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("response.output_item.added", {"item": {"type": "message", "id": "msg_1", "content": [TEXT]}}),
        ("response.content_part.added", {"part": TEXT}),
        ("response.output_text.done", {"text": "words"}),
        ("response.reasoning_summary_text.done", {"text": "words"}),
        ("response.refusal.done", {"refusal": "words"}),
        ("response.output_item.added", {"item": CALL | {"arguments": "words"}}),
        ("response.function_call_arguments.done", {"arguments": "words"}),
        ("response.custom_tool_call_input.done", {"input": "words"}),
    ],
)
def test_what_comes_at_once_is_read_before_it_goes_out(kind: str, more: dict[str, Any]) -> None:
    """An upstream need not say its answer in pieces: what is counted and judged is then the first event that has it,
    and it alone; a part of another kind is another."""
    reader = ResponsesFormat().open_events(to_chat(ASKED))
    at = {"output_index": 0, **more}
    again = {"type": "response.content_part.done", "output_index": 0, "part": TEXT}
    found = [
        event
        for told in ({"type": kind} | at, {"type": kind} | at, again)
        for event in reader.feed(b"data: " + msgspec.json.encode(told) + b"\n\n")
        if isinstance(event, Delta)
    ]
    is_text = "reasoning" not in kind and (
        TEXT in more.get("item", {}).get("content", ()) or {"part", "text"} & set(more)
    )

    assert [words_of(each) for each in found] == ["words", "", "" if is_text else "words"]


def words_of(delta: Delta) -> str:
    """Return what is counted and judged of a piece."""
    return delta.text + delta.refusal + delta.reasoning + "".join(call.arguments for call in delta.tool_calls)


MESSAGE = {"type": "message", "id": "msg_1", "content": [TEXT]}


@pytest.mark.parametrize(
    ("piece", "last"),
    [
        ("output_text.delta", {"type": "response.output_text.done", "text": "words"}),
        ("output_text.delta", {"type": "response.content_part.done", "part": TEXT}),
        ("output_text.delta", {"type": "response.output_item.done", "item": MESSAGE}),
        ("output_text.delta", {"type": "response.completed", "response": {"output": [MESSAGE]}}),
        ("refusal.delta", {"type": "response.refusal.done", "refusal": "words"}),
        ("reasoning_text.delta", {"type": "response.content_part.done", "part": {**TEXT, "type": "reasoning_text"}}),
        ("reasoning_summary_text.delta", {"type": "response.reasoning_summary_text.done", "text": "words"}),
        ("function_call_arguments.delta", {"type": "response.function_call_arguments.done", "arguments": "words"}),
        ("function_call_arguments.delta", {"type": "response.output_item.done", "item": CALL | {"arguments": "words"}}),
    ],
)
def test_an_end_that_is_not_what_its_pieces_said_is_judged(piece: str, last: dict[str, Any]) -> None:
    """A client gets both: the end is read as the words that it has, before it goes out; one that says just what its
    pieces have is nothing more."""

    def read(*pieces: str) -> str:
        reader = ResponsesFormat().open_events(to_chat(ASKED))
        told = [{"type": f"response.{piece}", "output_index": 0, "delta": each} for each in pieces]
        feed = b"".join(b"data: " + msgspec.json.encode(each) + b"\n\n" for each in (*told, {"output_index": 0} | last))
        return "|".join(filter(None, [words_of(each) for each in reader.feed(feed) if isinstance(each, Delta)]))

    assert (read("wor", "ds"), read("other", " words")) == ("wor|ds", "other| words|words")


def test_words_of_an_event_that_is_not_known_are_judged() -> None:
    """It goes to the client as it came: providers add kinds of events."""
    reader = ResponsesFormat().open_events(to_chat(ASKED))
    told = [
        {"type": "response.audio_transcript.delta", "delta": "spoken"},
        {"type": "response.code_interpreter_call_code.done", "code": "written"},
        {"type": "response.web_search_call.searching", "item_id": "ws_1"},
    ]
    found = reader.feed(b"".join(b"data: " + msgspec.json.encode(each) + b"\n\n" for each in told))

    assert [words_of(each) for each in found if isinstance(each, Delta)] == ["spoken", "written", ""]


def test_a_call_that_ends_by_another_name_is_judged_by_it() -> None:
    """As by its first one."""
    reader = ResponsesFormat().open_events(to_chat(ASKED))
    told = [
        {"type": f"response.output_item.{step}", "output_index": 0, "item": CALL | {"name": name, "arguments": "{}"}}
        for step, name in (("added", "f"), ("done", "f"), ("done", "g"))
    ]
    found = reader.feed(b"".join(b"data: " + msgspec.json.encode(each) + b"\n\n" for each in told))
    names = [[call.name for call in each.tool_calls] for each in found if isinstance(each, Delta)]

    assert names == [["f"], [], ["g"]]
