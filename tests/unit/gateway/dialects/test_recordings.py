# How long a recording can last, by its size and its first bytes; and the times of subtitles.

from __future__ import annotations

import struct

import pytest

from gateway.dialects.parts.recordings import seconds_of
from protocol.media.audio import Segment, srt_of, vtt_of


def wav(kind: int, rate: int, channels: int, bits: int, more: bytes = b"") -> bytes:
    """Return the head of a WAV file, behind a chunk that says nothing of it."""
    form = struct.pack("<HHIIHH", kind, channels, rate, 1, 1, bits) + more
    return (
        b"RIFF\0\0\0\0WAVEJUNK\x04\0\0\0abcdfmt " + struct.pack("<I", len(form)) + form + b"data\0\0\0\0" + b"\0" * 40
    )


@pytest.mark.parametrize(
    ("begun", "size", "seconds"),
    [
        (wav(1, 16_000, 2, 16), 640_000, (10, 10)),
        (wav(7, 8_000, 1, 8), 8_001, (2, 2)),
        (wav(0xFFFE, 8_000, 1, 8, struct.pack("<HHIH", 22, 8, 4, 1)), 16_000, (2, 2)),
        (wav(0x11, 48_000, 2, 4), 750_000, (1_000, 94)),  # packed
        (wav(1, 0, 0, 0), 750, (1, 1)),
        (b"ID3\x04", 1_000_000, (1_000, 63)),
        (b"\xff\xfb\x90", 1_000_000, (1_000, 63)),
        (b"OggS", 750_000, (1_000, 94)),
        (b"", 1, (1, 1)),
    ],
)
def test_a_file_lasts_no_longer_than_its_kind_allows(begun: bytes, size: int, seconds: tuple[int, int]) -> None:
    """By its head where samples stand one by one, else by the lowest rate of its kind; and about, by the usual one."""
    assert seconds_of(begun, size) == seconds


def test_subtitles_tell_hours_and_thousandths() -> None:
    """Words cannot end a stretch: an arrow is no mark of times."""
    said = [Segment(0, 1.5, " One --> two. "), Segment(3_661.0016, 3_700, "End.")]

    assert srt_of(said) == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne -> two.\n\n2\n01:01:01,002 --> 01:01:40,000\nEnd.\n\n"
    )
    assert vtt_of([]) == "WEBVTT\n\n" and "01:01:01.002 --> 01:01:40.000\nEnd." in vtt_of(said)
