# What a reply probably used when its upstream does not say.

from __future__ import annotations

import pytest

from gateway.calls.estimate import probable_prompt_tokens, tokens_of
from protocol.chat import ChatRequest, Function, FunctionCall, ImagePart, ImageUrl, Message, TextPart, Tool, ToolCall
from protocol.completions import CompletionRequest
from protocol.embeddings import EmbeddingRequest
from protocol.events import Delta, ToolCallDelta
from protocol.inference import Request


@pytest.mark.parametrize(
    ("delta", "tokens"),
    [
        (Delta(), 0),
        (Delta(text="a"), 1),
        (Delta(text=" traveller"), 1),
        (Delta(text="x" * 10_000), 2_500),
        (Delta(text="x" * 10_000, token_ids=(1, 2, 3)), 3),
        (Delta(reasoning="why " * 100), 100),
        (Delta(tool_calls=(ToolCallDelta(0, "{" + "1" * 399),)), 100),
    ],
)
def test_a_delta_stands_for_its_tokens(delta: Delta, tokens: int) -> None:
    """Named tokens count exactly, a small piece is one token, a large one counts by its bytes: nothing is read free."""
    assert tokens_of(delta) == tokens


def chat(*content: object, tools: tuple[Tool, ...] | None = None, calls: tuple[ToolCall, ...] | None = None) -> Request:
    asked = Message(role="user", content=content if len(content) > 1 else content[0])  # type: ignore[arg-type]
    called = (Message(role="assistant", tool_calls=calls),) if calls else ()
    return ChatRequest(model="m", messages=(asked, *called), tools=tools)


PICTURE = ImagePart(ImageUrl("data:image/png;base64,iVBORw0KGgo" + "A" * 400_000))
CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}, "required": ["city"]}
WEATHER = Tool(Function("get_weather", "Tells the weather of a city.", CITY))
CALL = ToolCall("call_1", FunctionCall("get_weather", '{"city": "' + "Lima " * 400 + '"}'))


@pytest.mark.parametrize(
    ("request_", "least", "most"),
    [
        (chat("hi"), 4, 12),
        (chat("word " * 1000), 1000, 1300),
        (chat(TextPart("What is this?"), PICTURE), 765, 1600),  # gpt-4o and Claude, of a screen
        (chat(TextPart("What is this?"), ImagePart(ImageUrl("https://x.example/a.png", detail="low"))), 85, 120),
        (chat("hi", tools=(WEATHER,)), 60, 400),  # OpenAI some 70, Claude 346 more
        (chat("hi", calls=(CALL,)), 500, 620),
        (CompletionRequest(model="m", prompt=["hi", "there"]), 2, 4),
        (CompletionRequest(model="m", prompt=[[1] * 900, [2] * 900]), 1800, 1800),
        (EmbeddingRequest(model="m", input=[[1] * 900, [2] * 900]), 1800, 1800),
        (EmbeddingRequest(model="m", input="word " * 1000), 1000, 1300),
    ],
    ids=[
        "a word",
        "prose",
        "a picture",
        "of low detail",
        "a tool",
        "a call",
        "texts",
        "ids",
        "ids to embed",
        "a text to embed",
    ],
)
def test_a_prompt_that_was_not_counted_is_charged_for_about_what_it_has(
    request_: Request, least: int, most: int
) -> None:
    """Not a quarter of the most that it could be, of which a hold is made: that is twelve thousand for a picture."""
    assert least <= probable_prompt_tokens(request_) <= most
