# Streamed replies in OpenAI's dialect: chunks become events. Only what we read is named in the shapes.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw, Struct

from gateway.upstreams.openai.parts import (
    Audio,
    Content,
    made_up_id,
    present,
    read_arguments,
    read_content,
    read_finish_reason,
    seconds,
    told_apart,
    told_usage,
)
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFailure, UpstreamTimeout
from gateway.upstreams.wire.filters import read_filtered
from gateway.upstreams.wire.reading import (
    NOTHING,
    SseEvents,
    read_error_fields,
    read_refused_field,
    text_in,
    usual_failure,
)
from protocol.decoding import NOT_JSON
from protocol.events import Delta, Event, ToolCallDelta, UsageReport


class OpenAIEvents(SseEvents):
    """Reads one streamed reply in OpenAI's dialect. ``choices`` is how many were asked for."""

    def __init__(self, choices: int = 1) -> None:
        super().__init__()
        self._choices = choices
        self._finished: set[int] = set()  # choices that have said why they ended
        self._calls: dict[int, _Calls] = {}  # by choice
        self._reply = ""  # what tells this reply from others

    def _has_reason(self) -> bool:
        return bool(self._finished)

    def _has_finished(self) -> bool:
        return len(self._finished) >= self._choices

    def _read_event(self, data: bytes, events: list[Event]) -> None:
        if data.startswith(b"[") and data.strip() == b"[DONE]":
            self._end(events)
        else:
            self._read_chunk(data, events)

    def _read_chunk(self, data: bytes, events: list[Event]) -> None:
        try:
            chunk = _chunk_decoder.decode(data)
        except NOT_JSON as exc:
            raise UpstreamError("The upstream sent a chunk that is not JSON.", outcome="malformed") from exc
        if present(chunk.error) is not None:
            raise reported(read_error_fields(data))
        if chunk.choices and not self._reply:  # Azure's first chunk is of its filter, and without an id
            self._reply = told_apart(chunk.id, chunk.created)
        for choice in chunk.choices or ():
            if choice.finish_reason:  # some services say "" until they know
                self._finished.add(choice.index or 0)
            said = self._delta(choice)
            if choice.delta is not None and (audio := choice.delta.audio) is not None:
                events.append(Delta(said.index, audio.transcript or "", spoken=audio.spoken()))
                if said == Delta(said.index):
                    continue
            events.append(said)
        if chunk.usage is not NOTHING and (usage := told_usage(chunk.usage)) is not None:
            events.append(UsageReport(usage, text_in(chunk.service_tier)))

    def _delta(self, choice: _ChunkChoice) -> Delta:
        delta, index = choice.delta or NO_DELTA, choice.index or 0
        calls = tuple([self._piece(index, call) for call in delta.tool_calls]) if delta.tool_calls else ()
        text, thought = delta.content, delta.reasoning_content or ""
        if not thought and delta.reasoning is not NOTHING:
            thought = text_in(delta.reasoning) or ""
        if text is not None and not isinstance(text, str):
            text, thought = read_content(text)
        return Delta(
            index,
            text or choice.text or "",
            calls,
            delta.refusal or "",
            thought,
            read_finish_reason(choice.finish_reason) if choice.finish_reason else None,
            present(choice.logprobs),
            choice.token_ids or (),
            seconds(choice.gpu_seconds),
            stop_sequence=text_in(choice.stop_reason) if choice.stop_reason is not NOTHING else None,
            begins_text=text == "",
        )

    def _piece(self, choice: int, call: _DeltaToolCall) -> ToolCallDelta:
        """Return a piece of a call, which has a number and begins with an id: some services say neither."""
        function = call.function or NO_FUNCTION
        begun = self._calls.setdefault(choice, _Calls())
        index = call.index
        if index is None:  # each new id begins the next call, and so does a name without an id
            known = begun.by_id.get(call.id or "")
            is_next = not begun.numbers or (known is None if call.id else bool(function.name))
            index = len(begun.numbers) if is_next else begun.last if known is None else known
        ident = call.id or None  # some repeat the fields of the head, empty
        if index not in begun.numbers:
            ident = ident or made_up_id(self._reply, choice, index)
            begun.numbers.add(index)
            begun.by_id.setdefault(ident, index)
            begun.last = max(begun.last, index)
        return ToolCallDelta(index, read_arguments(function.arguments), ident, function.name or None)


# Faults of the gateway's own that OpenAI has under the type of a request's: their words are of its key or catalogue.
OURS = frozenset({"account_deactivated", "invalid_api_key", "invalid_organization", "model_not_found"})
OF_REQUESTS = frozenset({"invalid_request_error", "image_generation_user_error"})


def reported(error: Mapping[str, Any]) -> UpstreamFailure:
    """Return what an error inside a stream means. A fault of the request says nothing of the upstream's health."""
    if (filtered := read_filtered(error)) is not None:
        return filtered
    param, code = read_refused_field(error)
    if code == "deadline_exceeded":  # our own engine's word, before our own clock has said it
        return UpstreamTimeout("The upstream took longer than the call may.", outcome="deadline")
    said = str(error.get("code"))
    is_ours = said in OURS or said.isdecimal()
    if said == "400" or (error.get("type") in OF_REQUESTS and not is_ours):  # vLLM's way, and OpenAI's
        return usual_failure(400, {}, error["message"], code=code, param=param)
    return UpstreamError("The upstream reported an error.", outcome="error_frame")


@dataclass(slots=True)
class _Calls:
    """Which calls a choice has begun."""

    numbers: set[int] = field(default_factory=set)
    by_id: dict[str, int] = field(default_factory=dict)  # the first number of each id
    last: int = 0  # the highest number


class _DeltaFunction(Struct, frozen=True):
    name: str | None = None
    arguments: Raw = NOTHING


class _DeltaToolCall(Struct, frozen=True):
    index: int | None = None
    id: str | None = None
    function: _DeltaFunction | None = None


class _Delta(Struct, frozen=True):
    content: Content = None
    refusal: str | None = None
    tool_calls: tuple[_DeltaToolCall, ...] | None = None
    reasoning_content: str | None = None
    reasoning: Raw = NOTHING  # what OpenRouter, Groq and newer vLLM call it
    audio: Audio | None = None


NO_DELTA, NO_FUNCTION = _Delta(), _DeltaFunction()


class _ChunkChoice(Struct, frozen=True):
    index: int | None = None
    delta: _Delta | None = None
    text: str | None = None  # completions
    finish_reason: str | None = None
    logprobs: Raw = NOTHING
    token_ids: tuple[int, ...] | None = None
    gpu_seconds: float | None = None
    stop_reason: Raw = NOTHING  # vLLM's: the stop sequence, or a token's id


class _Chunk(Struct, frozen=True):
    id: Raw = NOTHING
    created: Raw = NOTHING
    choices: tuple[_ChunkChoice, ...] | None = None
    usage: Raw = NOTHING
    service_tier: Raw = NOTHING
    error: Raw = NOTHING


_chunk_decoder = msgspec.json.Decoder(_Chunk)
