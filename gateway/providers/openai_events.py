# Streamed replies in OpenAI's dialect: chunks become events. Only what we read is named in the shapes.

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, Struct

from gateway.errors import UpstreamError
from gateway.providers.openai_replies import NOTHING, UsageObject, present, read_finish_reason, seconds, told_usage
from gateway.providers.reading import SseEvents
from protocol.events import Delta, Event, ToolCallDelta, UsageReport


class OpenAIEvents(SseEvents):
    """Reads one streamed reply in OpenAI's dialect. ``choices`` is how many were asked for."""

    def __init__(self, choices: int = 1) -> None:
        super().__init__()
        self._choices = choices
        self._finished: set[int] = set()  # choices that have said why they ended

    def _has_reason(self) -> bool:
        return bool(self._finished)

    def _has_finished(self) -> bool:
        return len(self._finished) >= self._choices

    def _read_event(self, data: bytes, events: list[Event]) -> None:
        if data == b"[DONE]":
            self._end(events)
        else:
            self._read_chunk(data, events)

    def _read_chunk(self, data: bytes, events: list[Event]) -> None:
        try:
            chunk = _chunk_decoder.decode(data)
        except msgspec.DecodeError as exc:
            raise UpstreamError("The upstream sent a chunk that is not JSON.", outcome="malformed") from exc
        if present(chunk.error) is not None:
            raise UpstreamError("The upstream reported an error.", outcome="error_frame")
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                self._finished.add(choice.index)
            events.append(choice.delta_event())
        if (usage := told_usage(chunk.usage)) is not None:
            events.append(UsageReport(usage))


class _DeltaFunction(Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _DeltaToolCall(Struct, frozen=True):
    index: int = 0
    id: str | None = None
    function: _DeltaFunction = _DeltaFunction()


class _Delta(Struct, frozen=True):
    content: str | None = None
    refusal: str | None = None
    tool_calls: tuple[_DeltaToolCall, ...] | None = None
    reasoning_content: str | None = None


class _ChunkChoice(Struct, frozen=True):
    index: int = 0
    delta: _Delta = _Delta()
    text: str | None = None  # completions
    finish_reason: str | None = None
    logprobs: Raw = NOTHING
    token_ids: tuple[int, ...] | None = None
    gpu_seconds: float | None = None
    stop_reason: Any = None  # vLLM's: the stop sequence, or a token's id

    def delta_event(self) -> Delta:
        calls = tuple(
            ToolCallDelta(call.index, call.function.arguments or "", call.id, call.function.name)
            for call in self.delta.tool_calls or ()
        )
        return Delta(
            self.index,
            self.delta.content or self.text or "",
            calls,
            self.delta.refusal or "",
            self.delta.reasoning_content or "",
            read_finish_reason(self.finish_reason) if self.finish_reason is not None else None,
            present(self.logprobs),
            self.token_ids or (),
            seconds(self.gpu_seconds),
            stop_sequence=self.stop_reason if isinstance(self.stop_reason, str) else None,
        )


class _Chunk(Struct, frozen=True):
    choices: tuple[_ChunkChoice, ...] = ()
    usage: UsageObject | None = None
    error: Raw = NOTHING


_chunk_decoder = msgspec.json.Decoder(_Chunk)
