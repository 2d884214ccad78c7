# Token bounds: the upper one holds for any tokenizer, the lower one for any that splits at white space.

from __future__ import annotations

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.chat import (
    ChatRequest,
    Function,
    FunctionCall,
    ImagePart,
    ImageUrl,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    Tool,
    ToolCall,
)
from protocol.completions import CompletionRequest
from protocol.embeddings import EmbeddingRequest
from router.bounds import (
    IMAGE_TOKENS,
    LONGEST_TOKEN_BYTES,
    LOW_DETAIL_IMAGE_TOKENS,
    cost_most,
    output_tokens_most,
    prompt_tokens_least,
    prompt_tokens_most,
    replies_asked,
)
from tests.unit.router.examples import chat, model

texts = st.text(max_size=200)


@given(st.lists(texts, max_size=4), st.lists(texts, max_size=2))
def test_the_most_covers_every_byte_of_what_is_written(contents: list[str], arguments: list[str]) -> None:
    """Each byte may become a token: of contents, names, calls and their arguments, however a template quotes them."""
    calls = tuple(ToolCall("call_1", FunctionCall("look_up", text)) for text in arguments)
    turns = [Message(role="user", content=text, name="ann") for text in contents]
    request = ChatRequest(model="m", messages=(*turns, Message(role="assistant", tool_calls=calls)))
    written = sum(len(text.encode()) + 3 for text in contents)
    written += sum(len(json.dumps(text, ensure_ascii=False).encode()) + 13 for text in arguments)

    assert prompt_tokens_most(request) >= written


def test_a_tools_result_counts_as_quoted() -> None:
    """Templates write results as JSON strings, where every quote and newline takes two bytes."""
    result = '"\n' * 500
    request = ChatRequest(model="m", messages=(Message(role="tool", content=result, tool_call_id="c"),))

    assert prompt_tokens_most(request) >= len(json.dumps(result))


def test_tools_and_schemas_count_in_their_longest_form() -> None:
    """A template may write a definition as indented JSON, beside instructions of its own."""
    schema = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}}}
    tool = Tool(Function("weather", "Tells it.", schema))
    indented = json.dumps(msgspec.to_builtins(tool), indent=4)
    bare = prompt_tokens_most(chat())

    assert prompt_tokens_most(chat(tools=(tool, tool))) - bare >= 2 * len(indented)
    assert prompt_tokens_most(chat(response_format=JsonSchemaFormat(JsonSchema("w", schema)))) - bare >= len(
        json.dumps(schema, indent=4)
    )


def test_images_count_at_the_dearest_providers_maximum() -> None:
    """An image's tokens depend on its size, not on how many bytes its address takes."""

    def tokens(detail: str | None) -> int:
        image = ImagePart(ImageUrl("data:image/png;base64," + "A" * 1_000_000, detail))  # type: ignore[arg-type]
        return prompt_tokens_most(ChatRequest(model="m", messages=(Message(role="user", content=(image,)),)))

    bare = prompt_tokens_most(chat(text=""))

    assert [tokens(None) - bare, tokens("low") - bare] == [IMAGE_TOKENS, LOW_DETAIL_IMAGE_TOKENS]


def test_token_ids_count_exactly() -> None:
    """Nobody can make more or fewer tokens of them: all prompts are billed, the longest must fit."""
    request = CompletionRequest(model="m", prompt=[[1, 2, 3], [4] * 10])

    assert (prompt_tokens_most(request), prompt_tokens_least(request)) == (13, 10)
    assert prompt_tokens_most(EmbeddingRequest(model="m", input=[7, 8])) == 2


@given(st.lists(st.sampled_from(["word", "Wort", "слово", "x"]), max_size=50), st.sampled_from([" ", "\n", " \n \t "]))
def test_the_least_is_never_more_than_the_words(words: list[str], gap: str) -> None:
    """White space makes no token that a tokenizer could not save; words make one each."""
    text = gap.join(words)

    assert prompt_tokens_least(chat(text=text)) <= max(len(words), math.ceil(len(text.encode()) / LONGEST_TOKEN_BYTES))
    assert prompt_tokens_least(chat(text=text)) >= len(words) - 1


@given(texts)
def test_the_least_is_never_above_the_most(text: str) -> None:
    """The two bounds hold the truth between them, for each kind of request."""
    for request in (
        chat(text=text),
        CompletionRequest(model="m", prompt=[text]),
        EmbeddingRequest(model="m", input=text),
    ):
        assert prompt_tokens_least(request) <= prompt_tokens_most(request)


def test_text_without_spaces_counts_by_the_longest_token() -> None:
    """However long the tokens are, a megabyte takes some thousands."""
    assert prompt_tokens_least(chat(text="語" * 2_560)) == 3 * 2_560 // LONGEST_TOKEN_BYTES


def test_counting_stops_once_there_is_enough() -> None:
    """A huge prompt is not read to its end to learn that it is too long."""
    text = "word " * 2_000_000

    assert 1_000 < prompt_tokens_least(chat(text=text), enough=1_000) < 300_000


@pytest.mark.parametrize(
    ("request_", "tokens"),
    [
        (chat(), 1_000),
        (chat(max_tokens=50), 50),
        (chat(max_completion_tokens=50, n=3), 150),
        (chat(max_tokens=90_000), 7_999),  # "Hello" takes one at the least
        (CompletionRequest(model="m", prompt=["a", "b"], max_tokens=10, n=2, best_of=5), 100),
        (CompletionRequest(model="m", prompt=[1] * 7_995), 5),
        (CompletionRequest(model="m", prompt=[[1] * 7_995, [1]]), 2_000),
        (CompletionRequest(model="m", prompt="a", max_tokens=0), 0),
        (EmbeddingRequest(model="m", input="a"), 0),
    ],
)
def test_output_is_bounded_by_limit_model_and_context(request_: ChatRequest, tokens: int) -> None:
    """Each reply ends at the caller's limit, else the model's, and at the end of the context; all replies count."""
    assert output_tokens_most(request_, model("m")) == tokens


def test_replies_are_counted_as_they_are_billed() -> None:
    """``best_of`` is generated even where ``n`` of them are returned, for each prompt of the request."""
    assert replies_asked(CompletionRequest(model="m", prompt=["a", "b", "c"], n=2, best_of=4)) == 12
    assert replies_asked(chat(n=2)) == 2
    assert replies_asked(EmbeddingRequest(model="m", input="a")) == 0


def test_the_worst_cost_takes_the_dearest_kind_of_input() -> None:
    """Where writing to a prompt cache costs more than input, the whole prompt may be written."""
    plain = model("m")
    price = type(plain.price)(input=plain.price.input, output=plain.price.output, cache_write=2 * plain.price.input)  # type: ignore[arg-type]
    request = chat(max_tokens=1)

    dearer = cost_most(request, model("m", price=price)) - cost_most(request, plain)

    assert dearer == prompt_tokens_most(request) * plain.price.input // 1_000_000
