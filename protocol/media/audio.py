# Speech made of words, words of speech, and conversations by voice, in OpenAI's shapes; subtitles: SubRip (srt) and
# WebVTT (https://www.w3.org/TR/webvtt1/), as Whisper writes them.

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Raw, Struct

MOST_SECONDS = 359_999.0  # of a time in subtitles, which has two digits of hours


class VoiceRef(Struct, frozen=True, forbid_unknown_fields=True):
    """A voice that the upstream's account has of its own."""

    id: str


class SpeechRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What to say, and how."""

    model: str
    input: str
    voice: str | VoiceRef
    instructions: str | None = None
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] | None = None
    speed: float | None = None
    stream_format: Literal["audio", "sse"] | None = None
    user: str | None = None

    @property
    def stream(self) -> bool:
        """Whether it comes in pieces: speech always does."""
        return True


class RealtimeRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Which model to talk with over a connection, and for whom. What is said there is in no request: each response may
    use the model's whole context."""

    model: str
    user: str | None = None


class Recording(Struct, frozen=True):
    """What is known of an uploaded recording. Its bytes go beside the request: nothing that encodes one has them."""

    name: str
    media_type: str
    size: int  # bytes
    sha256: str  # of the bytes
    seconds_most: int  # that it can last,
    seconds_likely: int  # and about lasts


class TranscriptionRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What to write down, and how."""

    model: str
    file: Recording
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] | None = None
    temperature: float | None = None
    timestamp_granularities: tuple[Literal["word", "segment"], ...] | None = None
    include: tuple[Literal["logprobs"], ...] | None = None
    chunking_strategy: str | None = None
    stream: bool | None = None
    user: str | None = None


class TranslationRequest(TranscriptionRequest, frozen=True, omit_defaults=True, kw_only=True):
    """The same, written down in English."""


class Segment(Struct, frozen=True):
    """A stretch of a recording. Times are seconds from its beginning."""

    start: float
    end: float
    text: str


class TranscriptionReply(Struct, frozen=True):
    """What was said, and all that the upstream tells of it, in its own words (``told``: a JSON object)."""

    text: str
    told: Raw
    segments: tuple[Segment, ...] = ()


def srt_of(segments: Iterable[Segment]) -> str:
    """Return numbered stretches with their times, in SubRip's form."""
    cues = (
        f"{number}\n{_time(each.start, ',')} --> {_time(each.end, ',')}\n{_words(each)}\n\n"
        for number, each in enumerate(segments, 1)
    )
    return "".join(cues)


def vtt_of(segments: Iterable[Segment]) -> str:
    """Return stretches with their times, in WebVTT's form."""
    cues = (f"{_time(each.start, '.')} --> {_time(each.end, '.')}\n{_words(each)}\n\n" for each in segments)
    return "WEBVTT\n\n" + "".join(cues)


def _words(segment: Segment) -> str:
    return segment.text.strip().replace("-->", "->")


def _time(seconds: float, point: str) -> str:
    ms = round(min(max(0.0, seconds), MOST_SECONDS) * 1000)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{point}{ms % 1000:03}"
