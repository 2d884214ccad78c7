# What the checks read of a request: the rules everything that leaves the deployment, the classifier what its users say.

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from protocol.chat import (
    ChatReply,
    ChatRequest,
    FilePart,
    FinishReason,
    ImagePart,
    Message,
    RefusalPart,
    TextPart,
    ThinkingBlock,
)
from protocol.completions import CompletionReply, CompletionRequest
from protocol.embeddings import EmbeddingRequest, RerankRequest
from protocol.events import Delta
from protocol.inference import NativeRequest, Request, WholeReply
from protocol.media.audio import RealtimeRequest, SpeechRequest, TranscriptionReply, TranscriptionRequest
from protocol.media.images import ImageRequest
from protocol.messages import MessagesRequest, TextBlock, ToolResultBlock

JUDGED = ("user", "tool")  # roles; what the operator of the team or a model wrote is not judged
# How a picture begins, a PNG, JPEG, GIF or WebP, or a PDF. What only says that it is one is a text as any other.
PICTURE = re.compile(
    r"(?i:data:image/[\w.+-]{1,40};base64,)(?:iVBORw0KGgo|/9j/|R0lGOD|UklGR)|data:application/pdf;base64,JVBERi0"
)


def texts_of(
    request: Request, extra: Mapping[str, Any] | None = None, native: NativeRequest | None = None
) -> Iterator[str]:
    """Yield every text that leaves with a request, the parts of a message joined as the model reads them.

    ``extra``: fields that we do not know; ``native``: the same request in its API's own form, where it has one.
    """
    match request:
        case ChatRequest():
            for message in request.messages:
                yield from _texts_of_message(message)
            rest: Struct = replace(request, messages=(), seed=None, logit_bias=None)
            if isinstance(native, MessagesRequest):
                yield from _seams_of_results(native)
            if native is not None and (beside := native.beside_chat()):
                yield _unescaped(msgspec.json.encode(beside))
        case CompletionRequest():
            yield from _prompts(request.prompt)
            rest = replace(request, prompt="", seed=None, logit_bias=None)
        case EmbeddingRequest():
            yield from _prompts(request.input)
            rest = replace(request, input="")
        case RerankRequest():
            yield from (request.query, *request.texts)
            rest = replace(request, query="", documents=())
        case ImageRequest():
            yield request.prompt
            rest = replace(request, prompt="")
        case SpeechRequest():
            yield from (request.input, request.instructions or "")
            rest = replace(request, input="", instructions=None)
        case TranscriptionRequest():
            yield request.prompt or ""
            rest = replace(request, prompt=None)
        case RealtimeRequest():
            rest = request
    yield _unescaped(msgspec.json.encode(rest))  # tools, schemas, stop words, labels
    if extra:
        yield _unescaped(msgspec.json.encode(extra))


def ids_of(request: Request) -> str:
    """Return the ids of tool calls and the seals of thoughts that leave with a request, one a line: the writer of the
    request may have written them."""
    if not isinstance(request, ChatRequest):
        return ""
    ids = [message.tool_call_id or "" for message in request.messages]
    for message in request.messages:
        ids.append("" if message.audio is None else message.audio.id)
        ids += [call.id for call in message.tool_calls or ()]
        for block in message.thinking_blocks or ():
            ids.append(block.signature if isinstance(block, ThinkingBlock) else block.data)
    return "\n".join(filter(None, ids))


def judged_texts(request: Request) -> list[str]:
    """Return what the classifier reads: what users and tools say, one text per run of turns between answers.

    Of documents to rank the query: what stands in them is what is searched. Nothing of an embedding, which asks a model
    for nothing.
    """
    match request:
        case ChatRequest():
            runs: list[list[str]] = [[]]
            for message in request.messages:
                if message.role in JUDGED:
                    runs[-1].append(message.text())
                elif runs[-1]:
                    runs.append([])
            return ["\n".join(run) for run in runs if run]
        case CompletionRequest():
            return _prompts(request.prompt)
        case RerankRequest():
            return [request.query]
        case ImageRequest():
            return [request.prompt]
        case SpeechRequest():
            return ["\n".join(filter(None, (request.instructions, request.input)))]
        case TranscriptionRequest():
            return [request.prompt] if request.prompt else []
        case _:
            return []


def told_texts(request: Request) -> list[str]:
    """Return what tools told, which is judged with the rest, and by itself: its writer is not a user."""
    if not isinstance(request, ChatRequest):
        return []
    return [message.text() for message in request.messages if message.role == "tool"]


def is_unreadable(request: Request) -> bool:
    """Whether a prompt is of token ids, whose text only its model knows."""
    match request:
        case CompletionRequest(prompt=asked) | EmbeddingRequest(input=asked):
            return not isinstance(asked, str) and any(not isinstance(prompt, str) for prompt in asked)
    return False


def tools_given(request: Request) -> frozenset[str]:
    """Return the names of the tools that a request gives."""
    return frozenset(tool.function.name for tool in getattr(request, "tools", None) or ())


def texts_of_reply(whole: WholeReply, given: frozenset[str] = frozenset()) -> list[str]:
    """Return every text of a whole reply; the names of its calls only where the caller gave no tool of that name."""
    match whole:
        case ChatReply():
            texts = []
            for message in (choice.message for choice in whole.choices):
                texts += [message.content or "", message.refusal or "", message.reasoning_content or ""]
                texts += [] if message.audio is None else [message.audio.transcript]
                for call in message.tool_calls or ():
                    texts.append(_unescaped(call.function.arguments.encode()))
                    if call.function.name not in given:
                        texts.append(call.function.name)
            return texts
        case CompletionReply():
            return [choice.text for choice in whole.choices]
        case TranscriptionReply():
            return [whole.text]
        case _:
            return []


def said_by(delta: Delta, given: frozenset[str]) -> Iterator[tuple[str | int, str]]:
    """Yield what a delta says, each with the part of the reply that it belongs to, of a call's arguments its number. A
    name ``given`` to a tool by the caller is nothing that the model says."""
    if delta.reasoning:
        yield "reasoning", delta.reasoning
    if delta.text:
        yield "text", delta.text
    if delta.refusal:
        yield "refusal", delta.refusal
    for call in delta.tool_calls:
        if call.name and call.name not in given:
            yield f"name {call.index}", call.name
        if call.arguments:
            yield call.index, call.arguments


def is_refused(whole: WholeReply) -> bool:
    """Whether a model, or its upstream, refused to give a whole reply, or one of several."""
    match whole:
        case ChatReply(choices=choices):
            refused = any(choice.message.refusal for choice in choices)
            return refused or any(choice.finish_reason is FinishReason.CONTENT_FILTER for choice in choices)
        case CompletionReply(choices=texts):
            return any(text.finish_reason is FinishReason.CONTENT_FILTER for text in texts)
    return False


def _texts_of_message(message: Message) -> list[str]:
    texts = [message.text()]
    if isinstance(message.content, tuple):
        texts += _apart(part.text for part in message.content if isinstance(part, TextPart))
        for part in message.content:
            if isinstance(part, RefusalPart):
                texts.append(part.refusal)
            elif isinstance(part, ImagePart) and PICTURE.match(part.image_url.url) is None:
                texts.append(part.image_url.url)
            elif isinstance(part, FilePart):
                texts += [part.file.filename or "", *([] if PICTURE.match(part.file.url) else [part.file.url])]
    for call in message.tool_calls or ():
        texts += [call.function.name, _unescaped(call.function.arguments.encode("utf-8", "replace"))]
    for block in message.thinking_blocks or ():
        if isinstance(block, ThinkingBlock):
            texts.append(block.thinking)
    texts += [one for one in (message.name, message.refusal) if one]
    return texts


def _apart(parts: Iterable[str]) -> Iterator[str]:
    """Yield parts of a text one below the other, where joined they would run into one word: a key may begin there."""
    said = [part for part in parts if part]
    if any(one[-1].isalnum() and other[0].isalnum() for one, other in pairwise(said)):
        yield "\n".join(said)


def _seams_of_results(native: MessagesRequest) -> Iterator[str]:
    """Yield the results of tools whose parts have become one text in the chat."""
    for turn in native.messages:
        for block in turn.content if isinstance(turn.content, tuple) else ():
            if isinstance(block, ToolResultBlock) and isinstance(block.content, tuple):
                yield from _apart(part.text for part in block.content if isinstance(part, TextBlock))


def _prompts(prompts: object) -> list[str]:
    return [prompt for prompt in (prompts if isinstance(prompts, list) else [prompts]) if isinstance(prompt, str)]


def _unescaped(data: bytes) -> str:
    """Return JSON as a text to look things up in: a word after a line break does not begin with an n."""
    return data.decode("utf-8", "replace").replace("\\n", "\n").replace('\\"', '"')
