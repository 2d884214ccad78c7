# How long a recording can last, by its size and its first bytes; and the times of subtitles.

from __future__ import annotations

import struct

import pytest

from gateway.dialects.parts.recordings import seconds_of
from protocol.media.audio import Segment, srt_of, vtt_of

PLAIN = bytes.fromhex("000000001000800000aa00389b71")  # the family of formats that EXTENSIBLE has, of plain samples


def wav(kind: int, rate: int, channels: int, bits: int, more: bytes = b"", before: bytes = b"abcd") -> bytes:
    """Return the head of a WAV file, behind a chunk that says nothing of it."""
    form = struct.pack("<HHIIHH", kind, channels, rate, 1, 1, bits) + more
    return b"RIFF\0\0\0\0WAVE" + chunk(b"JUNK", before) + chunk(b"fmt ", form) + b"data\0\0\0\0" + b"\0" * 40


def chunk(name: bytes, content: bytes) -> bytes:
    """Return one chunk, at whose end stands an even byte."""
    return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


FAST = struct.pack("<HHIIHH", 1, 8, 384_000, 1, 1, 32)  # the form of samples of 12 MB a second


@pytest.mark.parametrize(
    ("begun", "size", "seconds"),
    [
        (wav(1, 16_000, 2, 16), 640_000, (10, 10)),
        (wav(7, 8_000, 1, 8), 8_001, (2, 2)),
        (wav(0xFFFE, 8_000, 1, 8, struct.pack("<HHIH", 22, 8, 4, 1) + PLAIN), 16_000, (2, 2)),
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


@pytest.mark.parametrize(
    "begun",
    [
        wav(0x31, 8_000, 1, 0, before=chunk(b"fmt ", FAST) + b"x"),  # a form inside of another chunk
        wav(1, 384_000, 8, 32).replace(b"data", chunk(b"fmt ", b"\x31" + FAST[1:]) + b"data"),  # and a second form
        wav(1, 384_000, 8, 32).replace(b"data", b"LIST\xff\xff\xff\0"),  # behind which another may stand
        wav(7, 8_000, 1, 65_528),  # a µ-law sample has eight bits, whatever is said
        wav(1, 4_000_000_000, 60_000, 32),
        wav(0xFFFE, 384_000, 8, 32, struct.pack("<HHIH", 22, 8, 4, 1) + b"\0" * 14),  # of another family
    ],
)
def test_no_header_makes_a_file_shorter_than_a_decoder_may_find_it(begun: bytes) -> None:
    """What a call holds covers what any decoder reads: a header that contradicts itself counts for nothing."""
    assert seconds_of(begun, 750_000)[0] == 1_000


def test_subtitles_tell_hours_and_thousandths() -> None:
    """Words cannot end a stretch: an arrow is no mark of times."""
    said = [Segment(0, 1.5, " One --> two. "), Segment(3_661.0016, 3_700, "End.")]

    assert srt_of(said) == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne -> two.\n\n2\n01:01:01,002 --> 01:01:40,000\nEnd.\n\n"
    )
    assert "99:59:59.000" in vtt_of([Segment(0, 1e308, "")])  # whatever an upstream says, what was paid is given
    assert vtt_of([]) == "WEBVTT\n\n" and "01:01:01.002 --> 01:01:40.000\nEnd." in vtt_of(said)
