# How long packed recordings last at the most: FLAC, Ogg, AAC, MP4 and WebM pack silence to a few bytes a second, so
# their frames are counted as a decoder finds them. What their heads claim of the whole counts where it is longer, never
# where it is shorter. Every function returns seconds, or ``None`` for what is not of its kind.

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from gateway.dialects.parts.packed_frames import (
    AAC_FRAME,
    LONGEST_PACKET,
    Data,
    flac_frame,
    opus_packet,
    vorbis_packet,
)
from gateway.dialects.parts.webm_recordings import webm_seconds
from protocol.media.audio import behind_tags

MOST_READ = 300_000  # frames or packets of a file that are read one by one: those beyond count as long as one can be
FLAC_SYNC = re.compile(rb"\xff[\xf8\xf9]")  # RFC 9639, section 9.1
LONGEST_FRAME = 65_536  # samples
ADTS_SYNC = re.compile(rb"\xff[\xf0\xf1\xf8\xf9]")  # ISO 14496-3, 1.A.3
AAC_RATES = (96_000, 88_200, 64_000, 48_000, 44_100, 32_000, 24_000, 22_050, 16_000, 12_000, 11_025, 8_000, 7_350)
# Seconds in a sample of an MP4 at the most, by its form; those of AAC go by the rate that its head has.
MP4_FRAMES = {b"Opus": 0.12, b"alac": 16_384 / 8_000, b"fLaC": 65_535 / 8_000, b".mp3": 0.072, b"samr": 0.02}
MP4_FRAMES |= {b"sawb": 0.02, b"ac-3": 0.048, b"ec-3": 0.048}
PLAIN_FORMS = (b"sowt", b"twos", b"lpcm", b"raw ", b"ulaw", b"alaw", b"ipcm", b"fpcm", b"in24", b"in32", b"fl32")
HOLDS_BOXES = frozenset((b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"moof", b"traf"))
MOST_BOXES = 100_000


def packed_seconds(file: Data) -> float | None:
    """Return how long a packed recording lasts at the most; ``None``: it has no frame of a kind that is known here."""
    place = behind_tags(file)
    kinds: tuple[Callable[[Data, int], float | None], ...] = (_flac, _ogg, _adts, _mp4, webm_seconds)
    return next((seconds for kind in kinds if (seconds := kind(file, place))), None)


def _flac(file: Data, place: int) -> float | None:
    rate = 0  # as its head has it
    if file[place : place + 4] == b"fLaC":
        rate = int.from_bytes(file[place + 18 : place + 21], "big") >> 4
    elif flac_frame(file, place, 0) is None:
        return None
    seconds = 0.0
    for read, sync in enumerate(FLAC_SYNC.finditer(file, place)):
        if read == MOST_READ:
            rest = sum(1 for _ in FLAC_SYNC.finditer(file, sync.start()))
            return seconds + rest * LONGEST_FRAME / (rate or 1)
        seconds += flac_frame(file, sync.start(), rate) or 0.0
    return seconds


def _ogg(file: Data, place: int) -> float | None:
    """Packets of all streams and pages, also of pages inside of others: a decoder that loses its way finds those."""
    if file[place : place + 4] != b"OggS":
        return None
    seconds, packets, pages = 0.0, 0, 0
    streams: dict[bytes, _Stream] = {}
    place -= 1
    while (place := file.find(b"OggS", place + 1)) >= 0:
        head = file[place : place + 27]
        if len(head) < 27:
            break
        sizes, number = file[place + 27 : place + 27 + head[26]], bytes(head[14:18])
        stream, at, begins = streams.setdefault(number, _Stream()), place + 27 + head[26], not head[5] & 1
        if head[5] & 2 or pages == 0:
            stream.begin(file, at)
        pages += 1
        if packets > MOST_READ:
            seconds += max(LONGEST_PACKET, stream.usual) * len(sizes)
        if pages > MOST_READ:
            return seconds + file.count(b"OggS", place) * 255 * max(LONGEST_PACKET, stream.usual)
        for size in sizes if packets <= MOST_READ else b"":
            if begins:
                seconds += stream.packet(file, at)
                packets += 1
            at, begins = at + size, size < 255
    return seconds


class _Stream:
    """What a stream of Ogg holds, by all pages that say so: one of them may be one that a decoder passes over."""

    __slots__ = ("_flac_rate", "_has_begun", "_is_opus", "usual")

    def __init__(self) -> None:
        self.usual = 0.0  # seconds in a packet, whatever it holds
        self._is_opus = self._has_begun = False
        self._flac_rate: int | None = None

    def begin(self, file: Data, place: int) -> None:
        """Take in its first packet."""
        self._has_begun = True
        if file[place : place + 8] == b"OpusHead":
            self._is_opus = True
        elif (seconds := vorbis_packet(file, place)) is not None:
            self.usual = max(self.usual, seconds)
        elif file[place : place + 5] == b"\x7fFLAC":
            rate = int.from_bytes(file[place + 27 : place + 30], "big") >> 4
            self._flac_rate = min(rate, self._flac_rate or rate)
        else:
            self.usual = max(self.usual, LONGEST_PACKET)

    def packet(self, file: Data, place: int) -> float:
        """Return the seconds of a packet that begins there."""
        seconds = self.usual if self._has_begun else LONGEST_PACKET
        if self._is_opus:
            seconds = max(seconds, opus_packet(file, place))
        if self._flac_rate is not None:
            seconds = max(seconds, flac_frame(file, place, self._flac_rate) or 0.0)
        return seconds


def _adts(file: Data, place: int) -> float | None:
    if ADTS_SYNC.match(file, place) is None:
        return None
    seconds = 0.0
    for read, sync in enumerate(ADTS_SYNC.finditer(file, place)):
        if read > MOST_READ:
            return seconds + sum(4 * AAC_FRAME / AAC_RATES[-1] for _ in ADTS_SYNC.finditer(file, sync.start()))
        head = file[sync.start() : sync.start() + 7]
        if len(head) == 7 and (code := head[2] >> 2 & 15) < len(AAC_RATES):
            seconds += ((head[6] & 3) + 1) * AAC_FRAME / AAC_RATES[code]
    return seconds


def _mp4(file: Data, place: int) -> float | None:
    """Samples of all tracks by their form, in tables and in fragments; and what the heads claim."""
    if file[place + 4 : place + 8] not in (b"ftyp", b"moov", b"styp", b"wide", b"free", b"mdat"):
        return None
    scale, claims, frame, count, repeats = 1, 0.0, 0.0, 0, 1
    for name, at, end in _boxes(file, place, len(file)):
        body = file[at:end] if name not in (b"mdat", *HOLDS_BOXES) else b""
        match name:
            case b"mvhd" | b"mdhd":
                scale, claimed = _scaled(body)
                claims = max(claims, claimed)
            case b"elst":
                repeats = max(repeats, int.from_bytes(body[4:8], "big"))
            case b"stsd":
                frame = max(frame, _frame_of(body))
            case b"stsz" | b"stz2":
                count += int.from_bytes(body[8:12], "big")
            case b"trun":
                count += int.from_bytes(body[4:8], "big")
            case b"stts":
                entries = [int.from_bytes(body[i : i + 4], "big") for i in range(8, min(len(body), 80_000), 4)]
                claims = max(claims, sum(map(int.__mul__, entries[::2], entries[1::2])) / scale)
            case b"":  # more boxes than are read: a sample has a byte at the least
                frame, count = max(frame, LONGEST_PACKET), count + len(file)
    return max(claims, count * frame) * repeats if count and frame else None


def _boxes(file: Data, place: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the boxes of an MP4 with where what they hold begins and ends, those inside of others too; a last one
    without a name where there are more."""
    ends = [end]
    for number in range(MOST_BOXES + 1):
        while ends and place + 8 > ends[-1]:
            place = max(place, ends.pop())
        if not ends:
            return
        size, name, at = int.from_bytes(file[place : place + 4], "big"), bytes(file[place + 4 : place + 8]), place + 8
        if size == 1:
            size, at = int.from_bytes(file[at : at + 8], "big"), at + 8
        until = min(ends[-1], place + size) if size else ends[-1]
        if until < at:
            return
        if number == MOST_BOXES:
            name, until = b"", ends[0]
        yield name, at, until
        if name in HOLDS_BOXES:
            ends.append(until)
            place = at
        else:
            place = until


def _scaled(body: Data) -> tuple[int, float]:
    """Return the time scale of a head, and the seconds that it claims."""
    at, width = (20, 8) if body[:1] == b"\x01" else (12, 4)
    scale = int.from_bytes(body[at : at + 4], "big") or 1
    long = int.from_bytes(body[at + 4 : at + 4 + width], "big")
    return scale, 0.0 if long == (1 << 8 * width) - 1 else long / scale


def _frame_of(body: Data) -> float:
    """Return the seconds of a track's sample at the most, by what describes it; 0: it is no sound that is packed."""
    form = bytes(body[12:16])
    if form in PLAIN_FORMS:
        return 1 / (int.from_bytes(body[40:42], "big") or 1)
    if form != b"mp4a":
        return MP4_FRAMES.get(form, 0.0)
    place = body.find(b"esds")
    found = re.search(rb"\x05(?:[\x80-\xff]{0,3})[\x02-\x7f](..)", bytes(body[max(0, place) :]), re.DOTALL)
    bits = int.from_bytes(found[1], "big") if found is not None and place > 0 else 0xFFFF
    kind, code = bits >> 11, bits >> 7 & 15
    if kind == 31 or code >= len(AAC_RATES):  # a newer one, of longer frames, or a rate that is written out
        return 2 * AAC_FRAME / AAC_RATES[-1]
    return AAC_FRAME / AAC_RATES[code]
