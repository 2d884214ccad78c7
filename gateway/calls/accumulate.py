# The pieces of a streamed reply, put together as the whole reply they are pieces of.

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from protocol.chat import (
    ChatReply,
    ChatRequest,
    Choice,
    FinishReason,
    FunctionCall,
    Reasoning,
    ReplyMessage,
    Spoken,
    ToolCall,
)
from protocol.completions import CompletionChoice, CompletionReply
from protocol.events import Delta, ToolCallDelta
from protocol.inference import Request, WholeReply


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Parts:
    text: list[str] = field(default_factory=list)
    refusal: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    unsigned: list[str] = field(default_factory=list)  # of that, what came since the last signature
    thoughts: list[Reasoning] = field(default_factory=list)  # stretches that are signed, or withheld
    calls: dict[int, _Call] = field(default_factory=dict)
    logprobs: list[Raw] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    transcript: list[str] = field(default_factory=list)
    audio: Spoken | None = None  # of an answer by voice, without its transcript and its sound
    finish_reason: FinishReason = FinishReason.STOP


class Collector:
    """Adds deltas up to a whole reply to ``request``."""

    def __init__(self, request: Request) -> None:
        self._is_chat = isinstance(request, ChatRequest)
        self._choices: dict[int, _Parts] = {}

    def add(self, delta: Delta) -> None:
        """Take in one delta."""
        parts = self._choices.setdefault(delta.index, _Parts())
        if (spoken := delta.spoken) is not None:
            parts.transcript.append(delta.text)
            known = parts.audio or Spoken()
            parts.audio = Spoken(spoken.id or known.id, expires_at=spoken.expires_at or known.expires_at)
        elif delta.text:
            parts.text.append(delta.text)
        if delta.refusal:
            parts.refusal.append(delta.refusal)
        if delta.reasoning:
            parts.reasoning.append(delta.reasoning)
            parts.unsigned.append(delta.reasoning)
        if delta.signature or delta.redacted:
            parts.thoughts.append(Reasoning("".join(parts.unsigned), delta.signature, delta.redacted))
            parts.unsigned.clear()
        for piece in delta.tool_calls:
            _add_call(parts.calls, piece)
        if delta.logprobs is not None:
            parts.logprobs.append(delta.logprobs)
        parts.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            parts.finish_reason = delta.finish_reason

    def reply(self) -> WholeReply:
        """Return what the deltas add up to."""
        choices = sorted(self._choices.items())
        if self._is_chat:
            return ChatReply(choices=tuple(_chat_choice(*item) for item in choices))
        return CompletionReply(choices=tuple(_text_choice(*item) for item in choices))


def _add_call(calls: dict[int, _Call], piece: ToolCallDelta) -> None:
    call = calls.setdefault(piece.index, _Call())
    call.id = call.id or piece.id or ""
    call.name = call.name or piece.name or ""
    call.arguments.append(piece.arguments)


def _chat_choice(index: int, parts: _Parts) -> Choice:
    calls = tuple(
        ToolCall(call.id, FunctionCall(call.name, "".join(call.arguments) or "{}"))
        for _, call in sorted(parts.calls.items())
    )
    has_text = parts.text or not (calls or parts.refusal or parts.audio)
    message = ReplyMessage(
        content="".join(parts.text) if has_text else None,
        refusal="".join(parts.refusal) or None,
        tool_calls=calls or None,
        reasoning_content="".join(parts.reasoning) or None,
        reasoning=tuple(parts.thoughts),
        audio=parts.audio and replace(parts.audio, transcript="".join(parts.transcript)),
    )
    return Choice(
        index=index, message=message, finish_reason=parts.finish_reason, logprobs=_join_logprobs(parts.logprobs)
    )


def _text_choice(index: int, parts: _Parts) -> CompletionChoice:
    text = "".join(parts.text)
    logprobs = _join_logprobs(parts.logprobs)
    return CompletionChoice(index=index, text=text, finish_reason=parts.finish_reason, logprobs=logprobs)


def _join_logprobs(pieces: list[Raw]) -> Raw | None:
    """Join logprobs objects field by field: each of their fields is a list that goes on from piece to piece.

    What is not such an object is left out: an answer is not lost over its scores.
    """
    whole: dict[str, list[object] | None] = {}
    for piece in pieces:
        try:
            fields = msgspec.json.decode(piece, type=dict[str, list[object] | None])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        for name, values in fields.items():
            if (known := whole.get(name)) is None:
                whole[name] = values
            else:
                known += values or ()
    return Raw(msgspec.json.encode(whole)) if whole else None
