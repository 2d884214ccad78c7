# Replies of Bedrock's Converse, in the words of Anthropic's Messages API, whose readers do the rest.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Block = dict[str, Any]

REFUSED = frozenset({"guardrail_intervened", "content_filtered"})
COUNTS = {
    "inputTokens": "input_tokens",
    "outputTokens": "output_tokens",
    "cacheReadInputTokens": "cache_read_input_tokens",
    "cacheWriteInputTokens": "cache_creation_input_tokens",
}


def as_message(told: Mapping[str, Any]) -> Block | None:
    """Return an answer of Converse as a message; ``None`` for what is no answer."""
    output = told.get("output")
    message = output.get("message") if isinstance(output, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return None
    blocks = [block for one in content if isinstance(one, dict) and (block := as_block(one)) is not None]
    return {"content": blocks, "stop_reason": as_reason(told.get("stopReason")), "usage": as_usage(told.get("usage"))}


def as_block(block: Mapping[str, Any]) -> Block | None:
    """Return a block of an answer; ``None`` for one that says nothing to us."""
    match block:
        case {"text": str(text)}:
            return {"type": "text", "text": text}
        case {"toolUse": {"toolUseId": ident, "name": name, **rest}}:
            return {"type": "tool_use", "id": ident, "name": name, "input": rest.get("input") or {}}
        case {"reasoningContent": {"reasoningText": {"text": text, **rest}}}:
            return {"type": "thinking", "thinking": text, "signature": rest.get("signature") or ""}
        case {"reasoningContent": {"redactedContent": data}}:
            return {"type": "redacted_thinking", "data": data}
    return None


def as_delta(delta: Mapping[str, Any]) -> Block | None:
    """Return what a piece of a block adds."""
    match delta:
        case {"text": str(text)}:
            return {"type": "text_delta", "text": text}
        case {"toolUse": {"input": str(text)}}:
            return {"type": "input_json_delta", "partial_json": text}
        case {"reasoningContent": {"text": str(text)}}:
            return {"type": "thinking_delta", "thinking": text}
        case {"reasoningContent": {"signature": str(text)}}:
            return {"type": "signature_delta", "signature": text}
    return None


def as_reason(reason: object) -> object:
    """Return why an answer ended. A guardrail, or a filter, has withheld the rest of it."""
    return "refusal" if isinstance(reason, str) and reason in REFUSED else reason


def as_usage(usage: object) -> Block | None:
    """Return what was counted. Here, too, tokens of the cache are beside those of the input."""
    if not isinstance(usage, dict):
        return None
    return {ours: usage[theirs] for theirs, ours in COUNTS.items() if usage.get(theirs) is not None}
