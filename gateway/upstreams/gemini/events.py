# Streamed answers of Gemini: pieces of the one shape that replies.py reads. A stream has no marker of its end: it is
# whole once a piece has said why the answer ended.

from __future__ import annotations

from gateway.upstreams.gemini.replies import NOTHING_TOLD, Candidate, Told, answer_decoder, read_call, read_finish
from gateway.upstreams.wire.errors import UpstreamError
from gateway.upstreams.wire.filters import read_filtered
from gateway.upstreams.wire.reading import SseEvents, decoded, read_error_fields
from gateway.upstreams.wire.signatures import GEMINI
from protocol.chat import FinishReason
from protocol.events import Delta, Event, ToolCallDelta, UsageReport
from protocol.usage import Usage


class GeminiEvents(SseEvents):
    """Reads one streamed answer."""

    def __init__(self, told: Told = NOTHING_TOLD) -> None:
        super().__init__()
        self._told = told
        self._calls = 0
        self._has_ended = False
        self._usage: Usage | None = None
        self._reply = ""  # what tells this reply from others

    def _has_reason(self) -> bool:
        return self._has_ended

    def _read_event(self, data: bytes, events: list[Event]) -> None:
        answer = decoded(data, answer_decoder, "The upstream sent a piece that is not JSON.")
        if bytes(answer.error) not in (b"", b"null"):
            if (filtered := read_filtered(read_error_fields(data))) is not None:
                raise filtered
            raise UpstreamError("The upstream reported an error.", outcome="error_frame")
        if (refused := answer.refused()) is not None:
            raise refused
        self._reply = self._reply or answer.reply
        for candidate in (answer.candidates or ())[:1]:
            self._read_candidate(candidate, events)
        if (usage := answer.usage(is_last=self._has_ended)) is not None and usage != self._usage:
            self._usage = usage  # it counts all that came so far
            events.append(UsageReport(usage))

    def _read_candidate(self, candidate: Candidate, events: list[Event]) -> None:
        for part in candidate.parts:
            if part.function_call is not None:
                if self._told.one_call and self._calls:
                    continue
                if part.thought_signature:
                    events.append(Delta(signature=GEMINI + part.thought_signature))
                call = read_call(part.function_call, self._told, self._reply, self._calls)
                piece = ToolCallDelta(self._calls, call.function.arguments, call.id, call.function.name)
                self._calls += 1
                events.append(Delta(tool_calls=(piece,)))
            elif part.text:
                events.append(Delta(reasoning=part.text) if part.thought else Delta(text=part.text))
        if candidate.finish_reason and not self._has_ended:
            finish = read_finish(candidate.finish_reason)
            if self._calls and finish is FinishReason.STOP:
                finish = FinishReason.TOOL_CALLS
            self._has_ended = True
            events.append(Delta(finish_reason=finish))
