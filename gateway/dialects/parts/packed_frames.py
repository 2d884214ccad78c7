# Single frames of packed sound: how many seconds one that begins at a place of a file has, as a decoder finds it.

from __future__ import annotations

LONGEST_PACKET = 0.12  # seconds in a packet of Opus
FLAC_RATES = (0, 88_200, 176_400, 192_000, 8_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000)
AAC_FRAME = 1_024  # samples, at the rate of the core
# Seconds of a frame of Opus by its configuration (RFC 6716, section 3.1), in fours: SILK, hybrid, CELT.
OPUS_FRAMES = (*(0.01, 0.02, 0.04, 0.06) * 3, *(0.01, 0.02) * 2, *(0.0025, 0.005, 0.01, 0.02) * 4)

Data = bytes | bytearray


def flac_frame(file: Data, place: int, usual_rate: int) -> float | None:
    """Return the seconds of a frame, if one begins there: its head has a checksum."""
    head = file[place : place + 16]
    if len(head) < 6 or head[0] != 0xFF or head[1] & 0xFE != 0xF8 or head[3] & 1:
        return None
    size_code, rate_code = head[2] >> 4, head[2] & 15
    at = 4 + max(1, 8 - (head[4] ^ 0xFF).bit_length())  # behind its number, written as UTF-8 is
    samples = (0, 192, 576, 1_152, 2_304, 4_608)[size_code] if size_code < 6 else 256 << (size_code - 8) % 8
    if size_code in (6, 7):
        width = size_code - 5
        samples, at = int.from_bytes(head[at : at + width], "big") + 1, at + width
    rate = FLAC_RATES[rate_code] if rate_code < 12 else 0
    if rate_code in (12, 13, 14):
        width, unit = ((1, 1_000), (2, 1), (2, 10))[rate_code - 12]
        rate, at = int.from_bytes(head[at : at + width], "big") * unit, at + width
    if not samples or rate_code == 15 or at >= len(head) or _crc8(head[:at]) != head[at]:
        return None
    rates = [each for each in (rate, usual_rate) if each]
    return samples / min(rates, default=1)


def _crc8(data: Data) -> int:
    crc = 0
    for byte in data:
        crc = _CRC8[crc ^ byte]
    return crc


def _crc8_table() -> tuple[int, ...]:
    table = list(range(256))
    for _ in range(8):
        table = [(crc << 1 ^ 0x07 if crc & 0x80 else crc << 1) & 0xFF for crc in table]
    return tuple(table)


_CRC8 = _crc8_table()


def opus_packet(file: Data, place: int) -> float:
    head = file[place : place + 2]
    if not head or bytes(head) == b"Op":  # its heads say nothing
        return 0.0
    count = (1, 2, 2, head[-1] & 63)[head[0] & 3]
    return min(LONGEST_PACKET, count * OPUS_FRAMES[head[0] >> 3])


def vorbis_packet(file: Data, place: int) -> float | None:
    """Return the seconds of a packet of Vorbis at the most, by the head of its stream, which begins there."""
    head = file[place : place + 29]
    if head[:7] != b"\x01vorbis" or len(head) < 29:
        return None
    return (1 << (head[28] >> 4)) / 2 / max(1, int.from_bytes(head[12:16], "little"))
