# Whole replies in OpenAI's dialect. Only what we read is named in the shapes; the rest is skipped without being built.

from __future__ import annotations

import base64
import math
from typing import Any

import msgspec
from msgspec import Raw, Struct

from gateway.upstreams.openai.parts import (
    Audio,
    Content,
    made_up_id,
    present,
    read_arguments,
    read_content,
    read_finish_reason,
    told_apart,
    told_usage,
)
from gateway.upstreams.wire.errors import UpstreamError
from gateway.upstreams.wire.reading import NOTHING, count_of, read_usage, text_in
from protocol.chat import ChatReply, ChatRequest, Choice, FinishReason, FunctionCall, ReplyMessage, ToolCall
from protocol.completions import CompletionChoice, CompletionReply, CompletionRequest
from protocol.decoding import NOT_JSON
from protocol.embeddings import EmbeddingReply, EmbeddingRequest, Ranked, RerankReply, RerankRequest
from protocol.inference import Request, WholeReply
from protocol.media.audio import Segment, TranscriptionReply, TranscriptionRequest
from protocol.media.images import Image, ImageReply, ImageRequest
from protocol.usage import Usage

LARGEST_FLOAT32 = 3.4028235e38


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
            case RerankRequest():
                ranking = _rerank_decoder.decode(body)
                if (ranked := ranking.reply(request)) is not None:
                    return ranked, ranking.used()
            case ImageRequest():
                pictures = _image_decoder.decode(body)
                if pictures.data and all(each.b64_json or each.url for each in pictures.data):
                    return pictures.reply(), pictures.used()
            case TranscriptionRequest():
                written = _transcription_decoder.decode(body)
                return TranscriptionReply(written.text, Raw(body), written.segments or ()), written.used()
            case EmbeddingRequest():
                vectors = _embedding_decoder.decode(body)
                reply = vectors.reply()
                if _are_vectors(reply, request):
                    return reply, told_usage(vectors.usage)
    except NOT_JSON as exc:
        raise UpstreamError("The upstream's answer is not what its format promises.", outcome="malformed") from exc
    raise UpstreamError("The upstream's answer is empty, or not what was asked for.", outcome="malformed")


class _Function(Struct, frozen=True):
    name: str
    arguments: Raw = NOTHING


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
    reasoning: Raw = NOTHING  # what OpenRouter, Groq and newer vLLM call it
    audio: Audio | None = None

    def message(self, reply: _Chat, choice: int) -> ReplyMessage:
        text, thought = read_content(self.content)
        calls = None
        if self.tool_calls:
            told = told_apart(reply.id, reply.created)
            calls = tuple(call.call(told, choice, place) for place, call in enumerate(self.tool_calls))
        return ReplyMessage(
            content=None if self.content is None else text,
            refusal=self.refusal,
            tool_calls=calls,
            reasoning_content=self.reasoning_content or text_in(self.reasoning) or thought or None,
            audio=None if self.audio is None else self.audio.spoken(self.audio.transcript or ""),
        )


class _Choice(Struct, frozen=True):
    message: _Message | None = None
    index: int | None = None
    finish_reason: str | None = None
    logprobs: Raw = NOTHING
    token_ids: tuple[int, ...] | None = None
    stop_reason: Raw = NOTHING  # vLLM's: the stop sequence, or a token's id

    def said(self) -> _Message:
        """Return what was said: Azure leaves it out where its filter took all of it. Raises UpstreamError."""
        if self.message is None and self.finish_reason != FinishReason.CONTENT_FILTER:
            raise UpstreamError("The upstream's answer is empty, or not what was asked for.", outcome="malformed")
        return self.message or _Message()


class _Chat(Struct, frozen=True):
    choices: tuple[_Choice, ...]
    id: Raw = NOTHING
    created: Raw = NOTHING
    usage: Raw = NOTHING
    system_fingerprint: Raw = NOTHING
    service_tier: Raw = NOTHING

    def reply(self) -> ChatReply:
        choices = tuple(
            Choice(
                index=choice.index or 0,
                message=choice.said().message(self, choice.index or 0),
                finish_reason=read_finish_reason(choice.finish_reason or "stop"),
                logprobs=present(choice.logprobs),
                token_ids=choice.token_ids,
                stop_sequence=text_in(choice.stop_reason),
            )
            for choice in self.choices
        )
        fingerprint, tier = text_in(self.system_fingerprint), text_in(self.service_tier)
        return ChatReply(choices=choices, system_fingerprint=fingerprint, service_tier=tier)


class _TextChoice(Struct, frozen=True):
    text: str
    index: int | None = None
    finish_reason: str | None = None
    logprobs: Raw = NOTHING
    token_ids: tuple[int, ...] | None = None


class _Completion(Struct, frozen=True):
    choices: tuple[_TextChoice, ...]
    usage: Raw = NOTHING

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
    usage: Raw = NOTHING

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


class _BilledUnits(Struct, frozen=True):
    search_units: int | float | None = None


class _Meta(Struct, frozen=True):
    billed_units: _BilledUnits | None = None


class _RerankUsage(Struct, frozen=True):
    total_tokens: int | float | None = None


class _Rerank(Struct, frozen=True):
    results: tuple[Ranked, ...]
    usage: _RerankUsage | None = None  # as Jina, Together and vLLM tell it
    meta: _Meta | None = None  # as Cohere does

    def reply(self, request: RerankRequest) -> RerankReply | None:
        """Return the results, the best first, or ``None`` where they are not those of the request's documents."""
        places = {ranked.index for ranked in self.results}
        count = len(request.documents)
        if not places <= set(range(count)) or len(places) < max(1, len(self.results)):
            return None
        ordered = sorted(self.results, key=lambda ranked: -ranked.relevance_score)
        return RerankReply(tuple(ordered[: request.top_n]))

    def used(self) -> Usage | None:
        """Return what the upstream counted: tokens, search units, or ``None`` for neither."""
        tokens = count_of(self.usage.total_tokens) if self.usage else None
        billed = self.meta.billed_units if self.meta else None
        units = count_of(billed.search_units) if billed else None
        return Usage(input_tokens=tokens or 0, search_units=units or 0) if tokens or units else None


class _ImageTokens(Struct, frozen=True):
    image_tokens: int | float | None = None


class ImageUsage(Struct, frozen=True):
    """What an upstream counts of pictures, if it does."""

    input_tokens: int | float | None = None
    output_tokens: int | float | None = None
    input_tokens_details: _ImageTokens | None = None

    def used(self, number: int) -> Usage:
        """Return so many pictures, and the tokens that were counted."""
        tokens = (count_of(self.input_tokens) or 0, count_of(self.output_tokens) or 0)
        seen = count_of((self.input_tokens_details or _ImageTokens()).image_tokens) or 0
        images = {"images": number, "image_input_tokens": min(seen, tokens[0])}
        return Usage(input_tokens=tokens[0], output_tokens=tokens[1], **images)


class _Images(Struct, frozen=True):
    data: tuple[Image, ...]
    size: str | None = None
    quality: str | None = None
    background: str | None = None
    output_format: str | None = None
    usage: ImageUsage | None = None

    def reply(self) -> ImageReply:
        said = (self.size, self.quality, self.background, self.output_format)
        return ImageReply(images=self.data, **dict(zip(ImageReply.__struct_fields__[1:], said, strict=True)))

    def used(self) -> Usage:
        """Return what was made, and the tokens that the upstream counted, if it did."""
        return (self.usage or ImageUsage()).used(len(self.data))


class TranscriptionUsage(Struct, frozen=True):
    """What an upstream counts of a recording: seconds, or tokens."""

    seconds: int | float | None = None
    input_tokens: int | float | None = None
    output_tokens: int | float | None = None

    def used(self) -> Usage:
        """Return the counts, seconds that have begun as whole ones."""
        seconds = count_of(math.ceil(self.seconds)) if self.seconds else None
        tokens = (count_of(self.input_tokens) or 0, count_of(self.output_tokens) or 0)
        return Usage(input_tokens=tokens[0], output_tokens=tokens[1], audio_seconds=seconds or 0)


class _Transcription(Struct, frozen=True):
    text: str
    segments: tuple[Segment, ...] | None = None
    duration: Any = None  # seconds; some say a text
    usage: Raw = NOTHING

    def used(self) -> Usage | None:
        """Return what the upstream counted; where it counted nothing, the seconds that it told."""
        told = read_usage(self.usage, TranscriptionUsage)
        if told is None and (seconds := self._seconds()) is not None:
            told = TranscriptionUsage(seconds)
        return None if told is None else told.used()

    def _seconds(self) -> float | None:
        try:
            seconds = float(self.duration) if isinstance(self.duration, str | int | float) else math.nan
        except (ValueError, OverflowError):
            return None
        return seconds if math.isfinite(seconds) else None


_transcription_decoder = msgspec.json.Decoder(_Transcription)
_chat_decoder = msgspec.json.Decoder(_Chat)
_completion_decoder = msgspec.json.Decoder(_Completion)
_embedding_decoder = msgspec.json.Decoder(_Embeddings)
_rerank_decoder = msgspec.json.Decoder(_Rerank)
_image_decoder = msgspec.json.Decoder(_Images)
