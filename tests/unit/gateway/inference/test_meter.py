# What a reply is charged for, by what its upstream counted and when: every format, every order of counts and output.

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from gateway.calls.call import Call
from gateway.calls.estimate import spoken_tokens
from gateway.core.principals import Caller, Team
from gateway.inference.meter import Meter
from gateway.upstreams.anthropic.events import AnthropicEvents
from gateway.upstreams.openai.events import OpenAIEvents
from gateway.upstreams.wire.base import EventStream
from protocol.chat import ChatReply, ChatRequest, Choice, FinishReason, Message, ReplyMessage, Spoken
from protocol.events import Delta, UsageReport
from protocol.inference import WholeReply
from protocol.usage import Usage
from router import RoutingOptions
from router.catalog.targets import Endpoint, Target
from router.prompt_size.prompt_bounds import bound_prompt
from tests.support.house import model

WORDS = 500  # pieces of output, a token each


def meter_of(told: Usage | None = None, said: str = "hi", prompt: Usage | None = None) -> Meter:
    request = ChatRequest(model="small", messages=(Message(role="user", content=said),))
    call = Call(
        request_id="0196090a-7c00-7000-8000-000000000000",
        caller=Caller(team=Team(id="a", name="A"), key_id="k"),
        endpoint="chat.completions",
        request=request,
        routing=RoutingOptions(),
        created_at=0.0,
        started=0.0,
    )
    target = Target(model("small"), Endpoint("here", "http://upstream"))
    answering = SimpleNamespace(target=target, usage=told, prompt=prompt, is_kept=False)
    source = SimpleNamespace(answering=answering, tokens_made=0)
    return Meter(call, cast(Any, source), bound_prompt(request).closely())


def charged(events: EventStream, *pieces: bytes) -> Usage:
    """Return what a meter charges for a stream of ``pieces``."""
    meter = meter_of()
    for piece in pieces:
        for event in events.feed(piece):
            if isinstance(event, Delta):
                meter.take(event)
            elif isinstance(event, UsageReport):
                meter.tell(event.usage)
    assert meter.so_far().usage == meter.usage()
    return meter.usage()


def claude(kind: str, **more: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()


def chunk(text: str = "", *, output: int | None = None, finish: str | None = None) -> bytes:
    usage = None if output is None else {"prompt_tokens": 10, "completion_tokens": output}
    choices = [{"index": 0, "delta": {"content": text}, "finish_reason": finish}] if text or finish else []
    return f"data: {json.dumps({'choices': choices, 'usage': usage})}\n\n".encode()


START = claude("message_start", message={"usage": {"input_tokens": 10, "output_tokens": 1}})
CLAUDE_SAYS = claude("content_block_delta", index=0, delta={"type": "text_delta", "text": "word "})


@pytest.mark.parametrize(
    ("usage", "output"),
    [
        ({}, WORDS),
        ({"usage": None}, WORDS),
        ({"usage": {"input_tokens": 12}}, WORDS),
        ({"usage": {"output_tokens": 0}}, WORDS),
        ({"usage": {"output_tokens": 420}}, 420),
        ({"usage": {"output_tokens": 700}}, 700),
    ],
    ids=["none", "null", "input only", "zero", "less", "more"],
)
def test_a_claude_is_charged_its_last_count_of_output_or_what_went_past(usage: dict[str, Any], output: int) -> None:
    """The count that begins a message is a floor; only one that names output at the end replaces what went past."""
    end = claude("message_delta", delta={"stop_reason": "end_turn"}, **usage)

    assert charged(AnthropicEvents(), START, *[CLAUDE_SAYS] * WORDS, end).output_tokens == output


@pytest.mark.parametrize(
    ("pieces", "output"),
    [
        ([chunk(output=1), *[chunk("word ")] * WORDS, chunk(finish="stop")], WORDS),
        ([chunk("word ", output=1), *[chunk("word ")] * (WORDS - 1), chunk(finish="stop")], WORDS),
        ([chunk(output=900), *[chunk("word ")] * WORDS, chunk(finish="stop")], 900),
        ([*[chunk("word ", output=0)] * WORDS, chunk(finish="stop", output=0)], WORDS),
        ([*[chunk("word ")] * WORDS, chunk(finish="stop"), chunk(output=420)], 420),
        ([chunk("word ", output=count + 1) for count in range(WORDS)], WORDS),
    ],
    ids=[
        "told first",
        "told with the first word",
        "a high floor",
        "zeros",
        "told last, believed",
        "told with each word",
    ],
)
def test_an_openai_stream_is_charged_its_last_count_or_what_went_past(pieces: list[bytes], output: int) -> None:
    """A count from before the output ended is a floor, a count of nothing is none, and the last one is believed."""
    assert charged(OpenAIEvents(), *pieces).output_tokens == output


def test_a_count_before_the_output_keeps_what_it_says_of_the_prompt() -> None:
    """Only the output is what went past; the prompt and its cached part stay as they were told."""
    cached = claude(
        "message_start", message={"usage": {"input_tokens": 10, "cache_read_input_tokens": 90, "output_tokens": 1}}
    )
    usage = charged(AnthropicEvents(), cached, *[CLAUDE_SAYS] * WORDS)

    assert (usage.input_tokens, usage.cached_input_tokens, usage.output_tokens) == (100, 90, WORDS)


@pytest.mark.parametrize(("told", "output"), [(None, 500), (0, 500), (420, 420)])
def test_a_whole_answer_with_words_is_never_charged_for_none(told: int | None, output: int) -> None:
    """An upstream that counts no output beside 2,000 bytes of it has not counted."""
    message = ReplyMessage(content="word" * 500, refusal=None, tool_calls=None, reasoning_content=None)
    whole: WholeReply = ChatReply(choices=(Choice(index=0, message=message, finish_reason=FinishReason.STOP),))
    meter = meter_of(None if told is None else Usage(10, output_tokens=told))
    meter.take_whole(whole)

    assert meter.usage().output_tokens == output


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_prompt_that_was_not_counted_is_charged_no_more_than_was_held_for_it(is_whole: bool) -> None:
    """A quarter of the bytes is about right for prose; a page of spaces has fewer tokens, and was held for fewer."""
    said = " " * 20_000
    meter = meter_of(said=said)
    held = bound_prompt(ChatRequest(model="small", messages=(Message(role="user", content=said),))).closely()
    if is_whole:
        meter.take_whole(ChatReply(choices=()))

    assert meter.usage().input_tokens == held.tokens_on(model("small")) < len(said) // 4


def test_a_prompt_that_was_told_before_its_answer_is_charged_as_it_was_told() -> None:
    """Our own engine counts it, and what its cache had, before the first token: who leaves then pays for that."""
    meter = meter_of(prompt=Usage(6436, cached_input_tokens=6400))
    meter.take(Delta(text="word"))

    assert meter.usage() == Usage(6436, cached_input_tokens=6400, output_tokens=1)


@pytest.mark.parametrize("is_whole", [True, False])
def test_sound_that_is_not_told_from_words_is_charged_as_sound(is_whole: bool) -> None:
    """Where an upstream counts what was said and not how much of it aloud, the transcript tells."""
    counted, said = Usage(10, output_tokens=84), "Two coins a gate"
    meter = meter_of(counted if is_whole else None)
    if is_whole:
        message = ReplyMessage(audio=Spoken("audio_1", "AAAA", 1, said))
        meter.take_whole(ChatReply(choices=(Choice(index=0, message=message, finish_reason=FinishReason.STOP),)))
    else:
        meter.take(Delta(text=said, spoken=Spoken("audio_1", "AAAA")))
        meter.tell(counted)

    assert meter.usage() == replace(counted, audio_output_tokens=spoken_tokens(said))


def test_no_more_of_a_prompt_was_cached_than_it_has() -> None:
    """A replica that goes on with a reply of an older one, which told nothing, may count more than was reckoned."""
    meter = meter_of()
    meter.take(Delta(text="word"))
    reckoned = meter.usage().input_tokens
    meter._source.answering.prompt = Usage(6436, cached_input_tokens=6400)  # type: ignore[misc]
    meter.take(Delta(text="word"))

    assert reckoned < 100 and meter.usage() == Usage(reckoned, cached_input_tokens=reckoned, output_tokens=2)
