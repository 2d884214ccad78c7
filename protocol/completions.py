# A text completion: the older way to ask, still the plainest.

from __future__ import annotations

from msgspec import Raw, Struct

from protocol.chat import FinishReason, StreamOptions


class CompletionRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A completion as asked: one prompt or several, as text or as token ids."""

    model: str
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    stop: str | tuple[str, ...] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None

    @property
    def output_limit(self) -> int | None:
        """The most tokens a reply may have."""
        return self.max_tokens


class CompletionChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    finish_reason: FinishReason
    logprobs: Raw | None = None
    token_ids: tuple[int, ...] | None = None


class CompletionReply(Struct, frozen=True, kw_only=True):
    """A whole completion, before it is put in a dialect's shape."""

    id: str
    created: int
    choices: tuple[CompletionChoice, ...]
