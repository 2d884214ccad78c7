# Streamed pieces add up to the whole reply that a plain call would have given.

from __future__ import annotations

import time

import msgspec
import pytest
from msgspec import Raw

from gateway.calls.accumulate import Collector
from protocol.chat import ChatReply, ChatRequest, FinishReason, Message
from protocol.completions import CompletionReply, CompletionRequest
from protocol.events import Delta, ToolCallDelta

CHAT = ChatRequest(model="m", messages=(Message(role="user", content="hi"),))


def collected(*deltas: Delta) -> ChatReply:
    collector = Collector(CHAT)
    for delta in deltas:
        collector.add(delta)
    reply = collector.reply()
    assert isinstance(reply, ChatReply)
    return reply


def test_text_of_several_choices_is_joined_by_index() -> None:
    """Deltas of different choices may come in any order; choices are answered in the order of their index."""
    reply = collected(
        Delta(1, "B"), Delta(0, "a"), Delta(1, "b", finish_reason=FinishReason.STOP), Delta(0, "A"), Delta(0, "!")
    )

    assert [(choice.index, choice.message.content) for choice in reply.choices] == [(0, "aA!"), (1, "Bb")]


def test_a_tool_call_without_arguments_has_an_empty_object() -> None:
    """Arguments are a JSON text; no arguments are "{}"."""
    reply = collected(Delta(0, tool_calls=(ToolCallDelta(0, id="c1", name="now"),)))
    message = reply.choices[0].message

    assert message.content is None
    assert message.tool_calls is not None
    assert (message.tool_calls[0].id, message.tool_calls[0].function.arguments) == ("c1", "{}")


def test_pieces_of_parallel_tool_calls_are_kept_apart() -> None:
    """Pieces of arguments belong to the call of their index."""
    reply = collected(
        Delta(0, tool_calls=(ToolCallDelta(0, id="a", name="f"), ToolCallDelta(1, id="b", name="g"))),
        Delta(0, tool_calls=(ToolCallDelta(1, '{"y":'), ToolCallDelta(0, '{"x":1}'))),
        Delta(0, tool_calls=(ToolCallDelta(1, "2}"),), finish_reason=FinishReason.TOOL_CALLS),
    )
    calls = reply.choices[0].message.tool_calls

    assert calls is not None
    assert [(call.function.name, call.function.arguments) for call in calls] == [("f", '{"x":1}'), ("g", '{"y":2}')]
    assert reply.choices[0].finish_reason is FinishReason.TOOL_CALLS


def test_an_empty_reply_has_empty_text() -> None:
    """A reply that ends at once has text, of no length."""
    reply = collected(Delta(0, finish_reason=FinishReason.STOP))

    assert reply.choices[0].message.content == ""


def test_long_logprobs_are_joined_while_they_come() -> None:
    """What is left to do at the end takes less than what was done piece by piece: nobody else's answer waits for it."""
    entry = {"token": "tok", "logprob": -0.5, "bytes": [116], "top_logprobs": [{"token": "a", "logprob": -1.25}] * 20}
    piece = Raw(msgspec.json.encode({"content": [entry], "refusal": None}))
    collector, begun = Collector(CHAT), time.thread_time()
    for _ in range(2000):
        collector.add(Delta(0, "a", logprobs=piece))
    came = time.thread_time()
    reply = collector.reply()
    joined = time.thread_time()

    assert joined - came < came - begun
    assert isinstance(reply, ChatReply)
    assert msgspec.json.decode(reply.choices[0].logprobs or b"") == {"content": [entry] * 2000, "refusal": None}


@pytest.mark.parametrize("odd", [b"[1]", b'{"content":5}', b'{"content":[1}', b'{"content":["\xff"]}', b"7"])
def test_scores_that_are_none_are_left_out(odd: bytes) -> None:
    """An answer is not lost over its scores, and keeps those that can be read."""
    pieces = [b'{"content":[ ]}', odd, b' {"content": [1, 2] } ', b'{"content":null}']
    reply = collected(*(Delta(0, "a", logprobs=Raw(piece)) for piece in pieces))

    assert msgspec.json.decode(reply.choices[0].logprobs or b"") == {"content": [1, 2]}


def test_logprobs_of_all_pieces_are_joined() -> None:
    """Each list of a logprobs object goes on from piece to piece."""
    reply = collected(
        Delta(0, "a", logprobs=Raw(b'{"content":[1],"refusal":null}')),
        Delta(0, "b", logprobs=Raw(b'{"content":[2,3],"refusal":null}')),
    )

    assert msgspec.json.decode(reply.choices[0].logprobs or b"") == {"content": [1, 2, 3], "refusal": None}


def test_completions_collect_their_text() -> None:
    """A completion's pieces are text too."""
    collector = Collector(CompletionRequest(model="m", prompt="Once"))
    collector.add(Delta(0, " upon"))
    collector.add(Delta(0, " a time", finish_reason=FinishReason.LENGTH))
    reply = collector.reply()

    assert isinstance(reply, CompletionReply)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (" upon a time", FinishReason.LENGTH)
