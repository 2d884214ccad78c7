# Recordings written down, and pictures as they become whole, as streams of events, in OpenAI's dialect.

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

from gateway.upstreams.openai.events import reported
from gateway.upstreams.openai.parts import present
from gateway.upstreams.openai.replies import ImageUsage, TranscriptionUsage
from gateway.upstreams.wire.errors import UpstreamError
from gateway.upstreams.wire.reading import NOTHING, SseEvents, decoded, read_error_fields, read_usage
from protocol.chat import FinishReason
from protocol.events import Delta, Event, ReplyEnd, UsageReport
from protocol.media.images import StreamedPicture
from protocol.sse import EventReader

LONGEST_PICTURE = 64 * 1024 * 1024  # bytes of an event: as of a plain reply


class TranscriptionEvents(SseEvents):
    """Reads one streamed reply. It is whole once its last event has come."""

    def __init__(self) -> None:
        super().__init__()
        self._has_words = False

    def _has_reason(self) -> bool:
        return self._is_done

    def _read_event(self, data: bytes, events: list[Event]) -> None:
        said = decoded(data, _event_decoder, "The upstream sent an event that is not JSON.")
        if said.type == "error" or present(said.error) is not None:
            raise reported(read_error_fields(data))
        if said.type == "transcript.text.delta":
            self._has_words = True
            events.append(Delta(text=said.delta, logprobs=present(said.logprobs)))
        elif said.type == "transcript.text.done":
            rest = "" if self._has_words else said.text
            events.append(Delta(text=rest, finish_reason=FinishReason.STOP))
            if (told := read_usage(said.usage, TranscriptionUsage)) is not None:
                events.append(UsageReport(told.used()))
            self._is_done = True
            events.append(ReplyEnd())


class _Event(Struct, frozen=True):
    type: str = ""
    delta: str = ""
    text: str = ""
    logprobs: Raw = NOTHING
    usage: Raw = NOTHING
    error: Raw = NOTHING


class PictureEvents(SseEvents):
    """Reads one picture as it becomes whole. It is whole once its last event has come."""

    def __init__(self) -> None:
        super().__init__()
        self._reader = EventReader(LONGEST_PICTURE)

    def _has_reason(self) -> bool:
        return self._is_done

    def _read_event(self, data: bytes, events: list[Event]) -> None:
        said = decoded(data, _picture_decoder, "The upstream sent an event that is not JSON.")
        if said.type == "error" or present(said.error) is not None:
            raise reported(read_error_fields(data))
        is_whole = said.type.endswith(".completed")
        if not (is_whole or said.type.endswith(".partial_image")):
            return
        if not (bytes(memoryview(said.b64_json)[:1]) == b'"' or said.url):  # not copied: it may be long
            raise UpstreamError("The upstream sent an event without its picture.", outcome="malformed")
        place = None if is_whole else said.partial_image_index or 0
        told = (said.size, said.quality, said.background, said.output_format)
        picture = StreamedPicture(said.b64_json, said.url, place, *told)
        events.append(Delta(picture=picture, finish_reason=FinishReason.STOP if is_whole else None))
        if is_whole:
            events.append(UsageReport((read_usage(said.usage, ImageUsage) or ImageUsage()).used(1)))
            self._is_done = True
            events.append(ReplyEnd())


class _PictureEvent(Struct, frozen=True):
    type: str = ""
    b64_json: Raw = NOTHING
    url: str | None = None
    partial_image_index: int | None = None
    size: str | None = None
    quality: str | None = None
    background: str | None = None
    output_format: str | None = None
    usage: Raw = NOTHING
    error: Raw = NOTHING


_event_decoder = msgspec.json.Decoder(_Event)
_picture_decoder = msgspec.json.Decoder(_PictureEvent)
