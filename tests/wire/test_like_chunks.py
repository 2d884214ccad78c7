# Chunks that are read by an example instead of being decoded mean what decoding them would have given, and what is no
# such chunk is decoded, whatever it looks like.

from __future__ import annotations

import pytest

from gateway.upstreams.anthropic.wire_format import AnthropicFormat
from gateway.upstreams.openai.wire_format import OpenAIFormat
from gateway.upstreams.wire.base import EventStream, Provider
from gateway.upstreams.wire.like_chunks import LESSONS
from protocol.events import Delta
from tests.wire.openai_traffic import TEXT, chunk, text_chunk
from tests.wire.traffic import CHAT, read_stream

STRIDE = 11  # bytes; it falls out of step with whatever chunks repeat
Made = tuple[Provider, list[bytes]]

OPENAI = [chunk({"content": "Once"}), chunk({"content": " upon"}), b"data: [DONE]\n\n"]
PADDED = [chunk({"content": "Once"}, obfuscation="x7Kq2"), chunk({"content": " upon"}, obfuscation="x"), OPENAI[2]]
BARE = [event.replace(b',"obfuscation":"x7Kq"', b"") for event in OPENAI]
WORDS = [text_chunk("Once"), text_chunk(" upon"), OPENAI[2]]


def block_delta(text: bytes) -> bytes:
    data = b'{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"%b"}}' % text
    return b"event: content_block_delta\ndata: " + data + b"\n\n"


CLAUDE = [block_delta(b"Once"), block_delta(b" upon"), b'event: message_stop\ndata: {"type":"message_stop"}\n\n']
STREAMS = {
    "bare": (OpenAIFormat(), BARE),
    "padded": (OpenAIFormat(), PADDED),
    "completion": (OpenAIFormat(), WORDS),
    "claude": (AnthropicFormat(), CLAUDE),
}
streams = pytest.mark.parametrize("made", STREAMS.values(), ids=STREAMS)


def opened(wire: Provider) -> EventStream:
    return wire.open_events(TEXT if wire is STREAMS["completion"][0] else CHAT)


def by_example(made: Made, *later: bytes) -> object:
    """What comes of later pieces after a first chunk that was decoded."""
    wire, events = made
    return read_stream(opened(wire), [events[0], *later, events[2]])


def decoded(made: Made, *later: bytes) -> object:
    """The same, where everything is decoded."""
    wire, events = made
    stream = opened(wire)
    stream._like.read = lambda data: None  # type: ignore[attr-defined]
    return read_stream(stream, [events[0], *later, events[2]])


@streams
def test_words_are_taken_out_without_decoding(made: Made) -> None:
    """One chunk, and several in a piece; the words may be of any language."""
    wire, (first, second, _) = made
    stream = opened(wire)
    stream.feed(first)
    umlauts = second.replace(b" upon", " größer 🚪".encode())
    stream._read_event = None  # type: ignore[attr-defined, method-assign]  # it is not needed from here on

    assert stream.feed(second) == [Delta(0, " upon")]
    assert stream.feed(second + umlauts + second) == [Delta(0, " upon"), Delta(0, " größer 🚪"), Delta(0, " upon")]


def test_padding_of_no_length_is_padding() -> None:
    """Words that are long enough have none; an example of which that is the end would be taken anew with each."""
    stream = opened(STREAMS["padded"][0])
    for number in range(2 * LESSONS):
        stream.feed(chunk({"content": "Once"}, obfuscation="x7"[: 2 * (number % 2)]))
    stream._read_event = None  # type: ignore[attr-defined, method-assign]  # it is not needed from here on

    for padding in ("", "x"):
        assert stream.feed(chunk({"content": " upon"}, obfuscation=padding)) == [Delta(0, " upon")]


@streams
def test_any_other_byte_in_any_place_means_what_decoding_gives(made: Made) -> None:
    """Text that ends early, broken characters, other fields and halves of events are decoded; escapes need not be."""
    second = made[1][1]
    for place in range(len(second)):
        for byte in b'"\\\n}\xff':
            other = second[:place] + bytes([byte]) + second[place + 1 :]
            assert by_example(made, other) == decoded(made, other), (place, byte)


@streams
def test_any_byte_too_few_or_too_many_means_what_decoding_gives(made: Made) -> None:
    """Also where what is left begins and ends like a chunk."""
    second = made[1][1]
    for place in range(len(second)):
        for other in (second[:place] + second[place + 1 :], second[:place] + b'"' + second[place:]):
            assert by_example(made, second, other) == decoded(made, second, other), place
        for end in range(place, len(second), STRIDE):
            short = second[:place] + second[end:]
            assert by_example(made, short) == decoded(made, short), (place, end)


@pytest.mark.parametrize("text", ["chunk", ",", ":", "m", "-", "", "index", '"', "\\", "data: ", "null", "stop"])
def test_words_that_stand_elsewhere_too_are_no_wrong_example(text: str) -> None:
    """The example's words may also be a key, or a model's name; what is learnt is where a chunk says its words."""
    made = (OpenAIFormat(), [chunk({"content": text}), chunk({"content": " upon"}), OPENAI[2]])
    other = made[1][1].replace(b'"m"', b'"another"')

    assert by_example(made, made[1][1], other) == decoded(made, made[1][1], other)


def test_what_changes_with_each_chunk_is_not_learnt_for_ever() -> None:
    """Some services say the time anew; after a few lessons their chunks are decoded, and mean the same."""
    chunks = [chunk({"content": f"{number} "}, created=number) for number in range(3 * LESSONS)]
    made = (OpenAIFormat(), [chunks[0], *OPENAI[1:]])

    assert by_example(made, *chunks[1:]) == decoded(made, *chunks[1:])


def test_a_reason_a_call_or_a_count_is_never_taken_for_words() -> None:
    """An example that says more than words is none."""
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    for first in (
        chunk({"content": "a"}, "stop"),
        chunk({"content": "a"}, usage=usage),
        chunk({"content": "a"}, index=1),
    ):
        made = (OpenAIFormat(), [first, first.replace(b'"a"', b'"b"'), OPENAI[2]])

        assert by_example(made, made[1][1]) == decoded(made, made[1][1])
