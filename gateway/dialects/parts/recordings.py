# How long a recording can last, told from what its decoder finds: what its transcription is held for.

from __future__ import annotations

import math

from gateway.dialects.parts.packed_recordings import packed_seconds
from protocol.media.audio import most_seconds

ROUNDING = 1e-6  # seconds, of a sum of many frames
MOST_SECONDS = 100_000_000  # three years: a head may claim what no limit and no column can hold


def seconds_of(file: bytes | bytearray) -> tuple[int, int]:
    """Return the most seconds that a file lasts, and about how many it does. Of WAV both are what its header says, of
    FLAC, Ogg, AAC, MP4 and WebM what their frames add up to. At least one."""
    if (found := packed_seconds(file)) is not None:
        return (max(1, math.ceil(min(found, MOST_SECONDS) - ROUNDING)),) * 2
    return most_seconds(file)
