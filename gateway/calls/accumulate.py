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
    scores: dict[str, bytearray | None] = field(
        default_factory=dict
    )  # what each list of logprobs has, without brackets
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
            _add_scores(parts.scores, delta.logprobs)
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
    return Choice(index=index, message=message, finish_reason=parts.finish_reason, logprobs=_joined(parts.scores))


def _text_choice(index: int, parts: _Parts) -> CompletionChoice:
    text = "".join(parts.text)
    scores = _joined(parts.scores)
    return CompletionChoice(index=index, text=text, finish_reason=parts.finish_reason, logprobs=scores)


def _add_scores(scores: dict[str, bytearray | None], logprobs: Raw) -> None:
    """Add a piece's logprobs, an object whose fields are lists that go on from piece to piece, or null.

    Nothing is read but where lists begin and end: of a long answer that would hold up everybody else's. What is not
    such an object is left out: an answer is not lost over its scores.
    """
    try:
        bytes(logprobs).decode()
        fields = msgspec.json.decode(logprobs, type=dict[str, Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    lists = {name: bytes(told).strip() for name, told in fields.items()}
    if any(told != b"null" and not told.startswith(b"[") for told in lists.values()):
        return
    for name, told in lists.items():
        if told == b"null":
            scores.setdefault(name, None)
            continue
        known = scores.get(name)
        if known is None:
            known = scores[name] = bytearray()
        inner = told[1:-1].strip()
        known += b"," + inner if known and inner else inner


def _joined(scores: dict[str, bytearray | None]) -> Raw | None:
    """Return the whole object, copied once; None where no piece had one."""
    parts: list[bytes | bytearray] = []
    for name, inside in scores.items():
        parts += (b"," if parts else b"{", msgspec.json.encode(name), b":")
        parts += (b"null",) if inside is None else (b"[", inside, b"]")
    return Raw(b"".join((*parts, b"}"))) if parts else None
