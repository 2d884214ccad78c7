# How long a recording can last, told from its size and its first bytes: what its transcription is held for.

from __future__ import annotations

WAV_PLAIN = (1, 3, 6, 7)  # its ways of writing samples one by one: whole numbers, floats, A-law and µ-law
EXTENSIBLE = 0xFFFE  # says further on which way it is
# Bytes a second, by what a file is: at the least, and usual ones. MP3: 8 kbit/s, the lowest rate that its frames know;
# 128. All others: 6 kbit/s, the lowest rate of Opus, though silence may take less; 64.
MP3 = (1_000, 16_000)
OTHER = (750, 8_000)


def seconds_of(begun: bytes, size: int) -> tuple[int, int]:
    """Return the most seconds that a file of ``size`` bytes which has ``begun`` so lasts, and about how many it does.
    Of WAV both are what its header says. At least one."""
    least, usual = _rates(begun)
    return max(1, -(-size // least)), max(1, -(-size // usual))


def _rates(begun: bytes) -> tuple[int, int]:
    if begun[:4] == b"RIFF" and begun[8:12] == b"WAVE" and (rate := _wav_rate(begun)):
        return rate, rate
    if begun[:3] == b"ID3" or (begun[:1] == b"\xff" and begun[1:2] >= b"\xe0"):
        return MP3
    return OTHER


def _wav_rate(begun: bytes) -> int | None:
    """Return the bytes of a second, from the samples that the header tells of; ``None`` for packed ones."""
    place = begun.find(b"fmt ", 12)
    fields = begun[place + 8 : place + 34]
    if place < 0 or len(fields) < 26:
        return None
    kind, channels = int.from_bytes(fields[:2], "little"), int.from_bytes(fields[2:4], "little")
    if kind == EXTENSIBLE:
        kind = int.from_bytes(fields[24:26], "little")
    samples, bits = int.from_bytes(fields[4:8], "little"), int.from_bytes(fields[14:16], "little")
    return samples * channels * bits // 8 if kind in WAV_PLAIN else None
