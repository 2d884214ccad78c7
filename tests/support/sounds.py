# Recordings for tests.

from __future__ import annotations

import io
import wave


def wav(seconds: int) -> bytes:
    """Return silence that lasts so long."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(1)
        sound.setframerate(8_000)
        sound.writeframes(b"\x80" * 8_000 * seconds)
    return file.getvalue()
