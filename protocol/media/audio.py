# Speech made of words, in OpenAI's shapes.

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class VoiceRef(Struct, frozen=True, forbid_unknown_fields=True):
    """A voice that the upstream's account has of its own."""

    id: str


class SpeechRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What to say, and how."""

    model: str
    input: str
    voice: str | VoiceRef
    instructions: str | None = None
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] | None = None
    speed: float | None = None
    stream_format: Literal["audio", "sse"] | None = None
    user: str | None = None

    @property
    def stream(self) -> bool:
        """Whether it comes in pieces: speech always does."""
        return True
