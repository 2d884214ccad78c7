# A whole reply as the events of a stream, for services that answer whole what they were asked to stream.

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from protocol.chat import ChatReply, Choice, FinishReason, RedactedThinkingBlock, ReplyMessage, ThinkingBlock
from protocol.completions import CompletionReply
from protocol.events import Delta, Event, ReplyEnd, ToolCallDelta, UsageReport
from protocol.inference import WholeReply
from protocol.media.audio import TranscriptionReply
from protocol.media.images import ImageReply
from protocol.messages import ServerBlock, TextBlock, ToolUseBlock
from protocol.usage import Usage


def events_of(whole: WholeReply, usage: Usage | None) -> list[Event]:
    """Return the events that add up to ``whole``. Embeddings have none: they are never streamed."""
    events: list[Event] = []
    match whole:
        case ChatReply(choices=choices, used=used):
            if used is not None:
                events.append(Delta(used=used))
            for choice in choices:
                events += _chat_deltas(choice)
        case ImageReply(images=images):
            events += [Delta(picture=each, finish_reason=FinishReason.STOP) for each in map(whole.streamed, images)]
        case TranscriptionReply(text):
            events.append(Delta(text=text, finish_reason=FinishReason.STOP))
        case CompletionReply(choices=texts):
            events += [
                Delta(text.index, text.text, finish_reason=text.finish_reason, logprobs=text.logprobs) for text in texts
            ]
    if usage is not None:
        events.append(UsageReport(usage))
    return [*events, ReplyEnd()]


def _chat_deltas(choice: Choice) -> list[Event]:
    index, message = choice.index, choice.message
    events: list[Event] = []
    if message.blocks:
        events += _block_deltas(index, message.blocks)
        message = ReplyMessage()
    if message.reasoning_content and not message.reasoning:
        events.append(Delta(index, reasoning=message.reasoning_content))
    for thought in message.reasoning:
        if thought.redacted:
            events.append(Delta(index, redacted=thought.redacted))
        else:
            events += [Delta(index, reasoning=thought.text), Delta(index, signature=thought.signature)]
    if message.content or message.refusal:
        events.append(Delta(index, message.content or "", refusal=message.refusal or "", logprobs=choice.logprobs))
    if (audio := message.audio) is not None:
        events.append(Delta(index, audio.transcript, spoken=replace(audio, transcript="")))
    for number, call in enumerate(message.tool_calls or ()):
        events.append(
            Delta(index, tool_calls=(ToolCallDelta(number, call.function.arguments, call.id, call.function.name),))
        )
    end = Delta(index, finish_reason=choice.finish_reason, stop_sequence=choice.stop_sequence, native=choice.native)
    return [*events, end]


def _block_deltas(index: int, blocks: tuple[Struct, ...]) -> Iterator[Event]:
    calls, was_text = 0, False
    for block in blocks:
        match block:
            case TextBlock(text, citations=citations):
                if was_text:
                    yield Delta(index, parts_text=True)
                yield Delta(index, text)
                yield from (Delta(index, citation=each) for each in citations or ())
            case ThinkingBlock(thinking, signature):
                yield Delta(index, reasoning=thinking)
                yield Delta(index, signature=signature)
            case RedactedThinkingBlock(data):
                yield Delta(index, redacted=data)
            case ToolUseBlock(ident, name, arguments):
                said = msgspec.json.encode(arguments).decode()
                yield Delta(index, tool_calls=(ToolCallDelta(calls, said, ident, name),))
                calls += 1
            case _ if isinstance(block, ServerBlock):
                yield Delta(index, server_block=block)
        was_text = isinstance(block, TextBlock)
