# Whole replies in OpenAI's dialect, and its count of tokens. Only what we read is named in the shapes; the rest is
# skipped without being built.

from __future__ import annotations

import base64
from hashlib import blake2s
from typing import Any

import msgspec
from msgspec import Raw, Struct

from gateway.errors import UpstreamError
from gateway.providers.base import Request, WholeReply
from gateway.providers.reading import NOT_JSON, count_of, read_usage, text_of
from protocol.chat import ChatReply, ChatRequest, Choice, FinishReason, FunctionCall, ReplyMessage, ToolCall
from protocol.completions import CompletionChoice, CompletionReply, CompletionRequest
from protocol.embeddings import EmbeddingReply, EmbeddingRequest
from protocol.usage import Usage

LARGEST_FLOAT32 = 3.4028235e38
MOST_SECONDS = 1e6  # of device time in one call
NOTHING = Raw()  # msgspec takes no union of Raw with None


def read_whole(request: Request, body: bytes) -> tuple[WholeReply, Usage | None]:
    """Return the reply that ``body`` holds, whichever kind ``request`` asked for. Raises UpstreamError."""
    try:
        match request:
            case ChatRequest():
                chat = _chat_decoder.decode(body)
                if chat.choices:
                    return chat.reply(), told_usage(chat.usage)
            case CompletionRequest():
                completion = _completion_decoder.decode(body)
                if completion.choices:
                    return completion.reply(), told_usage(completion.usage)
            case _:
                vectors = _embedding_decoder.decode(body)
                reply = vectors.reply()
                if _are_vectors(reply, request):
                    return reply, told_usage(vectors.usage)
    except NOT_JSON as exc:
        raise UpstreamError("The upstream's answer is not what its format promises.", outcome="malformed") from exc
    raise UpstreamError("The upstream's answer is empty, or not what was asked for.", outcome="malformed")


def read_finish_reason(word: str) -> FinishReason:
    """Return the reason that an upstream's word means; older words and strangers count as a plain stop."""
    if word == "function_call":
        return FinishReason.TOOL_CALLS
    try:
        return FinishReason(word)
    except ValueError:
        return FinishReason.STOP


def told_usage(said: object) -> Usage | None:
    """Return what the upstream counted, or ``None`` where it told nothing or nonsense."""
    usage = read_usage(said, UsageObject)
    return None if usage is None else usage.usage()


def made_up_id(reply: str, choice: int, place: int) -> str:
    """Return an id for a call that a service gave none: results must name the call that they are of."""
    return "call_" + blake2s(f"{reply} {choice} {place}".encode(), digest_size=12).hexdigest()


def read_content(content: Content) -> tuple[str, str]:
    """Return the words of a message and the thinking among them: some services send both as a list of parts."""
    if content is None or isinstance(content, str):
        return content or "", ""
    said = "".join(text_of(part.text) or "" for part in content)
    thoughts = (thought for part in content if isinstance(part.thinking, list) for thought in part.thinking)
    return said, "".join(text_of(thought.get("text")) or "" for thought in thoughts if isinstance(thought, dict))


def read_arguments(arguments: Arguments) -> str:
    """Return a call's arguments as the JSON text that they are by the book; some services send the object itself."""
    return arguments or "" if not isinstance(arguments, dict) else msgspec.json.encode(arguments).decode()


def present(raw: Raw) -> Raw | None:
    """Return a field that was said, out of the buffer it came in, as text on one line: it may go out in an event's."""
    said = bytes(raw)
    if said in (b"", b"null"):
        return None
    if not said.isascii():  # nobody has decoded it yet: it may be no UTF-8, and what goes out must be
        said = said.decode("utf-8", "replace").encode()
    return Raw(msgspec.json.format(said, indent=-1) if b"\n" in said else said)


class _TokenDetails(Struct, frozen=True):
    cached_tokens: int | float | None = None
    cache_write_tokens: int | float | None = None
    reasoning_tokens: int | float | None = None


NO_DETAILS = _TokenDetails()


class UsageObject(Struct, frozen=True):
    """The ``usage`` of a reply or a chunk."""

    prompt_tokens: int | float | None = 0
    completion_tokens: int | float | None = 0
    prompt_tokens_details: _TokenDetails | None = None
    completion_tokens_details: _TokenDetails | None = None
    gpu_seconds: float | None = None

    def usage(self) -> Usage | None:
        """Return the counts, or ``None`` where they cannot be counts: then the reply itself is counted."""
        prompt, completion = count_of(self.prompt_tokens), count_of(self.completion_tokens)
        if not prompt or completion is None:  # no prompt is empty once a template is around it
            return None
        details = self.prompt_tokens_details or NO_DETAILS
        cached = min(count_of(details.cached_tokens) or 0, prompt)
        written = min(count_of(details.cache_write_tokens) or 0, prompt - cached)
        reasoning = count_of((self.completion_tokens_details or NO_DETAILS).reasoning_tokens) or 0
        return Usage(
            input_tokens=prompt,
            cached_input_tokens=cached,
            output_tokens=completion,
            reasoning_tokens=min(reasoning, completion),
            cache_write_tokens=written,
            gpu_seconds=seconds(self.gpu_seconds),
        )


def seconds(number: float | None) -> float:
    """Return a device time that somebody may be asked to pay for, or 0 for what cannot be one."""
    return number if number is not None and 0.0 <= number <= MOST_SECONDS else 0.0


class Part(Struct, frozen=True):
    """One part of a message's content, where it comes in parts."""

    text: Any = None
    thinking: Any = None


Content = str | tuple[Part, ...] | None
Arguments = str | dict[str, Any] | None


class _Function(Struct, frozen=True):
    name: str
    arguments: Arguments = None


class _ToolCall(Struct, frozen=True):
    function: _Function
    id: str | None = None

    def call(self, reply: str, choice: int, place: int) -> ToolCall:
        # Some services send no arguments, or none that are JSON, where the function takes none.
        arguments = read_arguments(self.function.arguments) or "{}"
        ident = self.id or made_up_id(reply, choice, place)
        return ToolCall(ident, FunctionCall(self.function.name, arguments))


class _Message(Struct, frozen=True):
    content: Content = None
    refusal: str | None = None
    tool_calls: tuple[_ToolCall, ...] | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # what OpenRouter, Groq and newer vLLM call it

    def message(self, reply: str, choice: int) -> ReplyMessage:
        text, thought = read_content(self.content)
        return ReplyMessage(
            content=None if self.content is None else text,
            refusal=self.refusal,
            tool_calls=tuple(call.call(reply, choice, place) for place, call in enumerate(self.tool_calls or ()))
            or None,
            reasoning_content=self.reasoning_content or text_of(self.reasoning) or thought or None,
        )


class _Choice(Struct, frozen=True):
    message: _Message
    index: int | None = None
    finish_reason: str | None = None
    logprobs: Raw = NOTHING
    token_ids: tuple[int, ...] | None = None
    stop_reason: Any = None  # vLLM's: the stop sequence, or a token's id


class _Chat(Struct, frozen=True):
    choices: tuple[_Choice, ...]
    id: Any = None
    created: Any = None
    usage: Any = None
    system_fingerprint: Any = None

    def reply(self) -> ChatReply:
        choices = tuple(
            Choice(
                index=choice.index or 0,
                message=choice.message.message(f"{self.id} {self.created}", choice.index or 0),
                finish_reason=read_finish_reason(choice.finish_reason or "stop"),
                logprobs=present(choice.logprobs),
                token_ids=choice.token_ids,
                stop_sequence=text_of(choice.stop_reason),
            )
            for choice in self.choices
        )
        return ChatReply(choices=choices, system_fingerprint=text_of(self.system_fingerprint))


class _TextChoice(Struct, frozen=True):
    text: str
    index: int | None = None
    finish_reason: str | None = None
    logprobs: Raw = NOTHING
    token_ids: tuple[int, ...] | None = None


class _Completion(Struct, frozen=True):
    choices: tuple[_TextChoice, ...]
    usage: Any = None

    def reply(self) -> CompletionReply:
        choices = tuple(
            CompletionChoice(
                index=choice.index or 0,
                text=choice.text,
                finish_reason=read_finish_reason(choice.finish_reason or "stop"),
                logprobs=present(choice.logprobs),
                token_ids=choice.token_ids,
            )
            for choice in self.choices
        )
        return CompletionReply(choices=choices)


class _Vector(Struct, frozen=True):
    embedding: tuple[float, ...] | str
    index: int = 0


class _Embeddings(Struct, frozen=True):
    data: tuple[_Vector, ...]
    usage: Any = None

    def reply(self) -> EmbeddingReply:
        return EmbeddingReply(tuple(item.embedding for item in sorted(self.data, key=lambda item: item.index)))


def _are_vectors(reply: EmbeddingReply, request: EmbeddingRequest) -> bool:
    """Whether there is one vector for each input, each of float32 numbers."""
    given = request.input
    wanted = len(given) if isinstance(given, list) and given and not isinstance(given[0], int) else 1
    return len(reply.vectors) == wanted and all(map(_is_vector, reply.vectors))


def _is_vector(vector: tuple[float, ...] | str) -> bool:
    if not isinstance(vector, str):
        return max(map(abs, vector), default=LARGEST_FLOAT32 * 2) <= LARGEST_FLOAT32
    try:
        return bool(vector) and len(base64.b64decode(vector, validate=True)) % 4 == 0
    except ValueError:
        return False


_chat_decoder = msgspec.json.Decoder(_Chat)
_completion_decoder = msgspec.json.Decoder(_Completion)
_embedding_decoder = msgspec.json.Decoder(_Embeddings)
