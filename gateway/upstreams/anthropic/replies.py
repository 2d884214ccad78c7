# Whole messages of Anthropic's Messages API, and its counts. Only what we read is named in the shapes; the rest is
# skipped without being built. Compatible services send null for what they leave out.

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

from gateway.upstreams.wire.errors import UpstreamError
from gateway.upstreams.wire.reading import NOT_JSON, NOTHING, count_of, object_in, read_usage
from protocol.chat import ChatReply, Choice, FinishReason, FunctionCall, Reasoning, ReplyMessage, ToolCall
from protocol.usage import Usage

STOP_REASONS = {
    "end_turn": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "pause_turn": FinishReason.STOP,
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
    "tool_use": FinishReason.TOOL_CALLS,
    "refusal": FinishReason.CONTENT_FILTER,
}


def read_message(body: bytes) -> tuple[ChatReply, Usage | None]:
    """Return the message that ``body`` holds, and its count. Raises UpstreamError."""
    try:
        message = _message_decoder.decode(body)
    except NOT_JSON as exc:
        raise UpstreamError("The upstream's answer is not what its format promises.", outcome="malformed") from exc
    return message.reply(), (read_usage(message.usage, UsageObject) or UsageObject()).count()


def read_count(body: bytes) -> int | None:
    """Return the count of a prompt's tokens that ``body`` holds, or ``None`` when it is none."""
    try:
        return count_of(_count_decoder.decode(body).input_tokens)
    except NOT_JSON:
        return None


def read_stop_reason(word: str | None) -> FinishReason:
    """Return the reason that an upstream's word means; none and strangers count as a plain stop."""
    return STOP_REASONS.get(word or "", FinishReason.STOP)


class _OutputDetails(Struct, frozen=True):
    thinking_tokens: int | float | None = None


class UsageObject(Struct, frozen=True):
    """The ``usage`` of a message or an event.

    ``input_tokens`` leaves out what was read from and written to the cache; the prompt is the sum of the three.
    """

    input_tokens: int | float | None = None
    cache_creation_input_tokens: int | float | None = None
    cache_read_input_tokens: int | float | None = None
    output_tokens: int | float | None = None
    output_tokens_details: _OutputDetails | None = None

    def replaced_by(self, later: UsageObject) -> UsageObject:
        """Return the counts with those that ``later`` names in place of the earlier ones."""
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


class Block(Struct, frozen=True):
    """One block of a message's content, whole or as a stream begins it."""

    type: str = ""
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None  # of thinking that is withheld
    id: str | None = None
    name: str | None = None
    input: Raw = NOTHING


class _Message(Struct, frozen=True):
    content: tuple[Block, ...]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: Raw = NOTHING

    def reply(self) -> ChatReply:
        """Return the message in our shape: its texts joined, its calls in their order."""
        calls = tuple(
            ToolCall(block.id or "", FunctionCall(block.name or "", object_in(block.input) or "{}"))
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
        reason = read_stop_reason(self.stop_reason)
        choice = Choice(index=0, message=said, finish_reason=reason, stop_sequence=self.stop_sequence)
        return ChatReply(choices=(choice,))


class _Count(Struct, frozen=True):
    input_tokens: int | float


_message_decoder = msgspec.json.Decoder(_Message)
_count_decoder = msgspec.json.Decoder(_Count)
