# The OpenAI wire format: OpenAI itself, every compatible service, and our own engine.

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw, Struct

from gateway.errors import UpstreamBusy, UpstreamError, UpstreamFailure, UpstreamFull, UpstreamRefused
from gateway.providers.base import Asking, EventStream, Request, UpstreamRequest, WholeReply
from gateway.providers.reading import SseEvents, count_of, read_retry_after
from protocol.chat import (
    ChatReply,
    ChatRequest,
    Choice,
    FinishReason,
    FunctionCall,
    ReplyMessage,
    StreamOptions,
    ToolCall,
)
from protocol.completions import CompletionChoice, CompletionReply, CompletionRequest
from protocol.embeddings import EmbeddingReply, EmbeddingRequest
from protocol.events import Delta, Event, ToolCallDelta, UsageReport
from protocol.usage import Usage

# What our own engine understands beyond OpenAI's fields, and any caller may say.
ENGINE_FIELDS = frozenset({"top_k", "min_p", "stop_token_ids", "ignore_eos"})

PATHS: dict[type, str] = {ChatRequest: "/chat/completions", CompletionRequest: "/completions"}


class OpenAIFormat:
    """Speaks OpenAI's dialect to an upstream."""

    def build_request(self, asking: Asking) -> UpstreamRequest:
        """Return the request: the decoded fields encoded again, the model under its upstream name."""
        request = msgspec.structs.replace(asking.request, model=asking.target.model.upstream_model)
        if isinstance(request, EmbeddingRequest):
            path = "/embeddings"
        else:
            path = PATHS[type(request)]
            options = StreamOptions(include_usage=True) if asking.streams else None
            request = msgspec.structs.replace(request, stream=asking.streams or None, stream_options=options)
        if isinstance(request, ChatRequest) and request.max_tokens is not None and not asking.self_hosted:
            # The older name is refused by newer models; the newer one is understood by all that know both.
            request = msgspec.structs.replace(request, max_tokens=None, max_completion_tokens=request.output_limit)
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if asking.api_key:
            headers["authorization"] = f"Bearer {asking.api_key}"
        extra: dict[str, Any] = dict(asking.extra)
        if asking.self_hosted:
            headers |= {"x-tenant": asking.tenant, "x-weight": str(asking.weight), "x-tier": asking.tier}
            if not isinstance(request, EmbeddingRequest):
                extra["return_token_ids"] = True
                extra["return_gpu_seconds"] = True
                if request.seed is None:
                    request = msgspec.structs.replace(request, seed=asking.seed)
        return UpstreamRequest("POST", asking.target.endpoint.base_url + path, headers, _encode_with(request, extra))

    def read_reply(self, request: Request, body: bytes) -> tuple[WholeReply, Usage | None]:
        """Return the reply that ``body`` holds, whichever kind ``request`` asked for."""
        try:
            match request:
                case ChatRequest():
                    chat = _chat_decoder.decode(body)
                    if chat.choices:
                        return chat.reply(), _count(chat.usage)
                case CompletionRequest():
                    completion = _completion_decoder.decode(body)
                    if completion.choices:
                        return completion.reply(), _count(completion.usage)
                case _:
                    vectors = _embedding_decoder.decode(body)
                    reply = vectors.reply()
                    if _are_vectors(reply, request):
                        return reply, _count(vectors.usage)
        except msgspec.DecodeError as exc:
            raise UpstreamError("The upstream's answer is not what its format promises.", outcome="malformed") from exc
        raise UpstreamError("The upstream's answer is empty, or not what was asked for.", outcome="malformed")

    def open_events(self, request: Request) -> EventStream:
        """Return a reader for a streamed chat completion or completion."""
        return OpenAIEvents(_choices_asked(request))

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> UpstreamFailure:
        """Return what a failing answer means: whose fault it is, and whether another target may be tried."""
        error = _read_error_body(body)
        if status in (401, 403):
            return UpstreamError("The upstream refused the gateway's own credentials.", outcome="refused_key")
        if status == 429 and error.code == "insufficient_quota":
            return UpstreamBusy("The gateway's own account at the upstream is used up.", outcome="spend_cap")
        if status == 429 and (error.message or "").startswith("Request too large"):
            return UpstreamBusy("The request alone exceeds the upstream's rate limit.", outcome="too_large")
        if status == 429:
            return UpstreamBusy("The upstream's rate limit is reached.", retry_after=read_retry_after(headers))
        if status in (400, 404, 409, 413, 422):
            # A 404 says that our catalogue names a model the upstream does not have: ours to mend, not the caller's.
            if status == 404:
                return UpstreamError("The upstream does not know the model or the path.", outcome="not_found")
            return UpstreamRefused(
                error.message or "The upstream refused the request.",
                status=413 if status == 413 else 400,
                code=error.code if isinstance(error.code, str) else None,
                param=error.param,
            )
        if status == 503 and error.code == "overloaded":  # our own engine's word
            return UpstreamFull(
                "Every engine of this model is busy. Try again soon.", retry_after=read_retry_after(headers)
            )
        failure = UpstreamError(f"The upstream answered {status}.", outcome=f"status_{status}")
        failure.retry_after = read_retry_after(headers)
        return failure


class OpenAIEvents(SseEvents):
    """Reads one streamed reply in OpenAI's dialect. ``choices`` is how many were asked for."""

    def __init__(self, choices: int = 1) -> None:
        super().__init__()
        self._choices = choices
        self._finished: set[int] = set()  # choices that have said why they ended

    def _has_reason(self) -> bool:
        return bool(self._finished)

    def _has_finished(self) -> bool:
        return len(self._finished) >= self._choices

    def _read_event(self, data: bytes, events: list[Event]) -> None:
        if data == b"[DONE]":
            self._end(events)
        else:
            self._read_chunk(data, events)

    def _read_chunk(self, data: bytes, events: list[Event]) -> None:
        try:
            chunk = _chunk_decoder.decode(data)
        except msgspec.DecodeError as exc:
            raise UpstreamError("The upstream sent a chunk that is not JSON.", outcome="malformed") from exc
        if _present(chunk.error) is not None:
            raise UpstreamError("The upstream reported an error.", outcome="error_frame")
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                self._finished.add(choice.index)
            events.append(choice.delta_event())
        if (usage := _count(chunk.usage)) is not None:
            events.append(UsageReport(usage))


def _choices_asked(request: Request) -> int:
    prompts = getattr(request, "prompt", None)
    several = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    return (getattr(request, "n", None) or 1) * several


def read_finish_reason(word: str) -> FinishReason:
    """Return the reason that an upstream's word means; older words and strangers count as a plain stop."""
    if word == "function_call":
        return FinishReason.TOOL_CALLS
    try:
        return FinishReason(word)
    except ValueError:
        return FinishReason.STOP


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


def _encode_with(request: Struct, extra: Mapping[str, Any]) -> bytes:
    body = msgspec.json.encode(request)
    return body[:-1] + b"," + msgspec.json.encode(extra)[1:] if extra else body


# The upstream's shapes. Only what we read is named; the rest is skipped without being built.

LARGEST_FLOAT32 = 3.4028235e38
MOST_SECONDS = 1e6  # of device time in one call
NOTHING = Raw()  # msgspec takes no union of Raw with None


class _TokenDetails(Struct, frozen=True):
    cached_tokens: int | float | None = None
    cache_write_tokens: int | float | None = None
    reasoning_tokens: int | float | None = None


NO_DETAILS = _TokenDetails()


class _Usage(Struct, frozen=True):
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
            gpu_seconds=_seconds(self.gpu_seconds),
        )


def _seconds(number: float | None) -> float:
    """Return a device time that somebody may be asked to pay for, or 0 for what cannot be one."""
    return number if number is not None and 0.0 <= number <= MOST_SECONDS else 0.0


class _Function(Struct, frozen=True):
    name: str
    arguments: str | None = None


class _ToolCall(Struct, frozen=True):
    function: _Function
    id: str = ""

    def call(self) -> ToolCall:
        # Some services send no arguments, or none that are JSON, where the function takes none.
        return ToolCall(self.id, FunctionCall(self.function.name, self.function.arguments or "{}"))


class _Message(Struct, frozen=True):
    content: str | None = None
    refusal: str | None = None
    tool_calls: tuple[_ToolCall, ...] | None = None
    reasoning_content: str | None = None


class _Choice(Struct, frozen=True):
    message: _Message
    index: int = 0
    finish_reason: str | None = None
    logprobs: Raw = NOTHING
    token_ids: tuple[int, ...] | None = None


class _Chat(Struct, frozen=True):
    choices: tuple[_Choice, ...]
    id: str = ""
    created: int = 0
    usage: _Usage | None = None
    system_fingerprint: str | None = None

    def reply(self) -> ChatReply:
        choices = tuple(
            Choice(
                index=choice.index,
                message=ReplyMessage(
                    content=choice.message.content,
                    refusal=choice.message.refusal,
                    tool_calls=tuple(call.call() for call in choice.message.tool_calls or ()) or None,
                    reasoning_content=choice.message.reasoning_content,
                ),
                finish_reason=read_finish_reason(choice.finish_reason or "stop"),
                logprobs=_present(choice.logprobs),
                token_ids=choice.token_ids,
            )
            for choice in self.choices
        )
        return ChatReply(id=self.id, created=self.created, choices=choices, system_fingerprint=self.system_fingerprint)


class _TextChoice(Struct, frozen=True):
    text: str
    index: int = 0
    finish_reason: str | None = None
    logprobs: Raw = NOTHING
    token_ids: tuple[int, ...] | None = None


class _Completion(Struct, frozen=True):
    choices: tuple[_TextChoice, ...]
    id: str = ""
    created: int = 0
    usage: _Usage | None = None

    def reply(self) -> CompletionReply:
        choices = tuple(
            CompletionChoice(
                index=choice.index,
                text=choice.text,
                finish_reason=read_finish_reason(choice.finish_reason or "stop"),
                logprobs=_present(choice.logprobs),
                token_ids=choice.token_ids,
            )
            for choice in self.choices
        )
        return CompletionReply(id=self.id, created=self.created, choices=choices)


class _Vector(Struct, frozen=True):
    embedding: tuple[float, ...] | str
    index: int = 0


class _Embeddings(Struct, frozen=True):
    data: tuple[_Vector, ...]
    usage: _Usage | None = None

    def reply(self) -> EmbeddingReply:
        return EmbeddingReply(tuple(item.embedding for item in sorted(self.data, key=lambda item: item.index)))


class _DeltaFunction(Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _DeltaToolCall(Struct, frozen=True):
    index: int = 0
    id: str | None = None
    function: _DeltaFunction = _DeltaFunction()


class _Delta(Struct, frozen=True):
    content: str | None = None
    refusal: str | None = None
    tool_calls: tuple[_DeltaToolCall, ...] | None = None
    reasoning_content: str | None = None


class _ChunkChoice(Struct, frozen=True):
    index: int = 0
    delta: _Delta = _Delta()
    text: str | None = None  # completions
    finish_reason: str | None = None
    logprobs: Raw = NOTHING
    token_ids: tuple[int, ...] | None = None
    gpu_seconds: float | None = None

    def delta_event(self) -> Delta:
        calls = tuple(
            ToolCallDelta(call.index, call.function.arguments or "", call.id, call.function.name)
            for call in self.delta.tool_calls or ()
        )
        return Delta(
            self.index,
            self.delta.content or self.text or "",
            calls,
            self.delta.refusal or "",
            self.delta.reasoning_content or "",
            read_finish_reason(self.finish_reason) if self.finish_reason is not None else None,
            _present(self.logprobs),
            self.token_ids or (),
            _seconds(self.gpu_seconds),
        )


class _Chunk(Struct, frozen=True):
    choices: tuple[_ChunkChoice, ...] = ()
    usage: _Usage | None = None
    error: Raw = NOTHING


class _Error(Struct, frozen=True):
    message: str | None = None
    code: str | int | None = None
    param: str | None = None


class _ErrorBody(Struct, frozen=True):
    error: _Error


def _count(usage: _Usage | None) -> Usage | None:
    return None if usage is None else usage.usage()


def _read_error_body(body: bytes) -> _Error:
    try:
        return _error_decoder.decode(body).error
    except msgspec.DecodeError:
        return _Error()


def _present(raw: Raw) -> Raw | None:
    return None if bytes(raw) in (b"", b"null") else raw.copy()


_chat_decoder = msgspec.json.Decoder(_Chat)
_completion_decoder = msgspec.json.Decoder(_Completion)
_embedding_decoder = msgspec.json.Decoder(_Embeddings)
_chunk_decoder = msgspec.json.Decoder(_Chunk)
_error_decoder = msgspec.json.Decoder(_ErrorBody)
