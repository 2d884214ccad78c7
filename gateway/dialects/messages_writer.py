# Replies in the shapes of Anthropic's Messages API: one message, or a stream of events that build it block by block.

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any

import msgspec

from billing.core.money import to_text
from gateway.dialects.anthropic_errors import error_body
from gateway.dialects.endpoint import ReplyFacts
from protocol.chat import ChatReply, FinishReason, NativeEnd, ReplyMessage
from protocol.decoding import NOT_JSON
from protocol.errors import ServiceError
from protocol.events import Delta, Event, ReplyEnd, ToolCallDelta, UsageReport
from protocol.inference import WholeReply
from protocol.messages import MessagesRequest, ServerBlock
from protocol.sse import encode_event
from protocol.usage import Usage

STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CONTENT_FILTER: "refusal",
}


class MessagesWriter:
    """Writes messages and their events. One object per call."""

    def __init__(self, request: MessagesRequest, request_id: str, created: int) -> None:
        self._asked = request.model
        self._request_id = request_id
        self._blocks = -1  # index of the newest block
        self._open = ""  # kind of the block that is open
        self._tool = -1  # index of the tool call whose block is the newest
        self._arguments = _Arguments()  # of that call, so far
        self._started: set[int] = set()  # calls that have or had a block
        # What came and is not written, in order: words, and the pieces of each call together.
        self._pending: OrderedDict[object, list[Delta | ToolCallDelta]] = OrderedDict()
        self._is_begun = False
        self._stop: dict[str, Any] = _stop(FinishReason.STOP, None)
        self._native = NativeEnd()

    def whole(self, reply: ReplyFacts, whole: WholeReply, usage: Usage) -> bytes:
        """Return a ``message`` object."""
        assert isinstance(whole, ChatReply)
        choice = whole.choices[0]
        native = choice.native or NativeEnd()
        message = self._message(reply) | {
            "content": choice.message.blocks or _content(choice.message),
            **_stop(choice.finish_reason, choice.stop_sequence, native),
            **native.message,
            "usage": native.usage | usage_object(usage) | {"cost_usd": to_text(reply.record.cost_nanousd)},
        }
        return msgspec.json.encode(message)

    def pieces(self, reply: ReplyFacts, events: list[Event]) -> bytes:
        """Return the events for what came together, and message_stop at the end."""
        out: list[bytes] = []
        if not self._is_begun:
            self._is_begun = True
            # The prompt's token count is known at the end; until then, the estimate that the call's accounting has.
            begun = self._message(reply) | {"usage": usage_object(reply.meter.so_far().usage)}
            out.append(_event({"type": "message_start", "message": begun}))
        for event in events:
            match event:
                case Delta():
                    self._add(event, out)
                case UsageReport(usage):
                    out.append(_event(self._last_words(usage, reply.record.cost_nanousd)))
                case ReplyEnd():
                    out.append(_event({"type": "message_stop"}))
        return b"".join(out)

    def _last_words(self, usage: Usage, cost_nanousd: int) -> dict[str, Any]:
        """Return the last message_delta: why the reply ended, and what it used."""
        beside = dict(self._native.message)
        edits = {name: beside.pop(name) for name in ("context_management",) if name in beside}
        counted = self._native.usage | usage_object(usage) | {"cost_usd": to_text(cost_nanousd)}
        return {"type": "message_delta", "delta": self._stop | beside, "usage": counted, **edits}

    def error(self, error: ServiceError) -> bytes:
        """Return the error event that SDKs raise for."""
        return _event(error_body(error, self._request_id))

    def _message(self, reply: ReplyFacts) -> dict[str, Any]:
        return {
            "id": "msg_" + reply.call.request_id.replace("-", ""),
            "type": "message",
            "role": "assistant",
            "model": self._asked,
            "model_used": reply.target.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _add(self, delta: Delta, out: list[bytes]) -> None:
        is_said = delta.text or delta.refusal or delta.reasoning or delta.signature or delta.redacted
        if is_said or delta.parts_text or delta.citation is not None or delta.server_block is not None:
            self._pending[object()] = [delta]
        for piece in delta.tool_calls:
            if self._open == "tool_use" and piece.index == self._tool:
                self._add_arguments(piece, out)
            elif piece.index not in self._started:  # what comes for a call that was whole is none of its arguments
                self._pending.setdefault(piece.index, []).append(piece)
            self._write(out)
        self._write(out)
        if delta.finish_reason is not None:
            while self._pending:  # a call that is not whole will not be
                self._end(out)
                self._write(out)
            self._end(out)
            self._native = delta.native or self._native
            self._stop = _stop(delta.finish_reason, delta.stop_sequence, self._native)

    def _write(self, out: list[bytes]) -> None:
        """Write what may be. Blocks come one after the other: until a call is whole, all else waits in order."""
        while self._pending and (self._open != "tool_use" or self._arguments.are_whole()):
            for one in self._pending.popitem(last=False)[1]:
                if isinstance(one, Delta):
                    self._add_words(one, out)
                elif one.index in self._started:
                    self._add_arguments(one, out)
                else:
                    self._begin_call(one, out)

    def _add_words(self, delta: Delta, out: list[bytes]) -> None:
        if delta.reasoning or delta.signature:
            self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""}, out)
            if delta.reasoning:
                self._put({"type": "thinking_delta", "thinking": delta.reasoning}, out)
            if delta.signature:
                self._put({"type": "signature_delta", "signature": delta.signature}, out)
                self._end(out)  # what is thought after that is signed anew
        if delta.redacted:
            self._end(out)
            self._begin("redacted_thinking", {"type": "redacted_thinking", "data": delta.redacted}, out)
        if delta.server_block is not None:
            self._add_server_block(delta.server_block, out)
        if delta.parts_text and self._open == "text":
            self._end(out)
        if text := delta.text or delta.refusal:
            self._begin("text", {"type": "text", "text": ""}, out)
            self._put({"type": "text_delta", "text": text}, out)
        if delta.citation is not None:
            self._begin("text", {"type": "text", "text": ""}, out)
            self._put({"type": "citations_delta", "citation": delta.citation}, out)

    def _add_server_block(self, block: ServerBlock, out: list[bytes]) -> None:
        self._end(out)
        head = msgspec.to_builtins(block)
        if given := head.get("input"):
            head["input"] = {}
        self._begin(head["type"], head, out)
        if given:
            self._put({"type": "input_json_delta", "partial_json": msgspec.json.encode(given).decode()}, out)
        self._end(out)

    def _begin_call(self, piece: ToolCallDelta, out: list[bytes]) -> None:
        self._end(out)
        self._tool, self._arguments = piece.index, _Arguments()
        self._started.add(piece.index)
        self._begin("tool_use", {"type": "tool_use", "id": piece.id or "", "name": piece.name or "", "input": {}}, out)
        self._add_arguments(piece, out)

    def _add_arguments(self, piece: ToolCallDelta, out: list[bytes]) -> None:
        if piece.arguments:
            self._arguments.add(piece.arguments)
            self._put({"type": "input_json_delta", "partial_json": piece.arguments}, out)

    def _begin(self, kind: str, head: dict[str, Any], out: list[bytes]) -> None:
        if self._open != kind:
            self._end(out)
            self._blocks += 1
            self._open = kind
            out.append(_event({"type": "content_block_start", "index": self._blocks, "content_block": head}))

    def _put(self, delta: dict[str, Any], out: list[bytes]) -> None:
        out.append(_event({"type": "content_block_delta", "index": self._blocks, "delta": delta}))

    def _end(self, out: list[bytes]) -> None:
        if self._open:
            self._open = ""
            out.append(_event({"type": "content_block_stop", "index": self._blocks}))


class _Arguments:
    """The arguments of one call, as they come. Each piece is looked at once."""

    _SIGNS = re.compile(r'\\.?|["{}]', re.DOTALL)

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._looked_at = 0  # pieces
        self._depth = 0
        self._in_string = False
        self._is_escaped = False  # the next piece's first character
        self._are_whole: bool | None = None  # nothing is known until the first brace is closed

    def add(self, piece: str) -> None:
        """Take in what came."""
        self._pieces.append(piece)

    def are_whole(self) -> bool:
        """Whether they are an object: then nothing of it can follow."""
        while self._are_whole is None and self._looked_at < len(self._pieces):
            self._look_at(self._pieces[self._looked_at])
            self._looked_at += 1
        return bool(self._are_whole)

    def _look_at(self, piece: str) -> None:
        last = None
        for last in self._SIGNS.finditer(piece, int(self._is_escaped)):
            match last[0]:
                case '"':
                    self._in_string = not self._in_string
                case "{" if not self._in_string:
                    self._depth += 1
                case "}" if not self._in_string:
                    self._depth -= 1
                    if self._depth <= 0:
                        self._are_whole = self._is_object()
                        return
        if piece:
            self._is_escaped = last is not None and last[0] == "\\"  # alone, so at the end

    def _is_object(self) -> bool:
        try:
            return isinstance(msgspec.json.decode("".join(self._pieces)), dict)
        except NOT_JSON:
            return False


def _stop(reason: FinishReason, sequence: str | None, native: NativeEnd | None = None) -> dict[str, Any]:
    """Return why a reply ended; which stop sequence did it, where the upstream said."""
    if native is not None and native.stop_reason is not None:
        return {"stop_reason": native.stop_reason, "stop_sequence": None}
    if reason is FinishReason.STOP and sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    return {"stop_reason": STOP_REASONS[reason], "stop_sequence": None}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return Anthropic's usage object: the parts of the prompt that a cache was read or written for stand apart."""
    counted: dict[str, Any] = {
        "input_tokens": usage.input_tokens - usage.cached_input_tokens - usage.cache_write_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_input_tokens,
        "output_tokens": usage.output_tokens,
    }
    if usage.reasoning_tokens:
        counted["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counted


def _content(message: ReplyMessage) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = []
    for stretch in message.reasoning:
        if stretch.redacted:
            content.append({"type": "redacted_thinking", "data": stretch.redacted})
        else:
            content.append({"type": "thinking", "thinking": stretch.text, "signature": stretch.signature})
    if message.reasoning_content and not message.reasoning:
        content.append({"type": "thinking", "thinking": message.reasoning_content, "signature": ""})
    if text := message.content or message.refusal:
        content.append({"type": "text", "text": text})
    for call in message.tool_calls or ():
        arguments = _object(call.function.arguments)
        content.append({"type": "tool_use", "id": call.id, "name": call.function.name, "input": arguments})
    return content


def _object(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as the object that this dialect has; a model may have written something else."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except NOT_JSON:
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": value}


def _event(data: dict[str, Any]) -> bytes:
    return encode_event(msgspec.json.encode(data), data["type"].encode())
