# How long a recording can last, by its size and its first bytes; and the times of subtitles.

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
        (b"ID3\x04\0\0\0\0\0\2xx" + wav(1, 1, 1, 8), 750, (750, 750)),
        (b"\x1a\x45\xdf\xa3", 750_000, (1_000, 94)),
        (b"", 1, (1, 1)),
    ],
)
def test_a_file_lasts_no_longer_than_its_kind_allows(begun: bytes, size: int, seconds: tuple[int, int]) -> None:
    """By its head where samples stand one by one, else by the lowest rate of its kind; and about, by the usual one."""
    assert seconds_of(begun + b"\0" * (size - len(begun))) == seconds


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
    assert seconds_of(begun + b"\0" * (750_000 - len(begun)))[0] == 1_000


def flac(frames: int, *, rate: int = 8_000, claims: int = 1, head: bool = True) -> bytes:
    """Return silence of 65,536 samples a frame; its head claims another length of the whole."""
    frame = bytes.fromhex("fff874085affff")  # 16 bits of block size, 8 kHz, one channel, number 90
    frame = frame[:4] + b"\x5a\xff\xff"
    frame += bytes((crc8(frame),)) + b"\0" * 4
    info = b"\0\0\0\x22" + b"\xff\xff" * 2 + b"\0" * 6 + (rate << 44 | claims).to_bytes(8, "big") + b"\0" * 16
    return (b"fLaC" + info) * head + frame * frames


def crc8(data: bytes) -> int:
    """Return a checksum by the book: the rest of a division by x^8 + x^2 + x + 1."""
    rest = int.from_bytes(data, "big") << 8
    for place in range(rest.bit_length() - 1, 7, -1):
        if rest >> place & 1:
            rest ^= 0x107 << place - 8
    return rest


def page(*packets: bytes, stream: int = 1, kind: int = 0) -> bytes:
    """Return a page of Ogg with whole packets."""
    sizes = b"".join(b"\xff" * (len(each) // 255) + bytes((len(each) % 255,)) for each in packets)
    head = struct.pack("<4sBBqIII", b"OggS", 0, kind, 0, stream, 0, 0)
    return head + bytes((len(sizes),)) + sizes + b"".join(packets)


OPUS = page(b"OpusHead" + b"\0" * 11, kind=2) + page(b"OpusTags" + b"\0" * 8)
VORBIS = page(b"\x01vorbis" + struct.pack("<IBIIIIB", 0, 1, 8_000, 0, 0, 0, 0xB8), kind=2)
ADTS = bytes.fromhex("fff16c4000fffc") + b"\0" * 5  # 1,024 samples at 8 kHz


def box(name: bytes, *parts: bytes) -> bytes:
    """Return a box of an MP4."""
    return struct.pack(">I4s", 8 + sum(map(len, parts)), name) + b"".join(parts)


def mp4(samples: int, *, claims: int = 8_000, form: bytes = b"mp4a", runs: int = 0) -> bytes:
    """Return the heads of AAC at 8 kHz, with its samples in a table and in a fragment; claims are in 8,000ths."""
    entry = box(form, b"\0" * 28, box(b"esds", b"\0" * 4, b"\x03\x19\0\0\0\x04\x11", b"\x40" * 13, b"\x05\x02\x15\x88"))
    table = box(b"stbl", box(b"stsd", b"\0" * 8, entry), box(b"stsz", b"\0" * 8, struct.pack(">I", samples)))
    head = box(b"mdhd", b"\0" * 12, struct.pack(">II", 8_000, claims), b"\0" * 4)
    moof = box(b"moof", box(b"traf", box(b"trun", b"\0" * 4, struct.pack(">I", runs))))
    return box(b"ftyp", b"M4A ") + box(b"moov", box(b"trak", box(b"mdia", head, box(b"minf", table)))) + moof


def element(name: int, content: bytes, *, is_live: bool = False) -> bytes:
    """Return an element of WebM; one that is written live does not tell its size."""
    size = b"\x01" + b"\xff" * 7 if is_live else (1 << 56 | len(content)).to_bytes(8, "big")
    return name.to_bytes((name.bit_length() + 7) // 8, "big") + size + content


def webm(*blocks: bytes, codec: bytes = b"A_OPUS", claims: float = 1.0, more: bytes = b"") -> bytes:
    """Return blocks of sound in a cluster, as a browser records them, beside one of pictures."""
    sound = element(0xAE, element(0xD7, b"\1") + element(0x83, b"\2") + element(0x86, codec) + more)
    video = element(0xAE, element(0xD7, b"\2") + element(0x83, b"\1") + element(0x86, b"V_VP9"))
    info = element(0x1549A966, element(0x2AD7B1, b"\x0f\x42\x40") + element(0x4489, struct.pack(">d", claims)))
    told = b"".join(element(0xA3, b"\x81\0\0\x80" + each) for each in blocks)
    pictures = element(0xA3, b"\x82\0\0\x80" + b"\x08" * 9)
    clusters = element(0x1F43B675, element(0xE7, b"\0") + pictures + told, is_live=True)
    return element(0x1A45DFA3, b"") + element(
        0x18538067, info + element(0x1654AE6B, sound + video) + clusters, is_live=True
    )


LACED = element(0xA0, element(0xA1, b"\x81\0\0\x06\xff" + b"\x08" * 256))  # 256 packets in one block


@pytest.mark.parametrize(
    ("file", "seconds"),
    [
        (webm(*[b"\x08"] * 1_000), 20),
        (webm(*[b"\x08" * 250] * 50), 1),
        (webm(b"\x08", claims=90_000.0), 90),
        (webm(b"\x08") + LACED * 10, 308),
        (webm(*[b"\0"] * 1_000, codec=b"A_AAC"), 140),
        (webm(*[b"\0"] * 100, codec=b"A_VORBIS", more=element(0x63A2, b"\2\x1e" + VORBIS[28:])), 13),
        (webm(element(0x1F43B675, element(0xA3, b"\x81\0\0\x80\x08") * 1_000)), 21),  # clusters inside of a block
        (flac(1_000), 8_192),
        (flac(1_000, rate=16_000), 8_192),  # what a frame says of itself, where it is longer
        (flac(1_000, head=False), 8_192),
        (b"ID3\x04\0\0\0\0\0\2xx" + flac(1_000), 8_192),
        (OPUS + page(*[b"\x08"] * 250) * 4, 20),  # 20 ms each, in a byte
        (OPUS + page(*[b"\x1b\x02"] * 200) * 5, 120),  # two of 60 ms
        (OPUS + page(*[b"\x08" * 300] * 50), 1),
        (VORBIS + page(*[b"\0"] * 100) * 80, 1_025),
        (VORBIS + page(b"\x01vorbis" + struct.pack("<IBIIIIB", 0, 1, 2**32 - 1, 0, 0, 0, 0x66), kind=2) * 8000, 1_025),
        (page(page(*[b"\0"] * 100)) * 80, 970),  # of a kind that is not known; pages in packets of others
        (ADTS * 1_000, 128),
        (mp4(1_000), 128),
        (mp4(500, runs=500), 128),
        (mp4(1_000, claims=8_000_000), 1_000),
        (mp4(1_000, form=b"Opus"), 120),
        (mp4(10, form=b"what"), 1),
        (mp4(2**32 - 1, form=b"Opus"), 100_000_000),  # more is told of none
    ],
)
def test_packed_silence_lasts_as_long_as_its_frames(file: bytes, seconds: int) -> None:
    """Whatever its head claims of the whole: a decoder goes by what comes."""
    assert seconds_of(file)[0] == seconds


@pytest.mark.parametrize(
    "kind", [flac(3), webm(b"\x08", b"\x09") + LACED, OPUS + page(*[b"\x08"] * 250), VORBIS + page(b"\0"), ADTS, mp4(9)]
)
@settings(max_examples=40)
@given(places=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=8), cut=st.integers(0, 400))
def test_no_file_is_too_odd_to_be_held_for(kind: bytes, places: list[tuple[int, int]], cut: int) -> None:
    """Broken or made up: it lasts a second at the least, and no reader of it fails."""
    file = bytearray(kind)
    for place, byte in places:
        file[place % len(file)] = byte

    assert seconds_of(file[:cut])[0] >= 1


def test_subtitles_tell_hours_and_thousandths() -> None:
    """Words cannot end a stretch: an arrow is no mark of times."""
    said = [Segment(0, 1.5, " One --> two. "), Segment(3_661.0016, 3_700, "End.")]

    assert srt_of(said) == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne -> two.\n\n2\n01:01:01,002 --> 01:01:40,000\nEnd.\n\n"
    )
    assert "99:59:59.000" in vtt_of([Segment(0, 1e308, "")])  # whatever an upstream says, what was paid is given
    assert vtt_of([]) == "WEBVTT\n\n" and "01:01:01.002 --> 01:01:40.000\nEnd." in vtt_of(said)
