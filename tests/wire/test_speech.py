# Speech as its upstreams send it: however its bytes are cut, the same audio, count and end.

from __future__ import annotations

import base64

import pytest

from gateway.upstreams.openai.speech import SpeechEvents
from gateway.upstreams.wire.errors import UpstreamError
from protocol.events import Delta, Event, ReplyEnd, UsageReport
from protocol.usage import Usage

DONE = b'data: {"type":"speech.audio.done","usage":{"input_tokens":3,"output_tokens":40}}\n\n'


def event(audio: bytes) -> bytes:
    return b'data: {"type":"speech.audio.delta","audio":"' + base64.b64encode(audio) + b'"}\n\n'


def heard(data: bytes, size: int) -> tuple[bytes, list[Event]]:
    """Return the audio and what else came of bytes that came so many at a time."""
    reader, events = SpeechEvents(), list[Event]()
    for place in range(0, len(data), size):
        events += reader.feed(data[place : place + size])
    events += reader.finish()
    audio = b"".join(each.audio for each in events if isinstance(each, Delta))
    return audio, [each for each in events if not isinstance(each, Delta)]


@pytest.mark.parametrize("size", [1, 5, 7, 1000])
def test_bytes_and_events_say_the_same(size: int) -> None:
    """Bytes end where they end; events with a count."""
    for audio in (b"ID3\x04 data: a song", b"RIFF", b'{"a":1}', b"data", b":\x01:\x02\xff\xff\0"):
        assert heard(audio, size) == (audio, [ReplyEnd()])
        told = [UsageReport(Usage(3, output_tokens=40)), ReplyEnd()]
        assert heard(b": hm\n\n" + event(audio[:2]) + event(audio[2:]) + DONE, size) == (audio, told)


@pytest.mark.parametrize(
    "data", [b"", event(b"a"), b"data: {}\n\ndata: [\n\n", b'data: {"audio":"="}\n\n', b'data: {"type":"error"}\n\n']
)
def test_what_is_not_whole_is_refused(data: bytes) -> None:
    """Nothing, events without their last, and what cannot be read."""
    with pytest.raises(UpstreamError):
        heard(data, 1000)
