# Speech in OpenAI's dialect: bytes of audio as they come, or events that hold them in base64 and end with a count.

from __future__ import annotations

import base64
import binascii
import re

import msgspec
from msgspec import Raw, Struct

from gateway.upstreams.wire.errors import UpstreamError
from gateway.upstreams.wire.reading import NOTHING, SseEvents, count_of, read_usage
from protocol.chat import FinishReason
from protocol.decoding import NOT_JSON
from protocol.events import Delta, Event, ReplyEnd, UsageReport
from protocol.usage import Usage

LONGEST_SIGN = len(b"event:")  # bytes that tell events from audio
SIGNS = (b"data:", b"event:")
COMMENT = re.compile(rb":[\t\n\r -~]*")  # bare samples may begin with the same byte, and do not go on as text


class SpeechEvents(SseEvents):
    """Reads one reply. Services that know no events answer with audio though they are asked for them."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = b""  # bytes until it is known what they are
        self._is_audio: bool | None = None

    def feed(self, piece: bytes) -> list[Event]:
        """Take in bytes and return the audio, the count and the end that they complete. Raises ``failure``."""
        if self._is_audio is None:
            self._begun += piece
            if len(self._begun) < LONGEST_SIGN:
                return []
            begun = self._begun[:LONGEST_SIGN]
            self._is_audio = not begun.startswith(SIGNS) and COMMENT.fullmatch(begun) is None
            piece, self._begun = self._begun, b""
        if self._is_audio:
            return [Delta(audio=piece)] if piece else []
        return super().feed(piece)

    def finish(self) -> list[Event]:
        """The bytes have ended: audio is whole then, events where the last has said so. Raises UpstreamError."""
        if self._is_audio is False:
            return super().finish()
        rest, self._begun = self._begun, b""
        if self._is_audio is None and not rest:
            raise UpstreamError("The upstream sent nothing.", outcome="empty")
        return [Delta(audio=rest, finish_reason=FinishReason.STOP), ReplyEnd()]

    def _has_reason(self) -> bool:
        return self._is_done

    def _read_event(self, data: bytes, events: list[Event]) -> None:
        if data.strip() == b"[DONE]":
            return
        try:
            said = _event_decoder.decode(data)
            audio = base64.b64decode(said.audio, validate=True)
        except (*NOT_JSON, binascii.Error, ValueError) as exc:
            raise UpstreamError("The upstream sent an event that cannot be read.", outcome="malformed") from exc
        if said.type == "error" or said.error is not NOTHING:
            raise UpstreamError("The upstream reported an error.", outcome="error_frame")
        if audio:
            events.append(Delta(audio=audio))
        if said.type == "speech.audio.done":
            self._is_done = True
            events.append(Delta(finish_reason=FinishReason.STOP))
            if (told := read_usage(said.usage, _Usage)) is not None:
                counts = (count_of(told.input_tokens) or 0, count_of(told.output_tokens) or 0)
                events.append(UsageReport(Usage(input_tokens=counts[0], output_tokens=counts[1])))
            events.append(ReplyEnd())


class _Usage(Struct, frozen=True):
    input_tokens: int | float | None = None
    output_tokens: int | float | None = None


class _Event(Struct, frozen=True):
    type: str = ""
    audio: str = ""
    usage: Raw = NOTHING
    error: Raw = NOTHING


_event_decoder = msgspec.json.Decoder(_Event)
