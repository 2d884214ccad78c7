# Token bounds: the upper one holds for any tokenizer, the lower one for any that splits at white space.

from __future__ import annotations

import json
import math
from base64 import b64encode
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

import gpu_backend.demo_model
from billing.core.money import NanoDollars
from billing.core.prices import PriceStep, cost_of
from gateway.dialects.checks import refuse_unpriced
from gpu_backend.server.checkpoint.chat_template import ChatTemplate, read_template
from gpu_backend.server.checkpoint.tokens import TextCodec, read_json, special_tokens
from protocol.chat import (
    ChatRequest,
    Function,
    FunctionCall,
    ImagePart,
    ImageUrl,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    TextPart,
    Tool,
    ToolCall,
)
from protocol.completions import CompletionRequest
from protocol.decoding import decode
from protocol.embeddings import EmbeddingRequest
from protocol.errors import BadRequest, UnsupportedParameter
from protocol.inference import Request
from protocol.usage import Usage
from router.prompt_size.bounds import cost_most, output_limit, output_tokens_most, replies_asked, usage_most
from router.prompt_size.pictures import DEAREST, LOW_DETAIL_DEAREST
from router.prompt_size.prompt_bounds import MOST_SIZED, PART_TOKENS, bound_prompt
from router.prompt_size.prompt_lengths import LONGEST_TOKEN_BYTES, prompt_tokens_least
from tests.unit.router.examples import chat, model

DEMO_CHECKPOINT = Path(gpu_backend.demo_model.__file__).parent / "checkpoint"
texts = st.text(max_size=200)


def prompt_tokens_most(request: Request) -> int:
    return bound_prompt(request).tokens_on(model("m"))


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
    taken = [tokens(None) - bare, tokens("low") - bare]

    assert taken == [DEAREST + PART_TOKENS, LOW_DETAIL_DEAREST + PART_TOKENS]


def test_sizes_are_looked_for_in_as_many_pictures_as_a_maker_takes() -> None:
    """A body has room for a hundred thousand, and each takes time to look into: the rest count as of any size."""
    gif = "data:image/gif;base64," + b64encode(b"GIF89a\x10\x00\x10\x00").decode()
    part = ImagePart(ImageUrl(gif))
    asked = ChatRequest(model="m", messages=(Message(role="user", content=(part,) * (MOST_SIZED + 2)),))
    sizes = [picture.size for picture in bound_prompt(asked).pictures]

    assert sizes == [(16, 16)] * MOST_SIZED + [None] * 2


@given(st.integers(1, 2_000))
def test_the_parts_of_a_message_may_be_told_apart(parts: int) -> None:
    """Templates put a newline, or marks, between them: many short parts take more than their bytes."""
    content = (TextPart("a"),) * parts
    request = ChatRequest(model="m", messages=(Message(role="user", content=content),))

    assert prompt_tokens_most(request) >= len("\n".join("a" * parts)) + parts


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
        (chat(max_tokens=90_000), 1_000),  # the upstream is told the model's own
        (chat(text="word " * 7_500), 500),  # no limit is told where so much may not fit: the context is one
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
    price = replace(plain.price, cache_write=NanoDollars(2 * plain.price.input))
    request = chat(max_tokens=1)

    dearer = cost_most(request, model("m", price=price)) - cost_most(request, plain)

    assert dearer == prompt_tokens_most(request) * plain.price.input // 1_000_000


def test_the_worst_cost_looks_below_a_step_that_lowers_the_price() -> None:
    """The prompt's bound lies beyond the step, its tokens may not: the dearer side counts."""
    plain = model("m", context=100_000)
    step = PriceStep(above=1_000, input=NanoDollars(1), output=NanoDollars(1))
    request = chat(text="word " * 1_000, max_tokens=100)

    stepped = cost_most(request, model("m", context=100_000, price=replace(plain.price, steps=(step,))))

    assert stepped == cost_of(Usage(1_000, output_tokens=100), plain.price)


def test_no_more_than_the_context_is_held_for_a_prompt() -> None:
    """A prompt of more bytes than the model reads tokens is held at what it can read, each of several prompts."""
    small = model("m", context=1_000)

    assert usage_most(chat(text="x" * 5_000), small).input_tokens == 1_000
    assert usage_most(EmbeddingRequest(model="m", input=["x" * 5_000, "y"]), small).input_tokens == 2_000


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (chat(), 1_000),
        (chat(max_tokens=50), 50),
        (chat(max_completion_tokens=90_000), 1_000),
        (chat(text="x" * 10_000), 1_000),  # 5,000 tokens at the most, in any language
        (chat(text="x" * 15_000), None),  # 7,500 of 8,000: what is left is the limit
        (CompletionRequest(model="m", prompt="a"), None),
        (CompletionRequest(model="m", prompt="a", max_tokens=7), 7),
        (EmbeddingRequest(model="m", input="a"), None),
    ],
)
def test_an_upstream_is_told_the_limit_that_its_hold_covers(request_: ChatRequest, told: int | None) -> None:
    """Where the caller says none, the model's own: upstreams may be able to say more than our catalogue sells."""
    assert output_limit(request_, model("m")) == told


@given(st.integers(1, 20_000), st.none() | st.integers(1, 20_000), st.integers(1, 4))
def test_an_answer_within_what_the_upstream_is_told_is_held(size: int, limit: int | None, n: int) -> None:
    """Told a limit, it stops there; told none, the context stops it: either way the hold covers every reply."""
    request, spec = chat(text="x " * size, max_tokens=limit, n=n), model("m")
    told = output_limit(request, spec)
    room = max(0, spec.context - prompt_tokens_least(request))

    assert output_tokens_most(request, spec) == n * min(room, room if told is None else told)


def test_images_leave_room_for_a_limit() -> None:
    """They are held at the dearest provider's maximum, and a limit is told all the same: most take far less."""
    parts = tuple(ImagePart(ImageUrl(f"https://pictures.example/{n}")) for n in range(4))
    request = ChatRequest(model="m", messages=(Message(role="user", content=parts),))

    assert output_limit(request, model("m", context=128_000, max_output=16_384)) == 16_384


def test_a_chat_without_a_limit_has_the_usual_one() -> None:
    """The longest answer is for those who ask for it: a hold at that would shut out the team's other calls."""
    spec = model("m", context=200_000, max_output=64_000, default_output=16_384)

    assert output_limit(chat(), spec) == output_tokens_most(chat(), spec) == 16_384
    assert output_limit(chat(max_tokens=40_000), spec) == 40_000
    assert output_limit(chat(max_tokens=80_000), spec) == 64_000


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), texts), min_size=1, max_size=6))
def test_the_engines_own_count_lies_between_the_bounds(turns: list[tuple[str, str]]) -> None:
    """By the tokenizer and the chat template of the demo model, whatever is written."""
    messages = tuple(Message(role=role, content=text) for role, text in turns)  # type: ignore[arg-type]
    codec, template = _demo_model()
    request = ChatRequest(model="m", messages=messages)

    count = len(codec.encode(template.render(messages), most=100_000, add_special_tokens=False))

    assert prompt_tokens_least(request) <= count <= prompt_tokens_most(request)
    assert count <= bound_prompt(request).closely().tokens_on(model("m")) <= prompt_tokens_most(request)


@cache
def _demo_model() -> tuple[TextCodec, ChatTemplate]:
    config = read_json(DEMO_CHECKPOINT / "tokenizer_config.json")
    source = read_template(DEMO_CHECKPOINT, config)
    assert source is not None
    return TextCodec.load(DEMO_CHECKPOINT), ChatTemplate(source, special_tokens(config))


# What each field of a request can do to its tokens: a new field needs a decision here, and its bound or refusal.
IN_THE_PROMPT: dict[type[Struct], dict[str, Any]] = {
    ChatRequest: {
        "messages": (Message(role="user", content="much more than was said before"),),
        "tools": (Tool(Function("weather", "Tells it.", {"type": "object"})),),
        "response_format": JsonSchemaFormat(JsonSchema("w", {"type": "object"})),
    },
    CompletionRequest: {"prompt": "much more than was said before", "suffix": "and after"},
    EmbeddingRequest: {"input": "much more than was said before"},
}
IN_THE_ANSWER: dict[type[Struct], dict[str, Any]] = {
    ChatRequest: {"max_tokens": 2, "max_completion_tokens": 2, "n": 2},
    CompletionRequest: {"max_tokens": 2, "n": 2, "best_of": 2, "prompt": ["a", "b"]},
    EmbeddingRequest: {},
}
IN_NEITHER: dict[type[Struct], set[str]] = {
    ChatRequest: {
        *("model", "stream", "stream_options", "user", "safety_identifier", "metadata", "store", "prompt_cache_key"),
        *("temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias"),
        *("logprobs", "top_logprobs", "tool_choice", "parallel_tool_calls"),
        *("reasoning_effort", "verbosity"),  # how much of the answer's limit is used, and for what
        *("modalities", "audio"),  # and at which price: tests/acceptance/test_voice_answers.py
    },
    CompletionRequest: {
        *("model", "stream", "stream_options", "user", "temperature", "top_p", "seed", "stop", "logit_bias"),
        *("presence_penalty", "frequency_penalty", "logprobs"),
        "echo",  # the prompt is sent back, and billed as the prompt that it is
    },
    EmbeddingRequest: {"model", "user", "encoding_format", "dimensions"},
}
PLAIN = {
    ChatRequest: chat(text="a", max_tokens=1),
    CompletionRequest: CompletionRequest(model="m", prompt="a", max_tokens=1),
    EmbeddingRequest: EmbeddingRequest(model="m", input="a"),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_every_field_of_a_request_is_held_for(kind: type[Struct]) -> None:
    """Whatever can change a call's tokens changes its hold; what is in neither list cannot, and has its reason."""
    spec, plain = model("m"), PLAIN[kind]
    before = usage_most(plain, spec)

    for field, value in IN_THE_PROMPT[kind].items():
        assert usage_most(replace(plain, **{field: value}), spec).input_tokens > before.input_tokens, field
    for field, value in IN_THE_ANSWER[kind].items():
        base = replace(plain, max_tokens=None, max_completion_tokens=1) if field == "max_completion_tokens" else plain
        assert usage_most(replace(base, **{field: value}), spec).output_tokens == 2, field
    decided = IN_THE_PROMPT[kind].keys() | IN_THE_ANSWER[kind].keys() | IN_NEITHER[kind]
    assert set(kind.__struct_fields__) == decided


def test_parts_without_a_price_do_not_decode() -> None:
    """Audio would cost what no usage of ours tells: it is refused, not dropped."""
    body = {"type": "input_audio", "input_audio": {}}
    asked = {"model": "m", "messages": [{"role": "user", "content": [body]}]}

    with pytest.raises(BadRequest):
        decode(msgspec.json.encode(asked), ChatRequest)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("service_tier", "scale"),
        ("service_tier", 1),
        ("web_search_options", {}),
        ("prediction", {"type": "content", "content": "x"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("functions", [{"name": "f"}]),
    ],
)
def test_fields_that_change_the_price_are_refused(field: str, value: object) -> None:
    """Other rates, searches, rejected predictions, speech: nothing of ours prices them."""
    with pytest.raises(UnsupportedParameter) as caught:
        refuse_unpriced({field: value})

    assert caught.value.param == field
