# Calls out of text: whole or in any pieces, the same; and what is no call stays text.

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_backend.server.checkpoint.tool_calls import CLOSE, OPEN, ToolCallReader, ToolStyle

NAMES = ("look_up", "add")


def read(style: ToolStyle, pieces: Iterable[str]) -> tuple[str, list[dict[str, Any]]]:
    """Return the content and the calls that all pieces make together."""
    ids = count()
    reader = ToolCallReader(style, NAMES, lambda: f"call_{next(ids)}")
    content, calls = "", []
    for said in [*map(reader.feed, pieces), reader.finish()]:
        content += said.content
        for delta in said.calls:
            if delta.name is not None:
                assert delta.index == len(calls)
                calls.append({"id": delta.id, "name": delta.name, "arguments": ""})
            calls[delta.index]["arguments"] += delta.arguments
    assert reader.num_calls == len(calls)
    return content, calls


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


WORDS = [
    OPEN,
    CLOSE,
    "<tool",
    "{",
    "}",
    '"name"',
    '"arguments"',
    '"parameters"',
    ": ",
    ", ",
    '"look_up"',
    '"add"',
    "; ",
]
WORDS += [
    '{"name": "add", "arguments": {"a": 1}}',
    '{"name": "add", "parameters": {"b": "}"}}',
    "\n",
    " ",
    "hi",
    "\\",
    '"',
]
ARGUMENTS = st.dictionaries(
    st.text(max_size=5), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists), max_size=3
)


@given(
    st.sampled_from((ToolStyle.HERMES, ToolStyle.LLAMA)),
    st.lists(st.sampled_from(WORDS), max_size=14),
    st.lists(st.integers(0, 300), max_size=9),
)
def test_any_text_in_any_pieces_says_the_same(style: ToolStyle, words: list[str], places: list[int]) -> None:
    """Half calls, broken calls, calls in odd places: streamed and whole cannot differ."""
    text = "".join(words)

    assert read(style, cut(text, places)) == read(style, [text]) == read(style, text)


@given(
    st.sampled_from((ToolStyle.HERMES, ToolStyle.LLAMA)),
    st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3),
    st.booleans(),
)
def test_calls_come_back_as_they_were_made(style: ToolStyle, made: list[tuple[str, Any]], has_space: bool) -> None:
    """Names and arguments, whatever is in them, one call or several."""
    if style is ToolStyle.HERMES:
        texts = [f"{OPEN}\n{json.dumps({'name': n, 'arguments': a}, ensure_ascii=has_space)}\n{CLOSE}" for n, a in made]
    else:
        texts = [json.dumps({"name": n, "parameters": a}, indent=2 if has_space else None) for n, a in made]

    content, calls = read(style, "; ".join(texts) if style is ToolStyle.LLAMA else "\n".join(texts))

    assert content == ""
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == made
    assert [call["id"] for call in calls] == [f"call_{i}" for i in range(len(made))]


@pytest.mark.parametrize(
    ("style", "text", "content", "arguments"),
    [
        ("hermes", 'Look.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "Look.", ['{"a": 1}']),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", ['{"a": 1}']),
        ("hermes", '<tool_call>{"name": "add"}</tool_call> done', " done", ["{}"]),
        ("hermes", '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", ["{}"]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>', "", ['{"a": 2}']),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "</tool', "", ['{"a": "</tool']),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', None, []),
        ("hermes", "<tool_call>not json</tool_call>", None, []),
        ("hermes", '<tool_call>{"name": "ad', None, []),
        ("hermes", "a < b and <tool_cal", None, []),
        ("hermes", ' {"name": "add", "arguments": {}} \n', None, []),
        ("llama", '{"name": "add", "parameters": {"a": {"b": [1]}}}', "", ['{"a": {"b": [1]}}']),
        ("llama", ' {"name": "add", "parameters": {}};{"name": "add", "parameters": {"q":1}}', "", ["{}", '{"q":1}']),
        ("llama", '{"type": "function", "name": "add", "parameters": {"a": 1}}', "", ['{"a": 1}']),
        ("llama", '{"colour": "red", "name": "Ann"}', None, []),
        ("llama", '{"a": 1', None, []),
        ("llama", 'Call {"name": "add", "parameters": {}}', None, []),
    ],
)  # fmt: skip
def test_what_is_a_call_and_what_is_text(style: str, text: str, content: str | None, arguments: list[str]) -> None:
    """None: all of the text is content, to the last blank."""
    said, calls = read(ToolStyle(style), text)

    assert said == (text if content is None else content)
    assert [call["arguments"] for call in calls] == arguments
