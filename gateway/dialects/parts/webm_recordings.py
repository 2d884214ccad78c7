# How long a recording in WebM or Matroska lasts at the most (RFC 9559): the frames of its sound, as they stand in the
# blocks of its clusters, and what its head and its times claim where that is more.

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import partial

from gateway.dialects.parts.packed_frames import AAC_FRAME, LONGEST_PACKET, Data, flac_frame, opus_packet, vorbis_packet

MAGIC, CLUSTER = b"\x1a\x45\xdf\xa3", b"\x1f\x43\xb6\x75"
SEGMENT, INFO, TRACKS, ENTRY, GROUP = 0x18538067, 0x1549A966, 0x1654AE6B, 0xAE, 0xA0  # hold others
NUMBER, CODEC, SCALE, DURATION, TIME, BLOCK, SIMPLE = 0xD7, 0x86, 0x2AD7B1, 0x4489, 0xE7, 0xA1, 0xA3
PRIVATE = 0x63A2
MOST_READ = 500_000  # elements of a file; of one with more each byte counts as a packet
LONGEST_FRAME = AAC_FRAME / 7_350  # seconds, of a kind that is not known here
# Seconds of a frame at the most; of Vorbis by the head of its stream.
FLAT_FRAMES = {b"A_MPEG/L3": 0.072, b"A_MPEG/L2": 0.144, b"A_AC3": 0.048, b"A_VORBIS": 0.0}

Length = Callable[[int], float]  # of a frame, by its place


def webm_seconds(file: Data, place: int) -> float | None:
    """Return how long a file lasts at the most; ``None``: it is none of these."""
    if not file.startswith(MAGIC, place):
        return None
    try:
        return _seconds(file, place)
    except _TooMany:
        return len(file) * LONGEST_PACKET


class _TooMany(Exception):
    """A file has more elements than are read."""


class _Reader:
    """Reads the elements of a file, each of them once: clusters that lie in blocks of others count as well, for a
    decoder that loses its way finds those."""

    def __init__(self, file: Data) -> None:
        self._file = file
        self._seen = bytearray(len(file) + 1)  # by place
        self._read = 0

    def elements(self, place: int) -> Iterator[tuple[int, int, int]]:
        """Yield elements with where what they hold begins and ends, those inside of others too, up to the next cluster,
        to what is no element or to what was read before."""
        file, end = self._file, len(self._file)
        self._read += 1
        while place < end and file[place] and not self._seen[place]:
            self._seen[place] = 1
            self._read += 1
            if self._read > MOST_READ:
                raise _TooMany
            width = 9 - file[place].bit_length()
            name = int.from_bytes(file[place : place + width], "big")
            size, more = number_at(file, place + width)
            at = place + width + more
            if width > 4 or not more or file.startswith(CLUSTER, place):
                return
            holds_others = name in (SEGMENT, INFO, TRACKS, ENTRY, GROUP)
            place = at if holds_others else end if size is None else min(end, at + size)
            yield name, at, place


def _seconds(file: Data, place: int) -> float:
    scale, claims, number, codec = 0.001, 0.0, 0, b""
    sounds: dict[int, dict[bytes, Length]] = {}  # by track, and by all that it is said to be
    reader = _Reader(file)
    for name, at, end in reader.elements(place):
        if name == ENTRY:
            number, codec = 0, b""
        elif name == NUMBER:
            number = int.from_bytes(file[at : min(end, at + 8)], "big")
        elif name == CODEC:
            codec = bytes(file[at : min(end, at + 32)])
        elif name == SCALE:
            scale = int.from_bytes(file[at : min(end, at + 8)], "big") / 1e9
        elif name == DURATION:
            claims = max(claims, _float(bytes(file[at : min(end, at + 9)])))
        elif name == PRIVATE and (packet := vorbis_packet(file, file.find(b"\x01vorbis", at, end))) is not None:
            sounds.setdefault(number, {})[b"%d" % at] = partial(_flat, packet)
        if name in (NUMBER, CODEC) and codec.startswith(b"A_"):
            sounds.setdefault(number, {})[codec] = _length_of(file, codec)
    seconds, cluster = 0.0, file.find(CLUSTER, place)
    while cluster >= 0:
        for name, at, end in reader.elements(cluster + 4 + number_at(file, cluster + 4)[1]):
            if name == TIME:
                claims = max(claims, float(int.from_bytes(file[at : min(end, at + 8)], "big")))
            elif name in (BLOCK, SIMPLE):
                seconds += _block(file, at, end, sounds)
        cluster = file.find(CLUSTER, cluster + 1)
    return max(seconds, claims * scale)


def number_at(file: Data, place: int) -> tuple[int | None, int]:
    """Return a number of variable width, ``None`` for one that is not told, and its bytes; 0 where there is none."""
    if place >= len(file) or not file[place]:
        return None, 0
    width = 9 - file[place].bit_length()
    number = int.from_bytes(file[place : place + width], "big") & (1 << 7 * width) - 1
    return (None if number == (1 << 7 * width) - 1 else number), width


def _block(file: Data, at: int, end: int, sounds: dict[int, dict[bytes, Length]]) -> float:
    """Return the seconds of a block: all are sound where no track is known."""
    track, width = number_at(file, at)
    lengths = sounds.get(-1 if track is None else track, {}) if sounds else {b"": partial(_flat, LONGEST_FRAME)}
    at += width + 3
    if not lengths or at > end:
        return 0.0
    longest = max(length(at) for length in lengths.values())
    if not file[at - 1] & 6:
        return longest
    return (file[at] + 1 if at < end else 0) * max(LONGEST_PACKET, longest)  # several frames, which are not looked for


def _length_of(file: Data, codec: bytes) -> Length:
    codec = codec.rstrip(b"\0")
    if codec == b"A_OPUS":
        return lambda at: opus_packet(file, at)
    if codec == b"A_FLAC":
        return lambda at: flac_frame(file, at, 0) or 0.0
    return partial(_flat, next((each for name, each in FLAT_FRAMES.items() if codec.startswith(name)), LONGEST_FRAME))


def _flat(seconds: float, _: int) -> float:
    return seconds


def _float(data: bytes) -> float:
    """Return a number; 0 for one that is none, or endless."""
    if len(data) not in (4, 8):
        return 0.0
    (number,) = struct.unpack(">f" if len(data) == 4 else ">d", data)
    return float(number) if 0 <= number < 1e12 else 0.0
