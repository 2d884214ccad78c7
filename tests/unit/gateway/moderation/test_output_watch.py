# An answer passes in windows: whatever its pieces are, nothing short is out before it was seen whole.

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from msgspec.structs import replace

from gateway.core.errors import ContentPolicyViolation
from gateway.core.settings import Safety
from gateway.moderation.output_watch import SHARED, STEP, WINDOW, _Choice, output_watch_of
from gateway.moderation.rules.policy import CATEGORIES
from protocol.chat import (
    ChatReply,
    Choice,
    FinishReason,
    Function,
    FunctionCall,
    ReplyMessage,
    Spoken,
    Tool,
    ToolCall,
)
from protocol.events import Delta, ToolCallDelta
from router.catalog.targets import Endpoint, Target
from tests.support.guarding import HELLO, Guarding
from tests.support.house import model

SECRET = "AKIAIOSFODNN7EXAMPLE"
TARGET = Target(model("small"), Endpoint("here", "http://upstream"))


def deltas_of(text: str, dice: random.Random, most: int) -> list[Delta]:
    """Cut a text into deltas of up to ``most`` characters; the last one says the end."""
    deltas = []
    while text:
        size = dice.randint(0, most)
        deltas.append(Delta(text=text[:size]))
        text = text[size:]
    return [*deltas, Delta(finish_reason=FinishReason.STOP)]


@pytest.mark.parametrize("most", [1, 7, 60, 450, 3000])
@pytest.mark.parametrize("length", [0, 1, STEP - 1, STEP, STEP + 1, WINDOW, 1777])
def test_every_passage_is_seen_whole_before_its_first_character_is_out(length: int, most: int) -> None:
    """Passages of up to what two windows share, at every place; and all that came goes out, in order."""
    dice = random.Random(length * most)
    text = "".join(chr(0x4E00 + place) for place in range(length))  # each character once
    choice, out, windows = _Choice(), "", list[tuple[int, int]]()
    for delta in deltas_of(text, dice, most):
        for window in choice.take(delta):
            assert window in text and len(window) <= WINDOW
            windows.append((text.index(window), text.index(window) + len(window)))
        passed = choice.release(everything=delta.finish_reason is not None)
        for start in range(len(out), len(out := out + "".join(one.text for one in passed))):
            end = min(length, start + WINDOW - STEP)
            assert any(first <= start and end <= last for first, last in windows), (start, windows)

    assert out == text


def test_what_goes_on_after_something_else_is_seen_with_what_was_said_before() -> None:
    """Pieces of two calls in turns: each one's arguments are one text, whose last passage the next window has again."""
    choice = _Choice()
    pieces = [(0, "x" * 300 + "AKIAIOSF"), (1, "y" * 150), (0, "ODNN7EXAMPLE"), (1, "z")]
    windows = [
        window for call, said in pieces for window in choice.take(Delta(tool_calls=(ToolCallDelta(call, said),)))
    ]

    assert any("AKIAIOSFODNN7EXAMPLE" in window for window in windows)


@pytest.mark.parametrize("kind", ["words", "thinking", "refusal", "arguments", "name"])
async def test_no_sign_of_a_secret_is_out_however_a_reply_is_cut_and_mixed(kind: str) -> None:
    """At any place of any part of any of three choices, in pieces of any size, with less than half a window of anything
    else between its pieces, ending with it or not, whole or broken."""
    dice, guarding = random.Random(kind), Guarding(Safety(output="block", levels=dict.fromkeys(CATEGORIES, "off")))
    parts = ["words", "thinking", "refusal", "arguments", "other call"]
    for _ in range(40):
        hook = output_watch_of(guarding.moderator, guarding.call(), TARGET)
        secret, others = list(cut_at_random(SECRET, dice)), [part for part in parts if part != kind]
        room = (SHARED - 1) // len(secret)  # characters of others between two pieces
        script = [(dice.randrange(3), dice.choice(parts), filler(dice, 90)) for _ in range(dice.randrange(25))]
        for piece in secret:
            script.append((0, kind, piece))
            script += [(0, dice.choice(others), filler(dice, room))] * dice.randrange(2)
            script += [(dice.choice((1, 2)), dice.choice(parts), filler(dice, 500))] * dice.randrange(2)
        script += [(dice.randrange(3), dice.choice(parts), filler(dice, 90)) for _ in range(dice.randrange(9))]
        sent = ""
        with pytest.raises(ContentPolicyViolation, match="aws_key"):
            for index, part, said in script:
                sent += "".join(map(said_by, hook.delta(delta_of(index, part, said))))
            for index in range(dice.choice((0, 3))):
                sent += "".join(map(said_by, hook.delta(Delta(index, finish_reason=FinishReason.STOP))))
            sent += "".join(map(said_by, hook.rest()))
        assert not set(sent) & set(SECRET), sent
    await guarding.close()


def cut_at_random(text: str, dice: random.Random) -> Iterator[str]:
    while text:
        size = dice.randint(1, len(text))
        yield text[:size]
        text = text[size:]


def filler(dice: random.Random, most: int) -> str:
    return "".join(dice.choices("aeiou ", k=dice.randint(0, most)))


def delta_of(index: int, part: str, said: str) -> Delta:
    if part in ("arguments", "other call"):
        return Delta(index, tool_calls=(ToolCallDelta(int(part == "other call"), said),))
    if part == "name":
        return Delta(index, tool_calls=(ToolCallDelta(0, name=said),))
    return Delta(index, **{{"words": "text", "thinking": "reasoning", "refusal": "refusal"}[part]: said})


def said_by(delta: Delta) -> str:
    called = (f"{call.name or ''}{call.arguments}" for call in delta.tool_calls)
    return delta.text + delta.reasoning + delta.refusal + "".join(called)


def test_what_is_said_in_different_places_is_no_one_word() -> None:
    """Thinking, answer and calls are looked at one by one, as in a whole reply, though they come in turns."""
    choice = _Choice()
    deltas = [
        Delta(reasoning="the key is"),
        Delta(text="sk-proj"),
        Delta(tool_calls=(ToolCallDelta(0, '{"a"'), ToolCallDelta(1, "{}"))),
        Delta(tool_calls=(ToolCallDelta(0, ":1}"),)),
        Delta(finish_reason=FinishReason.STOP),
    ]
    windows = [window for delta in deltas for window in choice.take(delta)]

    assert windows == ["the key is", "sk-proj", '{"a"', "{}", '{"a":1}']
    assert choice.release(everything=True) == deltas


async def test_a_name_is_looked_at_unless_the_caller_gave_it_to_a_tool() -> None:
    """Streamed and whole: a call of a tool that was given waits for nothing, whatever anybody thinks of its name."""
    guarding = Guarding(Safety(output="block"))
    tools = (Tool(Function(name="get_weather")),)
    call = guarding.call(replace(HELLO, tools=tools))
    for name, passes in (("get_weather", True), (SECRET, False)):
        delta = Delta(tool_calls=(ToolCallDelta(0, "", "call_1", name),))
        whole = replied(ToolCall("call_1", FunctionCall(name, "{}")))

        assert list(output_watch_of(guarding.moderator, call, TARGET).delta(delta)) == ([delta] if passes else [])
        with nullcontext() if passes else pytest.raises(ContentPolicyViolation, match="aws_key"):
            await output_watch_of(guarding.moderator, call, TARGET).whole(whole)
    await guarding.close()


def replied(call: ToolCall) -> ChatReply:
    message = ReplyMessage(content=None, tool_calls=(call,))
    return ChatReply(choices=(Choice(index=0, message=message, finish_reason=FinishReason.TOOL_CALLS),))


def test_what_no_reader_sees_stretches_no_passage() -> None:
    """A key with a hundred invisible characters after each of its own is in one window."""
    choice = _Choice()
    windows = [window for sign in "AKIAIOSFODNN7EXAMPLE" for window in choice.take(Delta(text=sign + "\u200b" * 100))]
    windows += choice.take(Delta(finish_reason=FinishReason.STOP))

    assert windows == ["AKIAIOSFODNN7EXAMPLE"]


async def test_what_is_said_aloud_waits_for_all_of_its_words() -> None:
    """Its sound may come before they do. When it is kept by its provider comes behind the end, and is let out."""
    guarding = Guarding(Safety(output="block", levels=dict.fromkeys(CATEGORIES, "off")))
    hook = output_watch_of(guarding.moderator, guarding.call(), TARGET)
    said = [Delta(text=word * 300, spoken=Spoken(data="AAAA")) for word in "abc"]
    end, known = Delta(finish_reason=FinishReason.STOP), Delta(spoken=Spoken(expires_at=1))

    assert [out for delta in said for out in hook.delta(delta)] == []
    assert [*hook.delta(end), *hook.delta(known)] == [*said, end, known]
    await guarding.close()


async def test_the_words_of_a_whole_answer_by_voice_are_looked_at() -> None:
    """As what is written."""
    guarding = Guarding(Safety(output="block", levels=dict.fromkeys(CATEGORIES, "off")))
    hook = output_watch_of(guarding.moderator, guarding.call(), TARGET)
    message = ReplyMessage(audio=Spoken("audio_1", "AAAA", 1, f"The key is {SECRET}."))

    with pytest.raises(ContentPolicyViolation, match="aws_key"):
        await hook.whole(ChatReply(choices=(Choice(index=0, message=message, finish_reason=FinishReason.STOP),)))
    await guarding.close()
