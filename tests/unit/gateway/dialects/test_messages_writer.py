# The events of a streamed message build what the upstream said, in whatever order it said it.

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from billing.core.holds import Settlement
from gateway.dialects.messages_writer import MessagesWriter
from gateway.inference.reply import Reply
from protocol.chat import FinishReason
from protocol.events import Delta, Event, ReplyEnd, ToolCallDelta, UsageReport
from protocol.messages import MessagesRequest
from protocol.usage import Usage
from tests.support.message_stream import built_of

REPLY = cast(
    Reply,
    SimpleNamespace(
        call=SimpleNamespace(request_id="0-1"),
        target=SimpleNamespace(model=SimpleNamespace(name="m")),
        record=SimpleNamespace(cost_nanousd=1),
        meter=SimpleNamespace(so_far=lambda: Settlement(Usage(), 0)),
    ),
)
END: list[Event] = [Delta(finish_reason=FinishReason.STOP), UsageReport(Usage(3, 0, 5)), ReplyEnd()]
ASKED = MessagesRequest(model="m", max_tokens=1, messages=())
words = st.text(min_size=1, max_size=4)
steps = st.one_of(
    words.map(lambda text: Delta(text=text)),
    words.map(lambda text: Delta(refusal=text)),
    words.map(lambda text: Delta(reasoning=text)),
    words.map(lambda text: Delta(text=text, reasoning=text)),
    st.tuples(st.integers(0, 2), words).map(lambda one: ("piece", *one)),
)


def built(*deltas: Delta) -> dict[str, Any]:
    dialect = MessagesWriter(ASKED, "0-1", 1)
    return built_of(b"".join(dialect.pieces(REPLY, [event]) for event in [*deltas, *END]).decode())


@given(st.lists(steps, max_size=20))
def test_words_thoughts_and_calls_come_whole_in_any_order(moves: list[Any]) -> None:
    """Pieces of calls between each other and between words: each call is one block, and no word is lost."""
    pieces: dict[int, str] = {}
    deltas = []
    for move in moves:
        if isinstance(move, Delta):
            deltas.append(move)
            continue
        _, index, text = move
        head = {} if index in pieces else {"id": f"call_{index}", "name": f"tool{index}"}
        pieces[index] = pieces.get(index, "") + text
        deltas.append(Delta(tool_calls=(ToolCallDelta(index, json.dumps(text)[1:-1], **head),)))
    deltas = [_quoted(delta, pieces) for delta in deltas]
    content = built(*deltas, Delta(tool_calls=tuple(ToolCallDelta(index, '"}') for index in pieces)))["content"]

    assert "".join(block.get("text", "") for block in content) == "".join(d.text or d.refusal for d in deltas)
    assert "".join(block.get("thinking", "") for block in content) == "".join(d.reasoning for d in deltas)
    assert {block["id"]: block["input"]["x"] for block in content if block["type"] == "tool_use"} == {
        f"call_{index}": text for index, text in pieces.items()
    }


def call(index: int, arguments: str, name: str | None = None) -> Delta:
    return Delta(tool_calls=(ToolCallDelta(index, arguments, name and f"call_{index}", name),))


def test_a_call_is_told_as_soon_as_the_one_before_it_is_whole() -> None:
    """A client may begin to work on the second call while the third is being written."""
    dialect = MessagesWriter(ASKED, "0-1", 1)
    moves = [call(0, "", "clock"), call(0, '{"city":'), call(0, '"Bern"}'), call(1, "", "weather"), call(1, '{"a":1}')]
    written = [dialect.pieces(REPLY, [move]).decode() for move in [*moves, Delta(text="There."), call(1, " ")]]

    assert [sorted(set(re.findall(r"content_block_\w+", events))) for events in written] == [
        ["content_block_start"],
        ["content_block_delta"],
        ["content_block_delta"],
        ["content_block_start", "content_block_stop"],
        ["content_block_delta"],
        ["content_block_delta", "content_block_start", "content_block_stop"],
        [],
    ]


def test_calls_that_come_at_once_wait_for_each_other() -> None:
    """Pieces of two calls by turns: the second waits until the first is whole, and then comes with all that it has."""
    moves = [call(0, '{"a":', "one"), call(1, '{"b":', "two"), call(0, "1}"), call(1, "2}")]

    assert [block["input"] for block in built(*moves)["content"]] == [{"a": 1}, {"b": 2}]


def test_each_signed_thought_is_a_block_of_its_own() -> None:
    """Merged, neither signature would be good."""
    thoughts = [Delta(reasoning="a"), Delta(signature="A"), Delta(reasoning="b"), Delta(signature="B")]
    content = built(*thoughts, Delta(redacted="C"), Delta(redacted="D"), Delta(text="Yes."))["content"]

    assert content == [
        {"type": "thinking", "thinking": "a", "signature": "A"},
        {"type": "thinking", "thinking": "b", "signature": "B"},
        {"type": "redacted_thinking", "data": "C"},
        {"type": "redacted_thinking", "data": "D"},
        {"type": "text", "text": "Yes."},
    ]


def _quoted(delta: Delta, pieces: dict[int, str]) -> Delta:
    """Begin each call's arguments as ``{"x": "``; the test ends them."""
    if not delta.tool_calls or delta.tool_calls[0].id is None:
        return delta
    [piece] = delta.tool_calls
    return Delta(tool_calls=(ToolCallDelta(piece.index, '{"x": "' + piece.arguments, piece.id, piece.name),))
