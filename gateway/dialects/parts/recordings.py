# How long a recording can last, told from what its decoder finds: what its transcription is held for.

from __future__ import annotations

import math

from gateway.dialects.parts.packed_recordings import behind_tags, packed_seconds

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


ROUNDING = 1e-6  # seconds, of a sum of many frames
MOST_SECONDS = 100_000_000  # three years: a head may claim what no limit and no column can hold
BEGINNING = 64 * 1024  # bytes of a WAV in which what stands before its samples is looked for


def seconds_of(file: bytes | bytearray) -> tuple[int, int]:
    """Return the most seconds that a file lasts, and about how many it does. Of WAV both are what its header says, of
    FLAC, Ogg, AAC, MP4 and WebM what their frames add up to. At least one."""
    if (found := packed_seconds(file)) is not None:
        return (max(1, math.ceil(min(found, MOST_SECONDS) - ROUNDING)),) * 2
    place, size = behind_tags(file), len(file)
    least, usual = _rates(bytes(file[place : place + BEGINNING]), is_tagged=place > 0)
    return max(1, -(-size // least)), max(1, -(-size // usual))


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
