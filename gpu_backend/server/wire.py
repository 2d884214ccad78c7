# The answers' shapes in OpenAI's dialect, to the byte. Nothing here decides anything.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gpu_backend.server.checkpoint.tokens import Detokenizer, TextCodec
from gpu_backend.server.checkpoint.tool_calls import CallDelta
from gpu_backend.server.reply import ScoredToken
from gpu_backend.step.messages import Timings
from gpu_backend.step.plan import TokenLogprob

LEAST_LOGPROB = -9999.0  # what OpenAI writes for a probability of nothing; JSON has no infinity

encode = msgspec.json.Encoder().encode


class PromptDetails(Struct, frozen=True):
    cached_tokens: int


class UsageBody(Struct, frozen=True, kw_only=True):
    """Tokens of a call, and extras: milliseconds and engine steps of the slowest reply, device seconds of all."""

    prompt_tokens: int
    completion_tokens: int | UnsetType = UNSET  # embeddings have none
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET
    cached_tokens: int = 0
    gpu_seconds: float = 0.0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    first_token_steps: int = 0

    @classmethod
    def of(
        cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int, timings: Sequence[Timings]
    ) -> UsageBody:
        """Return the usage of a generating call."""
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptDetails(cached_tokens),
            cached_tokens=cached_tokens,
            **_times(timings),
        )

    @classmethod
    def of_embeddings(cls, prompt_tokens: int, timings: Sequence[Timings]) -> UsageBody:
        """Return the usage of an embedding call."""
        return cls(prompt_tokens=prompt_tokens, total_tokens=prompt_tokens, **_times(timings))


class TopToken(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenScore(TopToken, frozen=True):
    top_logprobs: list[TopToken]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenScore]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]  # None: the first token of a prompt, which nothing comes before
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionBody(Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET  # in a stream: with the first piece of a call alone
    arguments: str


class CallBody(Struct, frozen=True, kw_only=True):
    """A tool call, or a piece of one in a stream, where ``index`` says of which."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionBody


class ChatMessage(Struct, frozen=True):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: Sequence[CallBody] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatDelta(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: Sequence[CallBody] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: Sequence[int] | UnsetType = UNSET
    gpu_seconds: float | UnsetType = UNSET  # device time of this reply so far: a client may leave before the usage


class TextChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: Sequence[int] | UnsetType = UNSET
    gpu_seconds: float | UnsetType = UNSET  # as of a ChunkChoice; in streams alone


Choice = ChatChoice | ChunkChoice | TextChoice


class Answer(Struct, frozen=True, kw_only=True):
    """A whole answer or one chunk: ``object`` says of which kind. ``usage`` unset is left out, None is written."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[Choice]
    usage: UsageBody | UnsetType | None = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType | None = UNSET  # null: no blocks are held, though that was asked for


def chat_logprobs(codec: TextCodec, scored: Iterable[ScoredToken]) -> ChatLogprobs:
    """Write log-probabilities as chat completions show them."""
    return ChatLogprobs([_score(codec, token) for token in scored])


def completion_logprobs(codec: TextCodec, scored: Sequence[ScoredToken], echoed: int = 0) -> CompletionLogprobs:
    """Write log-probabilities as completions show them, after ``echoed`` characters of the prompt."""
    return CompletionLogprobs(
        tokens=[_name(codec, token.token_id) for token in scored],
        token_logprobs=[_finite(token.logprob.logprob) for token in scored],
        top_logprobs=[_top_by_name(codec, token) for token in scored],
        text_offset=[echoed + token.offset for token in scored],
    )


def with_prompt(
    codec: TextCodec, prompt: Sequence[int], scores: Sequence[TokenLogprob], reply: CompletionLogprobs
) -> CompletionLogprobs:
    """Put the tokens of an echoed prompt before those of the reply; ``scores`` are theirs from the second on."""
    decoder = Detokenizer(codec)
    offsets, length = [], 0
    for token_id in prompt:
        offsets.append(length)
        length += len(decoder.feed(token_id))
    scored = [ScoredToken(token, 0, score) for token, score in zip(prompt[1:], scores, strict=True)]
    echo = completion_logprobs(codec, scored)
    return CompletionLogprobs(
        tokens=[_name(codec, prompt[0]), *echo.tokens, *reply.tokens],
        token_logprobs=[None, *echo.token_logprobs, *reply.token_logprobs],
        top_logprobs=[None, *echo.top_logprobs, *reply.top_logprobs],
        text_offset=[*offsets, *reply.text_offset],
    )


def call_bodies(calls: Iterable[CallDelta], *, streamed: bool) -> list[CallBody] | UnsetType:
    """Write tool calls, whole ones or pieces; unset for none."""
    bodies = [
        CallBody(
            index=call.index if streamed else UNSET,
            id=UNSET if call.id is None else call.id,
            type=UNSET if call.id is None else "function",
            function=FunctionBody(name=UNSET if call.name is None else call.name, arguments=call.arguments),
        )
        for call in calls
    ]
    return bodies or UNSET


def _score(codec: TextCodec, scored: ScoredToken) -> TokenScore:
    label = codec.label(scored.token_id)
    top = [_top(codec.label(token_id), logprob) for token_id, logprob in scored.logprob.top]
    return TokenScore(label.decode(errors="replace"), _finite(scored.logprob.logprob), list(label), top)


def _top(label: bytes, logprob: float) -> TopToken:
    return TopToken(label.decode(errors="replace"), _finite(logprob), list(label))


def _top_by_name(codec: TextCodec, scored: ScoredToken) -> dict[str, float]:
    top: TokenLogprob = scored.logprob
    named = {_name(codec, token_id): _finite(logprob) for token_id, logprob in top.top}
    return named | {_name(codec, scored.token_id): _finite(top.logprob)}


def _name(codec: TextCodec, token_id: int) -> str:
    """Return a token's text; what is no text by itself is written in OpenAI's way, ``bytes:\\xe4\\xb8``."""
    label = codec.label(token_id)
    try:
        return label.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in label)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _times(timings: Sequence[Timings]) -> dict[str, Any]:
    if not timings:
        return {}
    return {
        "gpu_seconds": round(sum(t.gpu_seconds for t in timings), 9),
        "queue_ms": round(max(t.queue_ms for t in timings), 3),
        "prefill_ms": round(max(t.prefill_ms for t in timings), 3),
        "decode_ms": round(max(t.decode_ms for t in timings), 3),
        "first_token_steps": max(t.first_token_steps for t in timings),
    }
