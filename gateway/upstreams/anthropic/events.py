# Streamed messages of Anthropic's Messages API: its events become ours. Only what we read is named in the shapes.

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from gateway.upstreams.anthropic.replies import (
    NOTHING_TOLD,
    SERVER_KINDS,
    Block,
    Told,
    UsageBeside,
    UsageObject,
    native_end,
    read_stop_reason,
)
from gateway.upstreams.wire.errors import UpstreamError
from gateway.upstreams.wire.filters import read_filtered
from gateway.upstreams.wire.reading import NOTHING, SseEvents, decoded, object_in, read_error_fields, read_usage
from protocol.chat import FinishReason
from protocol.decoding import NOT_JSON
from protocol.events import Delta, Event, ToolCallDelta, UsageReport
from protocol.messages import CodeResult


class AnthropicEvents(SseEvents):
    """Reads one streamed message."""

    def __init__(self, told: Told = NOTHING_TOLD) -> None:
        super().__init__()
        self._told = told
        self._answer: int | None = None  # the block of the tool whose input is the answer
        self._usage = UsageObject()
        self._beside: dict[str, Any] = {}  # what usage says that nothing is counted by
        self._said_text = False  # the block before was one of text
        self._tools: dict[int, int] = {}  # index of a content block -> index among the tool calls
        self._unsaid: set[int] = set()  # tool blocks whose arguments have not begun
        self._searching: dict[
            int, tuple[Block, list[str]]
        ] = {}  # blocks of the upstream's tools, with their input so far
        self._stop_reason: str | None = None
        self._ran_code = False

    def _has_reason(self) -> bool:
        return self._stop_reason is not None

    def _read_event(self, data: bytes, events: list[Event]) -> None:
        event = decoded(data, _event_decoder, "The upstream sent an event that is not JSON.")
        match event.type:
            case "content_block_delta" if event.delta is not None:
                self._read_delta(event.index, event.delta, events)
            case "content_block_start" if event.content_block is not None:
                self._begin_block(event.index, event.content_block, events)
            case "content_block_stop" if (called := self._searching.pop(event.index, None)) is not None:
                self._add_server_block(called[0], "".join(called[1]), events)
            case "content_block_stop" if event.index in self._unsaid:
                self._add_arguments(event.index, "{}", events)
            case "message_start" if event.message is not None:
                self._count(event.message.usage, events)
                self._note_beside(event.message.usage)
            case "message_delta":
                self._ran_code = self._ran_code or (event.delta is not None and event.delta.container is not None)
                self._count(event.usage, events)
                self._note_beside(event.usage)
                if event.delta is not None and (reason := event.delta.stop_reason):
                    self._stop_reason = reason
                    why = read_stop_reason(reason)
                    if why is FinishReason.TOOL_CALLS and self._answer is not None and not self._tools:
                        why = FinishReason.STOP
                    said = replace(event.delta, context_management=event.context_management)
                    native = native_end(reason, said, self._beside)
                    events.append(Delta(finish_reason=why, stop_sequence=event.delta.stop_sequence, native=native))
            case "message_stop":
                self._end(events)
            case "error":
                if (filtered := read_filtered(read_error_fields(data))) is not None:
                    raise filtered
                is_full = event.error is not None and event.error.type == "overloaded_error"
                raise UpstreamError(
                    "The upstream reported an error.", outcome="overloaded" if is_full else "error_frame"
                )

    def _note_beside(self, said: Raw) -> None:
        if (usage := read_usage(said, UsageBeside)) is not None:
            self._beside |= usage.named()

    def _begin_block(self, place: int, block: Block, events: list[Event]) -> None:
        if self._said_text and block.type == "text":
            events.append(Delta(parts_text=True))
        self._said_text = block.type == "text"
        if block.type == "tool_use" and block.name == self._told.answer:
            if self._answer is None:
                self._answer = place
                if arguments := object_in(block.input):
                    events.append(Delta(text=arguments))
                else:
                    self._unsaid.add(place)
        elif block.type == "tool_use":
            self._tools[place] = index = len(self._tools)
            arguments = object_in(block.input)
            if not arguments:  # else they are said at once, as some compatible services do
                self._unsaid.add(place)
            name = self._told.name(block.name)
            events.append(Delta(tool_calls=(ToolCallDelta(index, arguments, block.id or "", name),)))
        elif block.type == "server_tool_use":
            self._searching[place] = (block, [object_in(block.input)])
        elif block.type in SERVER_KINDS:
            self._add_server_block(block, "", events)
        elif block.text or block.thinking or block.data:
            events.append(Delta(text=block.text or "", reasoning=block.thinking or "", redacted=block.data or ""))
            events += [Delta(citation=each) for each in block.cited()]

    def _read_delta(self, place: int, delta: _EventDelta, events: list[Event]) -> None:
        if delta.text:
            events.append(Delta(text=delta.text))
        elif delta.thinking:
            events.append(Delta(reasoning=delta.thinking))
        elif isinstance(delta.citation, dict):
            events.append(Delta(citation=delta.citation))
        elif delta.signature:
            events.append(Delta(signature=delta.signature))
        elif delta.partial_json:
            self._add_arguments(place, delta.partial_json, events)

    def _add_server_block(self, block: Block, arguments: str, events: list[Event]) -> None:
        try:
            found = block.of_server(arguments)
            self._ran_code = self._ran_code or isinstance(found, CodeResult)
            events.append(Delta(server_block=found))
        except NOT_JSON as exc:
            raise UpstreamError("The upstream sent a call that is not JSON.", outcome="malformed") from exc

    def _add_arguments(self, place: int, piece: str, events: list[Event]) -> None:
        self._unsaid.discard(place)
        if place in self._searching:
            self._searching[place][1].append(piece)
        if place == self._answer:
            events.append(Delta(text=piece))
        elif place in self._tools:
            events.append(Delta(tool_calls=(ToolCallDelta(self._tools[place], piece),)))

    def _count(self, said: Raw, events: list[Event]) -> None:
        """Note a count. Counts are cumulative; a later one replaces what it names and leaves the rest.

        One that names no output says nothing of what was written since the last one.
        """
        if (usage := read_usage(said, UsageObject)) is None:
            return
        self._usage = self._usage.replaced_by(usage)
        if usage.output_tokens is not None and (counted := self._usage.count()) is not None:
            events.append(UsageReport(replace(counted, containers=1) if self._ran_code else counted))


class _EventMessage(Struct, frozen=True):
    usage: Raw = NOTHING


class _EventDelta(Struct, frozen=True):
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    partial_json: str | None = None
    citation: Any = None
    stop_reason: str | None = None
    stop_sequence: str | None = None
    stop_details: Any = None
    container: Any = None
    context_management: Any = None  # of the event around it


class _Error(Struct, frozen=True):
    type: str | None = None


class _Event(Struct, frozen=True):
    type: str = ""
    index: int = 0
    message: _EventMessage | None = None
    content_block: Block | None = None
    delta: _EventDelta | None = None
    usage: Raw = NOTHING
    context_management: Any = None
    error: _Error | None = None


_event_decoder = msgspec.json.Decoder(_Event)
