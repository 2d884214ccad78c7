# Speech in OpenAI's shapes: what is checked of a request, and how its reply is written.

from __future__ import annotations

import base64

import msgspec

from billing.core.money import to_text
from gateway.dialects.checks import check_tags, require, require_between
from gateway.dialects.endpoint import ApiEndpoint, ReplyFacts
from protocol.errors import ServiceError
from protocol.events import Delta, Event, UsageReport
from protocol.inference import WholeReply
from protocol.media.audio import SpeechRequest
from protocol.sse import encode_event
from protocol.usage import Usage

LONGEST_TEXT = 4_096  # characters of what is said, as OpenAI has it, and of how
MEDIA_TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}


def check_speech(request: SpeechRequest) -> None:
    """Refuse what the types let through and OpenAI's API does not. Raises BadRequest."""
    require(request.input.strip() != "", "input", "'input' must not be empty.")
    for name in ("input", "instructions"):
        is_short = len(getattr(request, name) or "") <= LONGEST_TEXT
        require(is_short, name, f"'{name}' may have at most {LONGEST_TEXT} characters. Send it in parts.")
    require_between(request.speed, 0.25, 4.0, "speed")
    check_tags(request)


def media_type(request: SpeechRequest) -> str | None:
    """Return what the audio is; ``None`` where it is wanted in events."""
    return None if request.stream_format == "sse" else MEDIA_TYPES[request.response_format or "mp3"]


class SpeechWriter:
    """Writes audio as it comes, or events that hold it."""

    def __init__(self, request: SpeechRequest, request_id: str, created: int) -> None:
        self._has_events = request.stream_format == "sse"

    def whole(self, reply: ReplyFacts, whole: WholeReply, usage: Usage) -> bytes:
        """Nothing comes whole."""
        raise AssertionError("speech comes in pieces")

    def pieces(self, reply: ReplyFacts, events: list[Event]) -> bytes:
        """Return the audio of events that came together, and at the end, in an event, what it took."""
        audio = b"".join([event.audio for event in events if isinstance(event, Delta)])
        if not self._has_events:
            return audio
        out = [_event({"type": "speech.audio.delta", "audio": base64.b64encode(audio).decode()})] if audio else []
        for event in events:
            if isinstance(event, UsageReport):
                told = {
                    "input_tokens": event.usage.input_tokens,
                    "output_tokens": event.usage.output_tokens,
                    "total_tokens": event.usage.total_tokens,
                    "cost_usd": to_text(reply.record.cost_nanousd),
                }
                out.append(_event({"type": "speech.audio.done", "usage": told}))
        return b"".join(out)

    def error(self, error: ServiceError) -> bytes:
        """Return the event that tells of a broken reply; nothing where bytes of audio can only end too soon."""
        return _event({"type": "error", **error.body()}) if self._has_events else b""


def _event(told: dict[str, object]) -> bytes:
    return encode_event(msgspec.json.encode(told))


SPEECH = ApiEndpoint(
    path="/v1/audio/speech",
    name="speech",
    operation="create_speech",
    summary="Say a text",
    description="Return a text as audio, byte by byte as it is made, or in events (``stream_format: sse``).",
    body_type=SpeechRequest,
    check=check_speech,
    writer=SpeechWriter,
    media_type=media_type,
    is_for_batches=False,
    route_field="input",
    route_signs=frozenset({"voice", "stream_format", "speed"}),
)
