# Bedrock's Converse at the scripted upstream: what it takes, written down a second time and strictly, and what it
# answers, which is what the Messages API would, in Converse's words.

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from typing import Any, ClassVar
from urllib.parse import unquote
from zlib import crc32

import msgspec
from msgspec import Struct

from tests.support.anthropic_answers import AnthropicAnswer, answer_message
from tests.support.openai_rules import Violation
from tests.support.upstream_scripts import Script

PATH = re.compile(r"/model/([^/]+)/(converse(?:-stream)?)")
ALLOWED_HEADERS = {"accept-encoding", "authorization", "content-length", "content-type", "host", "x-amz-date"}
COUNTS = {
    "inputTokens": "input_tokens",
    "outputTokens": "output_tokens",
    "cacheReadInputTokens": "cache_read_input_tokens",
    "cacheWriteInputTokens": "cache_creation_input_tokens",
}


class Strict(Struct, forbid_unknown_fields=True, frozen=True, rename="camel"):
    pass


class Turn(Strict, frozen=True):
    role: str
    content: list[dict[str, Any]]


class Inference(Strict, frozen=True):
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None


class ToolConfig(Strict, frozen=True):
    tools: list[dict[str, Any]]
    tool_choice: dict[str, Any] | None = None


class Body(Strict, frozen=True):
    messages: list[Turn]
    system: list[dict[str, Any]] | None = None
    inference_config: Inference | None = None
    tool_config: ToolConfig | None = None
    additional_model_request_fields: dict[str, Any] | None = None


def model_in(path: str) -> str:
    """Return the model that a path names."""
    found = PATH.fullmatch(path)
    assert found is not None
    return unquote(found[1])


def check_headers(headers: dict[str, str]) -> None:
    """Raise Violation for a header that is missing, odd, or leaked from a client."""
    if strange := sorted(headers.keys() - ALLOWED_HEADERS):
        raise Violation(f"Headers that no provider should see: {', '.join(strange)}.")
    if not headers.get("authorization", "").startswith(("Bearer sk-", "AWS4-HMAC-SHA256 ")):
        raise Violation("The security token included in the request is invalid.", status=403)


def check_body(raw: bytes) -> dict[str, Any]:
    """Return a request as the Messages API would have it, or raise Violation for what Converse would not take."""
    try:
        body = msgspec.json.decode(raw, type=Body)
    except msgspec.DecodeError as exc:
        raise Violation(f"Malformed input request: {exc}") from exc
    if any(before.role == after.role for before, after in zip(body.messages, body.messages[1:], strict=False)):
        raise Violation("A conversation must alternate between user and assistant roles.")
    config = body.inference_config or Inference()
    turns = [{"role": turn.role, "content": [_block(block) for block in turn.content]} for turn in body.messages]
    tools = [one["toolSpec"] for one in body.tool_config.tools if "toolSpec" in one] if body.tool_config else []
    told = [{"name": tool["name"], "input_schema": tool["inputSchema"]["json"]} for tool in tools]
    return {"messages": turns, "max_tokens": config.max_tokens or 64} | ({"tools": told} if told else {})


def _block(block: dict[str, Any]) -> dict[str, Any]:
    match block:
        case {"text": str(text)} if text:
            return {"type": "text", "text": text}
        case {"image": {"format": "png" | "jpeg" | "gif" | "webp", "source": {"bytes": str()}}}:
            return {"type": "text", "text": "a picture"}
        case {"document": {"format": "pdf", "name": str(name), "source": {"bytes": str()}}} if name:
            return {"type": "text", "text": "a document"}
        case {"toolUse": used}:
            return {"type": "tool_use", "id": used["toolUseId"], "name": used["name"], "input": used["input"]}
        case {"toolResult": result}:
            return {"type": "tool_result", "tool_use_id": result["toolUseId"], "content": "seen"}
    raise Violation(f"Unknown block: {sorted(block)}")


class BedrockAnswer:
    """One answer, whole or streamed."""

    error_frame: ClassVar = {"message": "scripted"}

    def __init__(self, message: AnthropicAnswer) -> None:
        self._message = message
        self.spoken = message.spoken
        self.done = self.event({"metadata": {"usage": self._usage(), "metrics": {"latencyMs": 1}}})

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        told = self._message.whole()
        content = [_answered(block) for block in told["content"]]
        output = {"message": {"role": "assistant", "content": content}}
        return {"output": output, "stopReason": told["stop_reason"], "usage": self._usage(), "metrics": {}}

    def chunks(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yield the events before the count, and for each whether it carries a token."""
        for chunk, is_token in self._message.chunks():
            place = chunk.get("index")
            match chunk:
                case {"type": "message_start"}:
                    yield {"messageStart": {"role": "assistant"}}, False
                case {"type": "content_block_start", "content_block": {"type": "tool_use", "id": ident, "name": name}}:
                    start = {"toolUse": {"toolUseId": ident, "name": name}}
                    yield {"contentBlockStart": {"contentBlockIndex": place, "start": start}}, False
                case {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}:
                    yield {"contentBlockDelta": {"contentBlockIndex": place, "delta": {"text": text}}}, is_token
                case {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": piece}}:
                    said = {"toolUse": {"input": piece}}
                    yield {"contentBlockDelta": {"contentBlockIndex": place, "delta": said}}, is_token
                case {"type": "content_block_stop"}:
                    yield {"contentBlockStop": {"contentBlockIndex": place}}, False
                case {"type": "message_delta", "delta": {"stop_reason": reason}}:
                    yield {"messageStop": {"stopReason": reason}}, False

    def event(self, chunk: dict[str, Any]) -> bytes:
        """Return an event as a message of Amazon's event stream."""
        ((kind, body),) = chunk.items()
        headers = b"".join(_header(*pair) for pair in ((":event-type", kind), (":message-type", "event")))
        payload = json.dumps(body).encode()
        prelude = struct.pack(">II", 16 + len(headers) + len(payload), len(headers))
        start = prelude + struct.pack(">I", crc32(prelude)) + headers + payload
        return start + struct.pack(">I", crc32(start))

    def is_finish(self, chunk: dict[str, Any]) -> bool:
        """Tell whether an event says why the reply ended."""
        return "messageStop" in chunk

    def swell(self, chunk: dict[str, Any], words: str) -> None:
        """Put ``words`` in the place of an event's token."""
        chunk["contentBlockDelta"]["delta"] = {"text": words}

    def swell_whole(self, body: dict[str, Any], words: str) -> None:
        """Put ``words`` in the place of a body's."""
        body["output"]["message"]["content"] = [{"text": words}]

    def take_finish(self, body: dict[str, Any]) -> None:
        """Leave out why a body's reply ended."""
        body["stopReason"] = None

    def _usage(self) -> dict[str, int]:
        told = self._message.whole()["usage"]
        return {theirs: told[ours] for theirs, ours in COUNTS.items()} if told else {}


def answer_converse(request: dict[str, Any], script: Script, number: int) -> BedrockAnswer:
    """Return the answer to Converse: what a message of the same words would be answered."""
    return BedrockAnswer(answer_message({"model": "bedrock", **request}, script, number))


def error_body(message: str) -> dict[str, object]:
    """Return a failing answer of Bedrock's."""
    return {"message": message}


def _answered(block: dict[str, Any]) -> dict[str, Any]:
    if block["type"] == "tool_use":
        return {"toolUse": {"toolUseId": block["id"], "name": block["name"], "input": block["input"]}}
    return {"text": block["text"]}


def _header(name: str, value: str) -> bytes:
    return bytes([len(name)]) + name.encode() + b"\x07" + struct.pack(">H", len(value)) + value.encode()
