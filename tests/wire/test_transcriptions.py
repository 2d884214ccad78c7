# Recordings written down, as upstreams tell of them: what is charged where they count nothing but the length.

from __future__ import annotations

import msgspec
import pytest

from gateway.upstreams.openai.replies import read_whole
from protocol.media.audio import Recording, TranscriptionRequest
from protocol.usage import Usage

ASKED = TranscriptionRequest(model="scribe", file=Recording("a.mp3", "audio/mpeg", 9, "", 9, 1))


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [(8.47, 9), (9, 9), ("8.470000267028809", 9), ("inf", None), ("nan", None), ("", None), ([8], None), (None, None)],
)
def test_the_length_of_a_recording_is_read_as_a_number_or_a_text(duration: object, seconds: int | None) -> None:
    """Some services write it as a text; what is neither leaves an estimate to be charged."""
    _, usage = read_whole(ASKED, msgspec.json.encode({"text": "Hm.", "duration": duration}))

    assert usage == (None if seconds is None else Usage(audio_seconds=seconds))
