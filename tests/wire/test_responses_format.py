# How a response is asked of an upstream's own Responses API.

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from gateway.core.settings import DROPPABLE
from gateway.upstreams.responses.wire_format import ResponsesFormat
from gateway.upstreams.wire.quirks import Quirks
from gateway.upstreams.wire.unsayable import without_fields
from protocol.chat import ThinkingBlock
from protocol.responses import InputItem, ReasoningConfig, ResponsesRequest, ResponsesTool, TextConfig
from protocol.responses_to_chat import seal_of, to_chat
from tests.wire.traffic import asking

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
