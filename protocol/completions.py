# A text completion: the older way to ask, still the plainest.

from __future__ import annotations

from msgspec import Raw, Struct

from protocol.chat import FinishReason, StreamOptions

# One text, several, one list of token ids, or several: the elements are of one kind. (msgspec decodes only one kind of
# list in a union, so the type is wider than the rule; ``check_prompts`` keeps the rule.)
MOST_PROMPTS = 16_384  # in one request
Prompts = str | list[str | int | list[int]]


def check_prompts(prompts: Prompts) -> None:
    """Raise ``ValueError`` unless all elements are of one kind."""
    if isinstance(prompts, list) and len(set(map(type, prompts))) > 1:
        raise ValueError("Expected texts, token ids or lists of token ids, got a mixture")


def number_of(prompts: Prompts) -> int:
    """Return how many prompts these are: token ids alone are one."""
    return 1 if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else len(prompts)


class CompletionRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A completion as asked: one prompt or several, as text or as token ids."""

    model: str
    prompt: Prompts
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

    def __post_init__(self) -> None:
        check_prompts(self.prompt)

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

    choices: tuple[CompletionChoice, ...]
