# Fields inside of a body's items that its type does not know are found, and nothing else.

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import Struct

from protocol.chat import ChatRequest
from protocol.decoding import decode_with_unread
from protocol.messages import MessagesRequest
from protocol.unread import MOST_TOLD

IMAGE = {"type": "image_url", "image_url": {"url": "https://a/b.png", "size": 1}}
CHAT = {
    "messages": [
        {"role": "user", "content": "Hi", "audio": None, "annotations": [], "mood": "glad"},
        {"role": "user", "content": [{"type": "text", "text": "Hi", "lang": "en"}, IMAGE], "mood": "sad"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"any": {"thing": 1}}, "cost": 0}}],
    "tool_choice": {"type": "function", "function": {"name": "f", "why": "x"}},
}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "b", "lang": "en"}]}
MESSAGE = {
    "max_tokens": 9,
    "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "scope": "global"}}],
    "messages": [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": {"y": 1}}}]},
        {"role": "user", "content": [RESULT]},
    ],
    "thinking": {"type": "adaptive", "mode": "deep"},
}


@pytest.mark.parametrize(
    ("type", "body", "names"),
    [
        (
            ChatRequest,
            CHAT,
            [
                *("messages.mood", "messages.content.lang", "messages.content.image_url.size"),
                *("tools.function.cost", "tool_choice.function.why"),
            ],
        ),
        (
            MessagesRequest,
            MESSAGE,
            ["system.cache_control.scope", "messages.content.content.lang", "thinking.mode"],
        ),
    ],
)
def test_fields_inside_are_found(type: Any, body: dict[str, Any], names: list[str]) -> None:
    """Wherever they stand, each once; what is null or empty means nothing, and free JSON has no unknown field."""
    _, extra, unread = decode_with_unread(json.dumps({"model": "m", "top": 1, **body}).encode(), type)

    assert sorted(unread) == sorted(names) and extra == {"top": 1}


def test_very_many_are_as_good_as_some() -> None:
    """Names that a caller made up cost no memory without end."""
    many = {"role": "user", "content": "Hi"} | {f"field{number}": 1 for number in range(1000)}
    _, _, unread = decode_with_unread(json.dumps({"model": "m", "messages": [many]}).encode(), ChatRequest)

    assert len(unread) == MOST_TOLD


class Tree(Struct):
    model: str
    kids: tuple[Tree, ...] = ()


def test_items_of_items_are_looked_into() -> None:
    """A struct may hold others of its own kind, at any depth."""
    tree: dict[str, Any] = {"model": "m", "kids": [{"model": "m", "kids": [{"model": "m", "leaf": 1}]}]}

    assert decode_with_unread(json.dumps(tree).encode(), Tree)[2] == ("kids.kids.leaf",)


def test_a_field_without_a_name_is_unknown_too() -> None:
    """In a struct without a tag as in one with it."""
    tree: dict[str, Any] = {"model": "m", "kids": [{"model": "m", "": 1}]}

    assert decode_with_unread(json.dumps(tree).encode(), Tree)[2] == ("kids.",)
