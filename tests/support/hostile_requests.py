# Requests, bodies and replies of any size that hold up code which goes through them more than once.

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from protocol.chat import (
    PDF,
    AudioData,
    AudioPart,
    ChatReply,
    ChatRequest,
    Choice,
    FilePart,
    FinishReason,
    Function,
    FunctionCall,
    ImagePart,
    ImageUrl,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    PdfFile,
    ReplyMessage,
    TextPart,
    ThinkingBlock,
    Tool,
    ToolCall,
)
from protocol.completions import CompletionChoice, CompletionReply, CompletionRequest
from protocol.embeddings import EmbeddingReply, EmbeddingRequest, RerankRequest
from protocol.events import Delta, Event, ReplyEnd, ToolCallDelta, UsageReport
from protocol.media.audio import Recording, SpeechRequest, TranscriptionRequest
from protocol.media.images import ImageRequest
from protocol.messages import MessagesRequest
from protocol.responses import ResponsesRequest
from protocol.usage import Usage

T = TypeVar("T")
Shapes = dict[str, Callable[[int], T]]

USER, REPLY = Message("user", "a"), Message("assistant", "b")


def chats() -> Shapes[ChatRequest]:
    """Conversations of ``size`` messages, parts, tools, calls or characters."""

    def chat(messages: Iterable[Message], **more: Any) -> ChatRequest:
        return ChatRequest(model="m", messages=tuple(messages), **more)

    return {
        "one long text": lambda size: chat([Message("user", "a" * size)]),
        "one long text of words": lambda size: chat([Message("user", "a " * (size // 2))]),
        "messages of one role": lambda size: chat([USER] * size),
        "messages in turns": lambda size: chat([USER, REPLY] * (size // 2)),
        "instructions": lambda size: chat([Message("system", "a")] * size),
        "messages of nothing": lambda size: chat([USER, Message("assistant", "")] * (size // 2)),
        "parts": lambda size: chat([Message("user", (TextPart("a"),) * size)]),
        "parts in turns": lambda size: chat([Message("user", (TextPart("a"),) * 4), REPLY] * (size // 4)),
        "pictures": lambda size: chat([Message("user", (ImagePart(ImageUrl("data:image/png;base64,AAAA")),) * size)]),
        "PDFs": lambda size: chat([Message("user", (FilePart(PdfFile(f"{PDF}JVBERi0=")),) * size)]),
        "recordings": lambda size: chat([Message("user", (AudioPart(AudioData("//NA", "mp3")),) * size)]),
        "thoughts": lambda size: chat([Message("assistant", "a", thinking_blocks=(ThinkingBlock("a", "s"),) * size)]),
        "calls of one turn": lambda size: chat([_calling(range(size)), *_results(range(size)), USER]),
        "calls of many turns": lambda size: chat(
            [one for n in range(size // 2) for one in (_calling((n, -n)), *_results((n, -n)))]
        ),
        "calls without results": lambda size: chat([_calling(range(size)), USER]),
        "one long argument": lambda size: chat([_calling([0], '{"a":"' + "\\\\" * (size // 2) + '"}'), USER]),
        "arguments of many values": lambda size: chat([_calling([0], '{"a":[' + "[]," * (size // 3) + "1]}"), USER]),
        "arguments nested": lambda size: chat([_calling([0], "[" * size), USER]),
        "tools": lambda size: chat([USER], tools=tuple(Tool(Function(f"f{n}", "d", {})) for n in range(size))),
        "a wide schema": lambda size: chat([USER], tools=(Tool(Function("f", "d", _wide(size), strict=True)),)),
        "a deep schema": lambda size: chat([USER], tools=(Tool(Function("f", "d", _deep(size))),)),
        "an answer's wide schema": lambda size: chat(
            [USER], response_format=JsonSchemaFormat(JsonSchema("a", _wide(size)))
        ),
    }


def completions() -> Shapes[CompletionRequest]:
    """Completions of ``size`` prompts, token ids or characters."""
    return {
        "one long prompt": lambda size: CompletionRequest(model="m", prompt="a" * size),
        "prompts": lambda size: CompletionRequest(model="m", prompt=["a"] * size),
        "token ids": lambda size: CompletionRequest(model="m", prompt=[1] * size),
        "prompts of token ids": lambda size: CompletionRequest(model="m", prompt=[[1]] * size),
    }


def embeddings() -> Shapes[EmbeddingRequest]:
    """Texts to embed."""
    return {
        "one long text": lambda size: EmbeddingRequest(model="m", input="a" * size),
        "texts": lambda size: EmbeddingRequest(model="m", input=["a"] * size),
    }


def reranks() -> Shapes[RerankRequest]:
    """Documents to rank."""
    return {
        "one long document": lambda size: RerankRequest(model="m", query="a", documents=("a" * size,)),
        "documents": lambda size: RerankRequest(model="m", query="a", documents=("a",) * size),
        "a long query": lambda size: RerankRequest(model="m", query="a" * size, documents=("a", "b")),
    }


def images() -> Shapes[ImageRequest]:
    """Pictures to make."""
    return {"one long prompt": lambda size: ImageRequest(model="m", prompt="a" * size)}


def speech() -> Shapes[SpeechRequest]:
    """Texts to say."""
    return {"one long text": lambda size: SpeechRequest(model="m", input="a" * size, voice="alloy")}


def transcriptions() -> Shapes[TranscriptionRequest]:
    """Recordings to write down."""
    file = Recording("a.wav", "audio/wav", 1, "00", 1, 1)
    return {"one long prompt": lambda size: TranscriptionRequest(model="m", file=file, prompt="a" * size)}


def messages() -> Shapes[MessagesRequest]:
    """The same conversations as Anthropic's clients send them."""

    def message(*turns: tuple[str, Any], **more: Any) -> MessagesRequest:
        said = [{"role": role, "content": content} for role, content in turns]
        return msgspec.convert({"model": "m", "max_tokens": 1, "messages": said, **more}, MessagesRequest)

    text = {"type": "text", "text": "a"}
    return {
        "one long text": lambda size: message(("user", "a" * size)),
        "turns of one role": lambda size: message(*[("user", "a")] * min(size, 16_000)),
        "turns": lambda size: message(*[("user", "a"), ("assistant", "b")] * (min(size, 16_000) // 2)),
        "blocks": lambda size: message(("user", [text] * min(size, 16_000))),
        "uses": lambda size: message(
            ("assistant", [{"type": "tool_use", "id": "i", "name": "f", "input": {}}] * min(size, 16_000)),
            ("user", [{"type": "tool_result", "tool_use_id": "i", "content": [text]}] * min(size, 16_000)),
        ),
    }


def items() -> Shapes[ResponsesRequest]:
    """The same conversations as items of a response's input."""

    def response(*items: dict[str, Any], **more: Any) -> ResponsesRequest:
        return msgspec.convert({"model": "m", "input": items, **more}, ResponsesRequest)

    user, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    call = {"type": "function_call", "call_id": "i", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "i", "output": [{"type": "input_text", "text": "a"}]}
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    thought = {"type": "reasoning", "summary": []}
    return {
        "one long text": lambda size: ResponsesRequest(model="m", input="a" * size),
        "items of one role": lambda size: response(*[user] * min(size, 16_000)),
        "turns": lambda size: response(*[user, said] * (min(size, 16_000) // 2)),
        "parts": lambda size: response(user | {"content": [{"type": "input_text", "text": "a"}] * min(size, 16_000)}),
        "calls": lambda size: response(*[call] * min(size, 16_000)),
        "calls and what was said": lambda size: response(*[thought, said, call, output] * (min(size, 16_000) // 4)),
        "outputs with pictures": lambda size: response(*[output | {"output": [picture]}] * min(size, 16_000)),
        "a long argument": lambda size: response(call | {"arguments": '{"a":"' + "\\\\" * (size // 2) + '"}'}),
        "tools": lambda size: response(user, tools=[{"type": "function", "name": "f"}] * min(size, 4_096)),
    }


def replies() -> Shapes[Any]:
    """Whole replies of ``size`` characters, calls or choices."""

    def reply(**said: Any) -> ChatReply:
        return ChatReply(choices=(choice(0, **said),))

    return {
        "a long text": lambda size: reply(content="a" * size),
        "text that is not seen": lambda size: reply(content="a\u200b" * (size // 2)),
        "calls": lambda size: reply(tool_calls=tuple(_call(n) for n in range(size))),
        "choices": lambda size: ChatReply(choices=tuple(choice(n, content="a") for n in range(size))),
        "a long argument": lambda size: reply(tool_calls=(_call(0, '{"a":"' + "\\\\" * (size // 2) + '"}'),)),
        "a long completion": lambda size: CompletionReply(
            choices=(CompletionChoice(index=0, text="a" * size, finish_reason=FinishReason.STOP),)
        ),
        "pictures": lambda size: msgspec.json.encode({"data": [{"b64_json": "a" * (size // 4)}] * 4}),
        "ranked": lambda size: msgspec.json.encode({"results": [{"index": 0, "relevance_score": 1.0}] * (size // 36)}),
        "vectors": lambda size: EmbeddingReply(((0.5,) * 8,) * (size // 8)),
    }


def streams() -> Shapes[list[Event]]:
    """Streamed replies of ``size`` deltas or characters."""

    def stream(deltas: Iterable[Delta]) -> list[Event]:
        return [*deltas, Delta(finish_reason=FinishReason.STOP), UsageReport(Usage(3, 0, 5)), ReplyEnd()]

    def call(index: int, arguments: str, is_first: bool = False) -> Delta:
        named = ("i", "f") if is_first else (None, None)
        return Delta(tool_calls=(ToolCallDelta(index, arguments, *named),))

    return {
        "words": lambda size: stream([Delta(text="a")] * size),
        "one long word": lambda size: stream([Delta(text="a" * size)]),
        "words and thoughts": lambda size: stream([Delta(text="a"), Delta(reasoning="b")] * (size // 2)),
        "arguments": lambda size: stream([call(0, '{"a":"', True), *[call(0, "}")] * size]),
        "calls between each other": lambda size: stream(
            [call(0, "{", True), call(1, "{", True), *[call(0, "}"), call(1, "}")] * (size // 2)]
        ),
        "words after an open call": lambda size: stream([call(0, "{", True), *[Delta(text="a")] * size]),
        "calls": lambda size: stream(call(n, "{", True) for n in range(size)),
    }


def bodies() -> Shapes[bytes]:
    """Bodies of ``size`` bytes, sound JSON and what is none."""

    def body(said: str) -> bytes:
        known = '"model":"m","max_tokens":1,"messages":[{"role":"user","content":"a"}],"input":"a","prompt":"a"'
        return f'{{{known},"x":{said}}}'.encode()

    return {
        "an unclosed string of escapes": lambda size: b'"' + b'\\"' * (size // 4) + b"," * (size // 2),
        "strings of nothing": lambda size: b"[" + b'"",' * (size // 3) + b"1]",
        "a long string": lambda size: body('"' + "a" * size + '"'),
        "escapes": lambda size: body('"' + '\\"' * (size // 2) + '"'),
        "characters by number": lambda size: body('"' + "\\u00e9" * (size // 6) + '"'),
        "numbers": lambda size: body("[" + "1," * (size // 2) + "1]"),
        "long numbers": lambda size: body("[" + "1.5555555," * (size // 10) + "1]"),
        "one long number": lambda size: body("1." + "5" * size),
        "keys": lambda size: body("{" + ",".join(f'"{n:06}":1' for n in range(size // 11)) + "}"),
        "the same key": lambda size: body("{" + '"a":1,' * (size // 6) + '"a":1}'),
        "empty arrays": lambda size: body("[" + "[]," * (size // 3) + "1]"),
        "nested arrays": lambda size: body("[" + ("[" * 99 + "]" * 99 + ",") * (size // 199) + "1]"),
        "nesting without an end": lambda size: b'{"a":' * (size // 5),
        "brackets": lambda size: b"[" * size,
        "blanks": lambda size: body(" " * size + "1"),
        "no JSON": lambda size: b"a" * size,
        "no UTF-8": lambda size: b'"' + b"\xff" * size,
        "messages": lambda size: (
            b'{"model":"m","max_tokens":1,"messages":[%b]}'
            % b",".join([b'{"role":"user","content":"a"}'] * min(size // 28, 16_000))
        ),
        "requests": lambda size: (
            b'{"requests":[%b]}' % b",".join(b'{"custom_id":"%d","body":{"model":"m"}}' % n for n in range(size // 45))
        ),
    }


def upstream_bodies() -> Shapes[bytes]:
    """What an upstream may answer, whole, in either dialect: ``size`` bytes."""

    def answer(**said: Any) -> bytes:
        return msgspec.json.encode({"id": "i", "choices": [{"message": said}], "content": []})

    call = {"function": {"name": "f", "arguments": {"a": [1]}}}
    return bodies() | {
        "a long answer": lambda size: answer(content="a" * size),
        "parts": lambda size: answer(content=[{"text": "a"}] * (size // 12)),
        "calls without an id": lambda size: answer(tool_calls=[call] * (size // 50)),
        "thoughts of any form": lambda size: answer(content="a", reasoning=[[]] * (size // 3)),
        "an id of any form": lambda size: msgspec.json.encode({"id": [[]] * (size // 3), "choices": [{"message": {}}]}),
        "usage of any form": lambda size: msgspec.json.encode(
            {"usage": [[]] * (size // 3), "choices": [{"message": {}}], "content": []}
        ),
        "choices": lambda size: msgspec.json.encode({"choices": [{"message": {}}] * (size // 14)}),
        "blocks": lambda size: msgspec.json.encode(
            {"content": [{"type": "tool_use", "input": {"a": 1}}] * (size // 40)}
        ),
        "pictures": lambda size: msgspec.json.encode({"data": [{"b64_json": "a" * (size // 4)}] * 4}),
        "ranked": lambda size: msgspec.json.encode({"results": [{"index": 0, "relevance_score": 1.0}] * (size // 36)}),
        "vectors": lambda size: msgspec.json.encode({"data": [{"embedding": [0.5] * (size // 4)}]}),
        "an error": lambda size: msgspec.json.encode(
            {"error": {"message": "a" * size, "metadata": {"reasons": ["a"] * size}}}
        ),
    }


def upstream_streams() -> Shapes[bytes]:
    """What an upstream may stream, in either dialect: ``size`` bytes."""

    def events(*data: Any) -> bytes:
        return b"".join(b"data: %b\n\n" % (one if isinstance(one, bytes) else msgspec.json.encode(one)) for one in data)

    def chunk(**delta: Any) -> dict[str, Any]:
        return {"id": "i", "choices": [{"delta": delta}]}

    def calls(count: int) -> list[dict[str, Any]]:
        return [chunk(tool_calls=[{"id": f"c{n}", "function": {"name": "f", "arguments": "{}"}}]) for n in range(count)]

    def block(place: int, kind: str) -> dict[str, Any]:
        return {"type": kind, "index": place, "content_block": {"type": "tool_use", "id": "i", "name": "f"}}

    return {
        "words": lambda size: events(*[chunk(content="a")] * (size // 50)),
        "one long word": lambda size: events(chunk(content="a" * size)),
        "calls without a number": lambda size: events(*calls(size // 100)),
        "one call without a number": lambda size: events(
            *[chunk(tool_calls=[{"function": {"arguments": "a"}}])] * (size // 70)
        ),
        "an id of any form": lambda size: events({"id": [[]] * (size // 3), "choices": [{"delta": {}}]}),
        "blocks": lambda size: events(
            *[block(n, kind) for n in range(size // 160) for kind in ("content_block_start", "content_block_stop")]
        ),
        "partial words": lambda size: events(*[{"type": "content_block_delta", "delta": {"text": "a"}}] * (size // 60)),
        "an error": lambda size: events({"error": {"message": "a" * size}, "type": "error"}),
        "comments": lambda size: b": a\n" * (size // 4),
        "lines without an end": lambda size: b"data: a" * (size // 7),
        "lines of one event": lambda size: b"data: a\n" * (size // 8),
        "carriage returns": lambda size: b"\r" * size,
        "padding": lambda size: events(*[b'{"choices":[{"delta":{"content":"a"}}],"obfuscation":"a"'] * (size // 60)),
    }


def _call(number: int, arguments: str = "{}") -> ToolCall:
    return ToolCall(f"c{number}", FunctionCall("f", arguments))


def _calling(numbers: Iterable[int], arguments: str = "{}") -> Message:
    return Message("assistant", tool_calls=tuple(_call(number, arguments) for number in numbers))


def _results(numbers: Iterable[int]) -> list[Message]:
    return [Message("tool", "a", tool_call_id=f"c{number}") for number in numbers]


def choice(index: int, **said: Any) -> Choice:
    """Return one choice of a whole reply."""
    return Choice(index=index, message=ReplyMessage(**said), finish_reason=FinishReason.STOP)


def _wide(size: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{n}": {"type": "string", "minLength": 1} for n in range(size // 4)}}


def _deep(size: int) -> dict[str, Any]:
    inner: Any = [1] * size
    for _ in range(20):
        inner = [inner]
    return {"type": "object", "default": inner}
