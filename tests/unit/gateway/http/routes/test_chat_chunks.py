# The chunks of a chat as an upstream began them: whether a reply's role comes with an empty text tells clients whether
# a text follows.

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.dialects.chat import ChatWriter
from gateway.dialects.completions import CompletionWriter
from gateway.inference.reply import Reply
from gateway.upstreams.openai.wire_format import OpenAIFormat
from protocol.chat import FinishReason
from protocol.completions import CompletionRequest
from protocol.events import Delta
from tests.wire.openai_traffic import STOP, call_piece, chunk
from tests.wire.traffic import CHAT, read_stream

REPLY = cast(Reply, SimpleNamespace(target=SimpleNamespace(model=SimpleNamespace(name="m"))))
CALL = chunk(call_piece(0, "{}", id="call_1", name="clock"))


def written(*events: Any) -> list[dict[str, Any]]:
    """Return the first choice of each chunk that a client gets."""
    chunks = ChatWriter(CHAT, "0-1", 1).pieces(REPLY, list(events)).decode().split("\n\n")[:-1]
    return [json.loads(said.removeprefix("data: "))["choices"][0] for said in chunks]


def passed_on(*pieces: bytes) -> list[dict[str, Any]]:
    """Return the deltas that a client gets of an upstream's chunks."""
    events, _ = read_stream(OpenAIFormat().open_events(CHAT), [*pieces, STOP])
    return [choice["delta"] for choice in written(*(event for event in events if isinstance(event, Delta)))]


@pytest.mark.parametrize("role", [{"role": "assistant", "content": None}, {"role": "assistant"}])
def test_a_role_without_a_text_stays_without(role: dict[str, Any]) -> None:
    """Null before a call begins no text: the AI SDK makes a part of the answer of an empty one."""
    deltas = passed_on(chunk(role), CALL)

    assert [delta.get("content") for delta in deltas] == [None, None, None]
    assert deltas[0] == {"role": "assistant"}


def test_a_role_with_an_empty_text_keeps_it() -> None:
    """As OpenAI begins a text."""
    assert passed_on(chunk({"role": "assistant", "content": ""}), chunk({"content": "Hi"})) == [
        {"role": "assistant", "content": ""},
        {"content": "Hi"},
        {},
    ]


def test_a_call_that_comes_with_the_role_has_no_text() -> None:
    """Whatever the upstream wrote beside it."""
    (first, _) = passed_on(chunk({"role": "assistant", "content": "", **call_piece(0, "{}", id="c", name="clock")}))

    assert "content" not in first and first["tool_calls"][0]["id"] == "c"


def test_a_reply_that_says_nothing_has_an_empty_text() -> None:
    """Its one chunk has role, text and reason."""
    (choice,) = written(Delta(finish_reason=FinishReason.STOP))

    assert (choice["delta"], choice["finish_reason"]) == ({"role": "assistant", "content": ""}, "stop")


def test_what_says_nothing_to_a_client_makes_no_chunk() -> None:
    """The ids of tokens that complete no character are the gateway's own business."""
    said = [Delta(text="a"), Delta(token_ids=(7,), gpu_seconds=0.5), Delta(finish_reason=FinishReason.STOP)]
    completions = CompletionWriter(CompletionRequest(model="m", prompt="a"), "0-1", 1).pieces(REPLY, list(said))

    assert [choice["delta"] for choice in written(*said)] == [{"role": "assistant", "content": "a"}, {}]
    assert completions.count(b"data: ") == 2
