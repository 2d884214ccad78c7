# Recordings written down as a stream of events, in OpenAI's dialect.

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

from gateway.upstreams.openai.parts import present
from gateway.upstreams.openai.replies import TranscriptionUsage
from gateway.upstreams.wire.errors import UpstreamError
from gateway.upstreams.wire.reading import NOTHING, SseEvents, read_usage
from protocol.chat import FinishReason
from protocol.decoding import NOT_JSON
from protocol.events import Delta, Event, ReplyEnd, UsageReport


class TranscriptionEvents(SseEvents):
    """Reads one streamed reply. It is whole once its last event has come."""

    def __init__(self) -> None:
        super().__init__()
        self._has_words = False

    def _has_reason(self) -> bool:
        return self._is_done

    def _read_event(self, data: bytes, events: list[Event]) -> None:
        try:
            said = _event_decoder.decode(data)
        except NOT_JSON as exc:
            raise UpstreamError("The upstream sent an event that is not JSON.", outcome="malformed") from exc
        if said.type == "error" or present(said.error) is not None:
            raise UpstreamError("The upstream reported an error.", outcome="error_frame")
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


_event_decoder = msgspec.json.Decoder(_Event)
