# Speech made of words, words of speech, and conversations by voice, in OpenAI's shapes; subtitles: SubRip (srt) and
# WebVTT (https://www.w3.org/TR/webvtt1/), as Whisper writes them.

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Raw, Struct

# Ways of a WAV to write samples one by one, with the bits that each may have: whole numbers, floats, A-law and µ-law. A
# decoder goes by the way alone where these contradict it.
WAV_PLAIN = {1: (8, 16, 24, 32), 3: (32, 64), 6: (8,), 7: (8,)}
EXTENSIBLE = 0xFFFE  # says further on which way it is, and that it is one of these
PLAIN_FAMILY = bytes.fromhex("000000001000800000aa00389b71")
MOST_SAMPLES, MOST_CHANNELS = 768_000, 64  # a second, and at a time: more is no recording
# Bytes a second, by what a file is: at the least, and usual ones. MP3: 8 kbit/s, the lowest rate that its frames know;
# 128. All others: 6 kbit/s, the lowest rate of Opus; 64.
MP3 = (1_000, 16_000)
OTHER = (750, 8_000)
BEGINNING = 64 * 1024  # bytes of a WAV in which what stands before its samples is looked for
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


def most_seconds(file: bytes | bytearray) -> tuple[int, int]:
    """Return the most seconds that a recording lasts which is not packed, or an MP3, and about how many it does: of WAV
    both are what its header says. At least one."""
    place, size = behind_tags(file), len(file)
    least, usual = _rates(bytes(file[place : place + BEGINNING]), is_tagged=place > 0)
    return max(1, -(-size // least)), max(1, -(-size // usual))


def plain_seconds(file: bytes, form: Literal["wav", "mp3"]) -> tuple[int, int] | None:
    """Return the same of what begins, behind its tags, as an MP3, or as a WAV whose samples stand one by one; ``None``
    of all else: a WAV may hold what packs silence to nothing, as FLAC and AAC do."""
    begun = file[(place := behind_tags(file)) : place + BEGINNING]
    if form == "mp3":
        is_plain = begun[:1] == b"\xff" and begun[1:2] >= b"\xe0" and begun[1] & 0b110 == 0b010  # MPEG, layer III
    else:
        is_plain = begun[:4] == b"RIFF" and begun[8:12] == b"WAVE" and bool(_wav_rate(begun))
    return most_seconds(file) if is_plain else None


def behind_tags(file: bytes | bytearray) -> int:
    """Return where a recording begins behind its ID3 tags, which may stand before any kind. A length has seven bits in
    each byte: decoders differ on one with more."""
    place = 0
    while file.startswith(b"ID3", place) and len(head := file[place : place + 10]) == 10 and max(head[6:]) < 0x80:
        size = head[6] << 21 | head[7] << 14 | head[8] << 7 | head[9]
        place += 10 + size + (10 if head[5] & 0x10 else 0)
    return place


def _rates(begun: bytes, *, is_tagged: bool) -> tuple[int, int]:
    if begun[:4] == b"RIFF" and begun[8:12] == b"WAVE" and (rate := _wav_rate(begun)):
        return rate, rate
    if is_tagged or begun[:3] == b"ID3" or (begun[:1] == b"\xff" and begun[1:2] >= b"\xe0"):
        return MP3
    return OTHER


def _wav_rate(begun: bytes) -> int | None:
    """Return the bytes of a second, from the samples that the header tells of; ``None`` for packed ones, and where
    decoders could differ on which header counts: what is held must cover what any of them reads."""
    said = [fields for name, fields in _chunks(begun) if name == b"fmt "]
    if len(said) != 1 or len(said[0]) < 16:
        return None
    fields = said[0]
    kind, channels = int.from_bytes(fields[:2], "little"), int.from_bytes(fields[2:4], "little")
    if kind == EXTENSIBLE and fields[26:40] == PLAIN_FAMILY:
        kind = int.from_bytes(fields[24:26], "little")
    samples, bits = int.from_bytes(fields[4:8], "little"), int.from_bytes(fields[14:16], "little")
    is_plain = bits in WAV_PLAIN.get(kind, ()) and samples <= MOST_SAMPLES and channels <= MOST_CHANNELS
    return samples * channels * bits // 8 if is_plain else None


def _chunks(begun: bytes) -> list[tuple[bytes, bytes]]:
    """Return the chunks of a WAV up to its samples, by their names; none where these are not reached."""
    found, place = list[tuple[bytes, bytes]](), 12
    while len(name := begun[place : place + 4]) == 4:
        if name == b"data":
            return found
        size = int.from_bytes(begun[place + 4 : place + 8], "little")
        found.append((name, begun[place + 8 : place + 8 + size]))
        place += 8 + size + size % 2  # each begins at an even byte
    return []
