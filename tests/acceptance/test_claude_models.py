# A model behind Anthropic's dialect answers OpenAI clients like any other: text, streams, tools, schemas, cost.

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.support.anthropic_rules import sign
from tests.support.scripted_upstream import ScriptedUpstream

ASK: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say something."}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(autouse=True)
def _strict(upstream: ScriptedUpstream) -> Iterator[None]:
    upstream.forget()
    yield
    assert upstream.violations == []


def test_an_answer_is_whole_streamed_and_priced(openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """Plain and streamed say the same; cached tokens are part of the prompt and cost their own price."""
    upstream.script("cached_tokens=5")
    plain = openai.chat.completions.create(model="claude", messages=ASK)
    chunks = list(
        openai.chat.completions.create(
            model="claude", messages=ASK, stream=True, stream_options={"include_usage": True}
        )
    )
    usage = plain.usage

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        plain.choices[0].message.content
    )
    assert plain.choices[0].finish_reason == "stop"
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 5
    dollars = Decimal(usage.prompt_tokens - 5 + 2 * usage.completion_tokens) + 5 * Decimal("0.5")
    assert Decimal(usage.cost_usd) == dollars / 1_000_000  # type: ignore[attr-defined]
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == usage.total_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_their_results_understood(openai: OpenAI, stream: bool) -> None:
    """Two calls at once, one of them without arguments, go round: call, result, answer."""
    ask: Any = [{"role": "user", "content": "Ask weather and clock."}]
    calls: list[dict[str, Any]] = []
    if stream:
        for chunk in openai.chat.completions.create(model="claude", messages=ask, tools=[WEATHER, CLOCK], stream=True):
            for piece in chunk.choices[0].delta.tool_calls or ():
                function = piece.function
                assert function is not None
                if piece.id:
                    head = {"name": function.name, "arguments": ""}
                    calls.append({"id": piece.id, "type": "function", "function": head})
                calls[piece.index]["function"]["arguments"] += function.arguments or ""
    else:
        message = (
            openai.chat.completions.create(model="claude", messages=ask, tools=[WEATHER, CLOCK]).choices[0].message
        )
        calls = [call.model_dump() for call in message.tool_calls or ()]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "fine"} for call in calls]
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    last = openai.chat.completions.create(model="claude", messages=[*ask, turn, *results], tools=[WEATHER, CLOCK])

    assert [call["function"]["name"] for call in calls] == ["weather", "clock"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Zürich 🚪"}, {}]
    assert last.choices[0].message.content


def test_an_answer_follows_a_schema(openai: OpenAI) -> None:
    """A JSON schema is passed on in Anthropic's own way."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS, "strict": True}}
    reply = openai.chat.completions.create(model="claude", messages=ASK, response_format=form)

    assert json.loads(reply.choices[0].message.content or "").keys() == {"city"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_a_json_object(openai: OpenAI, stream: bool) -> None:
    """Without a schema it comes as the input of a tool, and is written as the text that the caller asked for."""
    asked: Any = {"model": "claude", "messages": ASK, "response_format": {"type": "json_object"}}
    if stream:
        chunks = list(openai.chat.completions.create(stream=True, **asked))
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        text, calls = "".join(delta.content or "" for delta in deltas), [delta.tool_calls for delta in deltas]
        why = chunks[-1].choices[0].finish_reason
    else:
        choice = openai.chat.completions.create(**asked).choices[0]
        text, calls, why = choice.message.content or "", [choice.message.tool_calls], choice.finish_reason

    assert isinstance(json.loads(text), dict) and not any(calls) and why == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_keeps_the_callers_name(openai: OpenAI, upstream: ScriptedUpstream, stream: bool) -> None:
    """A name and an id that Claude does not take go out in a safe form, and the name comes back as it was given."""
    odd: Any = WEATHER | {"function": WEATHER["function"] | {"name": "städte.wetter"}}
    call: Any = {"id": "functions.x:0", "type": "function", "function": {"name": "städte.wetter", "arguments": "{}"}}
    turns = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns += [{"role": "tool", "tool_call_id": "functions.x:0", "content": "fine"}, {"role": "user", "content": " "}]
    asked: Any = {"model": "claude", "messages": turns, "tools": [odd], "tool_choice": "required"}
    if stream:
        chunks = [each for each in openai.chat.completions.create(stream=True, **asked) if each.choices]
        pieces = [piece for each in chunks for piece in each.choices[0].delta.tool_calls or ()]
        names = [piece.function.name for piece in pieces if piece.function and piece.function.name]
    else:
        message = openai.chat.completions.create(**asked).choices[0].message
        names = [made.function.name for made in message.tool_calls or () if made.type == "function"]

    assert names == ["städte.wetter"]
    assert all("wetter_" in tool["name"] for tool in (upstream.requests[-1].body or {})["tools"])


def test_wishes_that_claude_lacks_are_left_out_and_told(openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """A nudge to tokens of another vocabulary is one; a ban is a meaning, and is refused by its name."""
    asked: Any = {"model": "claude", "messages": ASK, "seed": 1, "logit_bias": {"7": 5}, "frequency_penalty": 0.1}
    answer = openai.chat.completions.with_raw_response.create(**asked)
    with pytest.raises(BadRequestError) as caught:
        openai.chat.completions.create(**asked | {"logit_bias": {"7": -100}})

    assert answer.headers["x-tollgate-dropped"] == "seed, frequency_penalty, logit_bias"
    assert caught.value.param == "logit_bias" and len(upstream.requests) == 1


def test_what_the_model_does_not_know_is_refused_by_name(openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """The answer names the parameter, and nothing was asked upstream."""
    with pytest.raises(BadRequestError) as caught:
        openai.chat.completions.create(model="claude", messages=ASK, logprobs=True)

    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "logprobs")
    assert upstream.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_survives_a_round_of_tools(openai: OpenAI, upstream: ScriptedUpstream, stream: bool) -> None:
    """The message goes back as the package gave it out, and the model finds what it thought, verbatim and signed."""
    upstream.script("thinking=Hm. 東京? Ask them both.")
    ask: Any = [{"role": "user", "content": "Ask weather and clock."}]
    asked: Any = {"model": "claude", "tools": [WEATHER, CLOCK], "reasoning_effort": "low"}
    if stream:
        with openai.chat.completions.stream(messages=ask, **asked) as events:
            message = events.until_done().get_final_completion().choices[0].message
    else:
        message = openai.chat.completions.create(messages=ask, **asked).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in message.tool_calls or ()]
    turn: Any = message.model_dump(exclude_none=True)
    for call in turn["tool_calls"]:
        call["function"].pop("parsed_arguments", None)  # the helper's own
    openai.chat.completions.create(messages=[*ask, turn, *results], **asked)
    openai.chat.completions.create(messages=[*ask, turn, *results], **asked | {"model": "small"})
    to_claude, to_small = [request.body or {} for request in upstream.requests[-2:]]
    first, *others = to_claude["messages"][1]["content"]

    assert message.reasoning_content == "Hm. 東京? Ask them both."  # type: ignore[union-attr]
    assert first == {"type": "thinking", "thinking": "Hm. 東京? Ask them both.", "signature": sign(first["thinking"])}
    assert [block["type"] for block in others] == ["tool_use", "tool_use"]
    assert "thinking_blocks" not in to_small["messages"][1]
