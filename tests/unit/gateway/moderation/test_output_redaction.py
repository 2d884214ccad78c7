# What is taken out of answers: of streams however they are cut, of whole ones, and what goes with it.

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import msgspec
import pytest
from msgspec import Raw
from msgspec.structs import replace

from gateway.calls.hooks import NO_HOOK
from gateway.core.settings import Safety
from gateway.moderation.output_redaction import LOOKBACK, STEP, OutputRedaction, output_redaction_of
from gateway.moderation.redaction import Redactor
from gateway.moderation.rules.policy import REDACTABLE
from protocol.chat import (
    ChatReply,
    ChatRequest,
    Choice,
    FinishReason,
    FunctionCall,
    Message,
    Reasoning,
    ReplyMessage,
    ThinkingBlock,
    ToolCall,
)
from protocol.errors import UnsupportedParameter
from protocol.events import Delta, ToolCallDelta
from protocol.messages import TextBlock, ToolUseBlock
from router.catalog.targets import Endpoint, Target
from tests.support.guarding import HELLO, Guarding
from tests.support.house import model

TARGET = Target(model("small"), Endpoint("here", "http://upstream"))
REDACTS = Safety(input="flag", output="flag", levels=dict.fromkeys(REDACTABLE, "redact"), redacts="both")
KEY = "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEowIBAAKCAQEA\n" * 18 + "-----END RSA PRIVATE KEY-----"
JWT = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0." + "aB3d" * 60
END = Delta(finish_reason=FinishReason.STOP)
TEXTS = [
    "Write to anna.smith@example.com or call +41 44 668 18 00 today, please, and ask for the very new one instead.",
    "Card 4111 1111 1111 1111, IBAN DE89 3704 0044 0532 0130 00 and then that; 123-45-6789. Then 10.20.30.40!",
    f'Key AKIAIOSFODNN7EXAMPLE, password = "q8Zs93jdLs02mNx7QpZt8wB5vK1rT6yU".\n{KEY}\nIt is over, bo@example.org.',
    f"The token {JWT}... and then words with anna (at) example (dot) com within, and more plain words follow them now.",
    "M\u00fcller, anna@example.com, Stra\u00dfe: their house, and the \u00e9clairs that they bake there every Sunday.",
    "Their new address is \uff41nna\uff20example.com and so it goes on, in plain words as a reader sees them.",
    "Only ordinary prose, in which there's nothing that has to be found, however long it goes on about that one thing.",
]
DOCUMENTS: list[Any] = [
    {"to": "anna@example.com", "body": "Dear\nbo@example.com,\n\tcard 4111 1111 1111 1111", "cc": ["anna@example.com"]},
    {"pem": KEY, "n": 1},
    {"pem": KEY[:300], "n": [2, "three"]},
    {"pem": KEY[:300], "to": "anna@example.com", "body": "as ever " * 40},
    {"n": 4111111111111111, "to": ["anna@example.com"]},
    {"key": 1, "api_key": "q8Zs93jdLs02mNx7QpZt8wB5vK1rT6yU"},
    {"q": 'say "anna@example.com" twice', "\u00e9": "x"},
]
NUMBERS = {"n": [-4111111111111111, [4111, 1111, 1111, 1111], 415.5552671], "to": ["anna@example.com"]}
ARGUMENTS = [*map(json.dumps, DOCUMENTS), json.dumps(NUMBERS, indent=12), json.dumps(NUMBERS, separators=(",", ":"))]


@pytest.fixture
async def guarding() -> AsyncIterator[Guarding]:
    """A moderator that takes secrets, numbers and addresses out of requests and answers."""
    guarding = Guarding(REDACTS)
    yield guarding
    await guarding.close()


def hook_of(guarding: Guarding, asked: ChatRequest = HELLO) -> OutputRedaction:
    """Return what takes finds out of the answer to a call."""
    hook = output_redaction_of(guarding.moderator, guarding.call(asked), TARGET)
    assert isinstance(hook, OutputRedaction)
    return hook


def cuts_of(text: str, dice: random.Random) -> list[list[int]]:
    """Return some sixty places to cut a text in two, and ways to cut it into many pieces."""
    step = 1 + len(text) // 60
    once = [[place] for place in range(dice.randrange(step), len(text), step)]
    return [*once, *(sorted(dice.sample(range(1, len(text)), (len(text) - 1) // size)) for size in (1, 2, 5, 9, 30))]


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("kind", ["text", "reasoning", "refusal"])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
async def test_a_stream_is_redacted_as_a_whole_answer_is_wherever_it_is_cut(
    guarding: Guarding, text: str, kind: str
) -> None:
    """No sign of a find leaves before all of it is known; and of what comes no more than a look-back waits."""
    whole = Redactor(frozenset(REDACTABLE)).text(text)
    for cuts in cuts_of(text, random.Random(text + kind))[: None if kind == "text" else 9]:
        hook, said = hook_of(guarding), ""
        for piece in pieces_of(text, cuts):
            for delta in hook.delta(Delta(**{kind: piece})):
                said += getattr(delta, kind)
            assert whole.startswith(said), (cuts, said)
        said += "".join(getattr(delta, kind) for delta in hook.delta(END))
        assert said == whole, cuts


@pytest.mark.parametrize(
    ("text", "most"), [("plain words as people write them, one by one. " * 40, 60), ("a1_b.c" * 200, LOOKBACK + STEP)]
)
async def test_no_more_than_a_look_back_waits(guarding: Guarding, text: str, most: int) -> None:
    """Of prose a few words; of what looks like nothing known as much as the longest find needs."""
    hook, waits, longest = hook_of(guarding), 0, 0
    for sign in text:
        waits += 1 - sum(len(delta.text) for delta in hook.delta(Delta(text=sign)))
        longest = max(longest, waits)

    assert longest <= most
    assert sum(len(delta.text) for delta in hook.rest()) == waits


@pytest.mark.parametrize("said", ARGUMENTS, ids=range(len(ARGUMENTS)))
async def test_arguments_of_calls_stay_json(guarding: Guarding, said: str) -> None:
    """As those of a whole answer do, for the tool reads them: what is no text, a number, is left to be blocked."""
    whole = json.loads(Redactor(frozenset(REDACTABLE)).text(said))
    for cuts in cuts_of(said, random.Random(said)):
        hook = hook_of(guarding)
        deltas = [Delta(tool_calls=(ToolCallDelta(0, piece),)) for piece in pieces_of(said, cuts)]
        out = [left for delta in (*deltas, END) for left in hook.delta(delta)]
        assert json.loads("".join(call.arguments for delta in out for call in delta.tool_calls)) == whole, cuts


async def test_pieces_of_one_call_may_come_together(guarding: Guarding) -> None:
    """Each once, in their order."""
    hook = hook_of(guarding)
    said = tuple(ToolCallDelta(0, piece) for piece in ('{"to": "anna@', 'example.com"', "}"))
    out = [left for delta in (Delta(tool_calls=said), END) for left in hook.delta(delta)]

    assert json.loads("".join(call.arguments for delta in out for call in delta.tool_calls)) == {
        "to": "[redacted email 1]"
    }


async def test_a_find_goes_on_behind_other_texts(guarding: Guarding) -> None:
    """In two calls by turns, between words and thinking, in two choices: each text is one, and all leave in order."""
    hook = hook_of(guarding)
    pieces = [
        ("text", "Ask anna@exa"),
        ("reasoning", "They want bo@"),
        ("text", "mple.com and "),
        ("reasoning", "example.com."),
    ]
    deltas = [Delta(index, **{kind: said}) for kind, said in pieces for index in (0, 1)]
    deltas += [
        Delta(tool_calls=(ToolCallDelta(call, said),)) for said in ('{"to": "cy@', 'example.com"}') for call in (0, 1)
    ]
    out = [left for delta in (*deltas, END, replace(END, index=1)) for left in hook.delta(delta)]

    for index in (0, 1):
        assert "".join(delta.text for delta in out if delta.index == index) == "Ask [redacted email 1] and "
        assert "".join(delta.reasoning for delta in out if delta.index == index) == "They want [redacted email 2]."
    for number in (0, 1):
        calls = [call.arguments for delta in out for call in delta.tool_calls if call.index == number]
        assert json.loads("".join(calls)) == {"to": "[redacted email 3]"}


async def test_what_is_long_gone_by_waits_for_nothing(guarding: Guarding) -> None:
    """Words before a long call are out while the call still comes."""
    hook = hook_of(guarding)
    assert hook.delta(Delta(text="Ask anna@")) == []
    out = [
        left for _ in range(LOOKBACK // 8 + 1) for left in hook.delta(Delta(tool_calls=(ToolCallDelta(0, "a1b2c3d4"),)))
    ]

    assert out[0].text == "Ask anna@"


async def test_what_spells_a_find_out_goes_with_it(guarding: Guarding) -> None:
    """The log probabilities of its tokens, and the signature of a thought that is not what was signed; of other pieces
    both stay."""
    scores = Raw(b'{"content":[]}')
    deltas = [
        Delta(reasoning="Of anna@example.com I think."),
        Delta(signature="c2lnbmVk"),
        Delta(reasoning="Well."),
        Delta(signature="b25l"),
    ]
    deltas += [Delta(text="Ask ", logprobs=scores), Delta(text="bo@example.com", logprobs=scores), END]
    hook = hook_of(guarding)
    out = [left for delta in deltas for left in hook.delta(delta)]

    assert [delta.signature for delta in out if delta.signature] == ["b25l"]
    assert [(delta.text, delta.logprobs) for delta in out if delta.text] == [
        ("Ask ", scores),
        ("[redacted email 2]", None),
    ]


async def test_an_answer_without_finds_goes_out_as_it_came(guarding: Guarding) -> None:
    """The very same deltas, in their order, and the very same whole answer."""
    deltas = [Delta(begins_text=True), *(Delta(text=f"{word} ") for word in TEXTS[-1].split()), END]
    message = ReplyMessage(content=TEXTS[-1])
    whole = ChatReply(choices=(Choice(index=0, message=message, finish_reason=FinishReason.STOP),))
    hook = hook_of(guarding)
    out = [left for delta in deltas for left in hook.delta(delta)]

    assert len(out) == len(deltas) and all(left is delta for left, delta in zip(out, deltas, strict=True))
    assert await hook.whole(whole) is whole


async def test_a_whole_answer_is_redacted_wherever_it_says_so(guarding: Guarding) -> None:
    """Words, thinking and blocks as its upstream has them, calls, and the response that its upstream told; ids stay."""
    call = ToolCall(id="call_415-555-2671", function=FunctionCall("send", '{"to": "anna@example.com"}'))
    thought = Reasoning("Of anna@example.com.", "c2lnbmVk")
    blocks = (ThinkingBlock("Of anna@example.com.", "c2lnbmVk"), TextBlock("Ask bo@example.com."))
    use = ToolUseBlock("toolu_1", "send", {"id": "anna@example.com"})
    output = [{"id": "msg_1", "content": [{"text": "Ask bo@example.com.", "logprobs": [{"token": "bo"}]}]}]
    message = ReplyMessage(
        content="Ask bo@example.com.",
        tool_calls=(call,),
        reasoning_content="Of anna@example.com.",
        reasoning=(thought,),
        blocks=(*blocks, use),
    )
    choice = Choice(index=0, message=message, finish_reason=FinishReason.STOP, logprobs=Raw(b"{}"))
    told = {"output": Raw(msgspec.json.encode(output)), "status": Raw(b'"completed"')}
    left = await hook_of(guarding).whole(ChatReply(choices=(choice,), told=told))

    assert isinstance(left, ChatReply) and left.told is not None
    assert b"@" not in (said := msgspec.json.encode(left)) and b"call_415-555-2671" in said
    first, second = left.choices[0].message.blocks[:2]
    assert (first, second) == (ThinkingBlock("Of [redacted email 2].", ""), TextBlock("Ask [redacted email 1]."))
    assert (left.choices[0].logprobs, left.choices[0].message.reasoning[0].signature) == (None, "")
    assert json.loads(bytes(left.told["output"]))[0]["content"][0] == {
        "text": "Ask [redacted email 1].",
        "logprobs": [],
    }


async def test_what_an_upstream_tells_in_its_own_words_is_redacted_in_each_event(guarding: Guarding) -> None:
    """Pieces as they were cut, without the tokens that spell them; what is told again whole, by the same names; the
    rest byte for byte."""
    said, to = "Ask bo@example.com, please.", '{"to":"bo@example.com"}'
    words = {"type": "response.output_text.delta", "item_id": "msg_415-555-2671", "logprobs": [{"token": "bo"}]}
    call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "send", "arguments": to}
    told: list[dict[str, Any]] = [
        *(words | {"delta": said[place : place + 2]} for place in range(0, len(said), 2)),
        {"type": "response.output_text.done", "text": said, "logprobs": [{"token": "bo"}]},
        *({"type": "response.function_call_arguments.delta", "delta": sign} for sign in to),
        {"type": "response.output_item.done", "item": call},
    ]
    hook, out = hook_of(guarding), list[Delta]()
    for event in told:
        raw = msgspec.json.decode(msgspec.json.encode(event), type=dict[str, Raw])
        piece = event.get("delta", "")
        is_call = piece and "arguments" in event["type"]
        delta = Delta(tool_calls=(ToolCallDelta(0, piece),)) if is_call else Delta(text=piece)
        out += hook.delta(replace(delta, told=raw))
    out += hook.delta(END)
    events = [msgspec.json.decode(msgspec.json.encode(delta.told)) for delta in out if delta.told is not None]

    pieces = [
        "".join(each["delta"] for each in events if kind in each["type"])
        for kind in (".output_text.delta", "arguments")
    ]
    assert pieces == ["Ask [redacted email 1], please.", '{"to":"[redacted email 1]"}']
    assert events[-1]["item"] == call | {"arguments": '{"to":"[redacted email 1]"}'}
    assert {"type": "response.output_text.done", "text": "Ask [redacted email 1], please.", "logprobs": []} in events
    assert events[0] == told[0] and not any("bo" in event.get("delta", "") for event in events)


@pytest.mark.parametrize("is_known", [True, False], ids=["live", "answered in a batch of its provider"])
async def test_an_answer_goes_on_with_the_names_of_its_request(guarding: Guarding, is_known: bool) -> None:
    """Who was the first in the request is the first in the answer; who is new there has the next number."""
    asked = ChatRequest(model="small", messages=(Message(role="user", content="Is anna@example.com there?"),))
    call = guarding.call(asked, is_batch_item=not is_known)
    if is_known:
        call = await guarding.moderator.redacted(call)
    hook = output_redaction_of(guarding.moderator, call, TARGET)
    out = [*hook.delta(Delta(text="No, bo@example.com is, not anna@example.com.")), *hook.delta(END)]

    assert "".join(delta.text for delta in out) == "No, [redacted email 2] is, not [redacted email 1]."


@pytest.mark.parametrize(("redacts", "names"), [("both", (3, 4)), ("output", (0, 3))])
async def test_a_name_of_an_earlier_turn_is_given_to_nobody_else(
    guarding: Guarding, redacts: Literal["both", "output"], names: tuple[int, int]
) -> None:
    """The answer of that turn found somebody of its own, of whom the next request has the name alone."""
    guarding.moderator.follow(replace(REDACTS, redacts=redacts))
    said = ("user", "Is anna@example.com there?"), ("assistant", "No. [redacted email 2] and [redacted email 1] are.")
    turns = [Message(role=role, content=words) for role, words in (*said, ("user", "And cy@example.com?"))]
    call = await guarding.moderator.redacted(guarding.call(ChatRequest(model="small", messages=tuple(turns))))
    hook = output_redaction_of(guarding.moderator, call, TARGET)
    out = [*hook.delta(Delta(text="No, but bo@example.com is.")), *hook.delta(END)]

    assert isinstance(call.request, ChatRequest)
    if redacts == "both":
        assert call.request.messages[-1].content == f"And [redacted email {names[0]}]?"
    assert "".join(delta.text for delta in out) == f"No, but [redacted email {names[1]}] is."


class _Copied(str):
    """A text that counts what of it is copied."""

    __slots__ = ()
    copied = 0

    def __getitem__(self, key: Any) -> _Copied:
        part = _Copied(super().__getitem__(key))
        _Copied.copied += len(part)
        return part


async def test_a_long_piece_with_many_finds_is_copied_no_more_than_a_few_times(guarding: Guarding) -> None:
    """Each find used to copy all that is behind it: 3 s of the event loop for one delta of 1 MB."""
    said = "".join(f"and then user{number}@example.com. " for number in range(300))
    hook = hook_of(guarding)
    out = [*hook.delta(Delta(text=_Copied(said))), *hook.delta(END)]

    assert "".join(delta.text for delta in out).count("[redacted email ") == 300
    assert len(said) <= _Copied.copied <= 4 * len(said)


async def test_a_request_without_finds_is_read_once(guarding: Guarding, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not again as its answer begins, on the event loop."""
    guarding.moderator.follow(replace(REDACTS, redacts="both"))
    call = await guarding.moderator.redacted(guarding.call())
    monkeypatch.setattr("gateway.moderation.output_redaction.redacted_call", None)
    monkeypatch.setattr("gateway.moderation.output_redaction.texts_of", None)

    assert isinstance(output_redaction_of(guarding.moderator, call, TARGET), OutputRedaction)


async def test_requests_alone_are_redacted_unless_answers_are_named(guarding: Guarding) -> None:
    """Then nothing of an answer waits."""
    guarding.moderator.follow(replace(REDACTS, redacts="input"))

    assert output_redaction_of(guarding.moderator, guarding.call(), TARGET) is NO_HOOK


async def test_what_is_spoken_cannot_be_redacted_and_is_refused(guarding: Guarding) -> None:
    """Before an upstream hears of it: an answer in words is the way."""
    with pytest.raises(UnsupportedParameter, match="Ask for 'text' alone") as caught:
        await guarding.moderator.redacted(guarding.call(replace(HELLO, modalities=("text", "audio"))))

    assert caught.value.param == "modalities"
