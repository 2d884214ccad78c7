# The Anthropic wire format: the Messages API, whole replies and streams. Requests are built in anthropic_request.py.

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from gateway.errors import UpstreamBusy, UpstreamError, UpstreamFailure, UpstreamRefused
from gateway.providers.anthropic_request import Unsayable, count_body, message_body, native_body
from gateway.providers.base import Asking, EventStream, Request, UpstreamRequest, WholeReply
from gateway.providers.reading import NOT_JSON, SseEvents, count_of, read_error_fields, read_retry_after, read_usage
from protocol.chat import ChatReply, ChatRequest, Choice, FinishReason, FunctionCall, Reasoning, ReplyMessage, ToolCall
from protocol.events import Delta, Event, ToolCallDelta, UsageReport
from protocol.messages import CountRequest
from protocol.usage import Usage
from router.targets import Target

VERSION = "2023-06-01"
TOO_LONG = re.compile(r"prompt is too long|input length and `max_tokens` exceed")  # how it words this one fault

STOP_REASONS = {
    "end_turn": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "pause_turn": FinishReason.STOP,
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
    "tool_use": FinishReason.TOOL_CALLS,
    "refusal": FinishReason.CONTENT_FILTER,
}


class AnthropicFormat:
    """Speaks Anthropic's dialect to an upstream. Its base URL is written as Anthropic's SDK takes it, without /v1."""

    def build_request(self, asking: Asking) -> UpstreamRequest:
        """Return the request for POST /v1/messages. Raises Unsayable for what this dialect does not know."""
        request, model = asking.request, asking.target.model
        if not isinstance(request, ChatRequest):
            raise Unsayable("The model that answers here takes chat completions alone.", param="model")
        if asking.native is not None:
            body = native_body(asking.native, request, model.upstream_model, streams=asking.streams)
        else:
            body = message_body(request, model.upstream_model, model.max_output, streams=asking.streams)
        return _post("/v1/messages", body | dict(asking.extra), asking.target, asking.api_key)

    def build_count(self, asked: CountRequest, target: Target, api_key: str | None) -> UpstreamRequest:
        """Return the request for POST /v1/messages/count_tokens."""
        return _post("/v1/messages/count_tokens", count_body(asked, target.model.upstream_model), target, api_key)

    def read_count(self, body: bytes) -> int | None:
        """Return the count that ``body`` holds, or ``None`` when it is none."""
        try:
            return count_of(_count_decoder.decode(body).input_tokens)
        except NOT_JSON:
            return None

    def read_reply(self, request: Request, body: bytes) -> tuple[WholeReply, Usage | None]:
        """Return the message that ``body`` holds."""
        try:
            message = _message_decoder.decode(body)
        except NOT_JSON as exc:
            raise UpstreamError("The upstream's answer is not what its format promises.", outcome="malformed") from exc
        return message.reply(), (read_usage(message.usage, _Usage) or _Usage()).count()

    def open_events(self, request: Request) -> EventStream:
        """Return a reader for a streamed message."""
        return AnthropicEvents()

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> UpstreamFailure:
        """Return what a failing answer means: whose fault it is, and whether another target may be tried."""
        error = read_error_fields(body)
        message, details = error.get("message", ""), error.get("details")
        match status:
            case 401 | 403:
                return UpstreamError("The upstream refused the gateway's own credentials.", outcome="refused_key")
            case 402:
                return UpstreamBusy("The gateway's own account at the upstream is used up.", outcome="spend_cap")
            case 404:
                return UpstreamError("The upstream does not know the model or the path.", outcome="not_found")
            case 429 if isinstance(details, dict) and details.get("error_code") == "enforced_spend_limit_reached":
                return UpstreamBusy("The gateway's own account at the upstream is used up.", outcome="spend_cap")
            case 429 if message.startswith("Request too large"):
                return UpstreamBusy("The request alone exceeds the upstream's rate limit.", outcome="too_large")
            case 429:
                return UpstreamBusy("The upstream's rate limit is reached.", retry_after=read_retry_after(headers))
            case 400 | 409 | 413 | 422:
                code = "context_length_exceeded" if TOO_LONG.match(message) else None
                words = message or "The upstream refused the request."
                return UpstreamRefused(words, status=413 if status == 413 else 400, code=code)
            case 529:
                failure = UpstreamError("The upstream is overloaded.", outcome="overloaded")
                failure.retry_after = read_retry_after(headers)
                return failure
        failure = UpstreamError(f"The upstream answered {status}.", outcome=f"status_{status}")
        failure.retry_after = read_retry_after(headers)
        return failure


def _post(path: str, body: dict[str, Any], target: Target, api_key: str | None) -> UpstreamRequest:
    headers = {"content-type": "application/json", "accept-encoding": "identity", "anthropic-version": VERSION}
    if api_key:
        headers["x-api-key"] = api_key
    url = target.endpoint.base_url.rstrip("/") + path
    return UpstreamRequest("POST", url, headers, msgspec.json.encode(body))


class AnthropicEvents(SseEvents):
    """Reads one streamed message."""

    def __init__(self) -> None:
        super().__init__()
        self._usage = _Usage()
        self._tools: dict[int, int] = {}  # index of a content block -> index among the tool calls
        self._unsaid: set[int] = set()  # tool blocks whose arguments have not begun
        self._stop_reason: str | None = None

    def _has_reason(self) -> bool:
        return self._stop_reason is not None

    def _read_event(self, data: bytes, events: list[Event]) -> None:
        try:
            event = _event_decoder.decode(data)
        except NOT_JSON as exc:
            raise UpstreamError("The upstream sent an event that is not JSON.", outcome="malformed") from exc
        match event.type:
            case "content_block_delta" if event.delta is not None:
                self._read_delta(event.index, event.delta, events)
            case "content_block_start" if event.content_block is not None:
                self._begin_block(event.index, event.content_block, events)
            case "content_block_stop" if event.index in self._unsaid:
                self._unsaid.discard(event.index)
                events.append(Delta(tool_calls=(ToolCallDelta(self._tools[event.index], "{}"),)))
            case "message_start" if event.message is not None:
                self._count(event.message.usage, events)
            case "message_delta":
                self._count(event.usage, events)
                if event.delta is not None and (reason := event.delta.stop_reason):
                    self._stop_reason = reason
                    why = STOP_REASONS.get(reason, FinishReason.STOP)
                    events.append(Delta(finish_reason=why, stop_sequence=event.delta.stop_sequence))
            case "message_stop":
                self._end(events)
            case "error":
                is_full = event.error is not None and event.error.type == "overloaded_error"
                raise UpstreamError(
                    "The upstream reported an error.", outcome="overloaded" if is_full else "error_frame"
                )

    def _begin_block(self, place: int, block: _Block, events: list[Event]) -> None:
        if block.type == "tool_use":
            self._tools[place] = index = len(self._tools)
            arguments = ""
            if block.input:  # said at once, as some compatible services do
                arguments = msgspec.json.encode(block.input).decode()
            else:
                self._unsaid.add(place)
            events.append(Delta(tool_calls=(ToolCallDelta(index, arguments, block.id or "", block.name or ""),)))
        elif block.text or block.thinking or block.data:
            events.append(Delta(text=block.text or "", reasoning=block.thinking or "", redacted=block.data or ""))

    def _read_delta(self, place: int, delta: _EventDelta, events: list[Event]) -> None:
        if delta.text:
            events.append(Delta(text=delta.text))
        elif delta.thinking:
            events.append(Delta(reasoning=delta.thinking))
        elif delta.signature:
            events.append(Delta(signature=delta.signature))
        elif delta.partial_json and place in self._tools:
            self._unsaid.discard(place)
            events.append(Delta(tool_calls=(ToolCallDelta(self._tools[place], delta.partial_json),)))

    def _count(self, said: object, events: list[Event]) -> None:
        """Note a count. Counts are cumulative; a later one replaces what it names and leaves the rest."""
        if (usage := read_usage(said, _Usage)) is None:
            return
        self._usage = self._usage.replaced_by(usage)
        if (counted := self._usage.count()) is not None:
            events.append(UsageReport(counted))


# The upstream's shapes. Only what we read is named; the rest is skipped without being built. Compatible services send
# null for what they leave out.


class _OutputDetails(Struct, frozen=True):
    thinking_tokens: int | float | None = None


class _Usage(Struct, frozen=True):
    """``input_tokens`` leaves out what was read from and written to the cache; the prompt is the sum of the three."""

    input_tokens: int | float | None = None
    cache_creation_input_tokens: int | float | None = None
    cache_read_input_tokens: int | float | None = None
    output_tokens: int | float | None = None
    output_tokens_details: _OutputDetails | None = None

    def replaced_by(self, later: _Usage) -> _Usage:
        """Return the counts with those that ``later`` names in place of ours."""
        named = {name: value for name in self.__struct_fields__ if (value := getattr(later, name)) is not None}
        return msgspec.structs.replace(self, **named)

    def count(self) -> Usage | None:
        """Return the counts as ours, or ``None`` where they cannot be counts."""
        plain, written, read, output = (
            count_of(number)
            for number in (
                self.input_tokens,
                self.cache_creation_input_tokens,
                self.cache_read_input_tokens,
                self.output_tokens,
            )
        )
        if plain is None or output is None or not plain + (written or 0) + (read or 0):
            return None
        thought = count_of((self.output_tokens_details or _OutputDetails()).thinking_tokens) or 0
        return Usage(
            input_tokens=plain + (written or 0) + (read or 0),
            cached_input_tokens=read or 0,
            cache_write_tokens=written or 0,
            output_tokens=output,
            reasoning_tokens=min(thought, output),
        )


class _Block(Struct, frozen=True):
    type: str = ""
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None  # of thinking that is withheld
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class _Message(Struct, frozen=True):
    content: tuple[_Block, ...]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: Any = None

    def reply(self) -> ChatReply:
        """Return the message in our shape: its texts joined, its calls in their order."""
        calls = tuple(
            ToolCall(block.id or "", FunctionCall(block.name or "", msgspec.json.encode(block.input or {}).decode()))
            for block in self.content
            if block.type == "tool_use"
        )
        said = ReplyMessage(
            content="".join(block.text or "" for block in self.content if block.type == "text")
            or (None if calls else ""),
            tool_calls=calls or None,
            reasoning_content="".join(block.thinking or "" for block in self.content) or None,
            reasoning=tuple(
                Reasoning(block.thinking or "", block.signature or "", block.data or "")
                for block in self.content
                if block.signature or block.data
            ),
        )
        reason = STOP_REASONS.get(self.stop_reason or "", FinishReason.STOP)
        choice = Choice(index=0, message=said, finish_reason=reason, stop_sequence=self.stop_sequence)
        return ChatReply(choices=(choice,))


class _EventMessage(Struct, frozen=True):
    usage: Any = None


class _EventDelta(Struct, frozen=True):
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None
    stop_sequence: str | None = None


class _Error(Struct, frozen=True):
    type: str | None = None


class _Event(Struct, frozen=True):
    type: str = ""
    index: int = 0
    message: _EventMessage | None = None
    content_block: _Block | None = None
    delta: _EventDelta | None = None
    usage: Any = None
    error: _Error | None = None


class _Count(Struct, frozen=True):
    input_tokens: int | float


_count_decoder = msgspec.json.Decoder(_Count)
_message_decoder = msgspec.json.Decoder(_Message)
_event_decoder = msgspec.json.Decoder(_Event)
