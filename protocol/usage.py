# How many tokens a call used. Usages add up; the shape knows no price.

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

# Parts of the tokens of a Usage that have a price of their own where they are heard, seen or said.
MEDIA_TOKENS = (
    *("audio_input_tokens", "cached_audio_tokens", "image_input_tokens", "cached_image_tokens"),
    "audio_output_tokens",
)
# Fields of a Usage that rows have beside its tokens: what costs and is no token, and MEDIA_TOKENS.
UNITS = (
    *("extra_requests", "web_searches", "file_searches", "containers"),
    *("search_units", "images", "characters", "audio_seconds"),
    *MEDIA_TOKENS,
)
# Headers by which our own engine tells of a stream's prompt before its first token.
PROMPT_TOKENS, CACHED_TOKENS = "x-prompt-tokens", "x-cached-tokens"


class Usage(Struct, frozen=True, omit_defaults=True):
    """Tokens of one call or of many.

    ``input_tokens`` counts the whole prompt: ``cached_input_tokens`` (read from a prompt cache) and
    ``cache_write_tokens`` (written to one) are parts of it. ``reasoning_tokens`` is a part of ``output_tokens``.
    """

    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cache_write_tokens: int = 0
    # Told by our own engine only: device seconds, and milliseconds of the slowest reply.
    gpu_seconds: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    # What is priced beside tokens (UNITS):
    extra_requests: int = 0  # beside the first, by which a call's replies were asked for, each with the whole prompt
    web_searches: int = 0  # that the upstream made for the model
    search_units: int = 0  # of documents ranked: a query with up to a hundred of them
    images: int = 0  # that were made
    characters: int = 0  # that were said
    audio_seconds: int = 0  # of recordings that were written down
    file_searches: int = 0  # in files that lie at the upstream, made there for the model
    containers: int = 0  # in which the model's code ran at the upstream
    # Of recordings, and of a conversation by voice:
    audio_input_tokens: int = 0  # parts of ``input_tokens``,
    cached_audio_tokens: int = 0  # of these, and of ``cached_input_tokens``
    image_input_tokens: int = 0
    cached_image_tokens: int = 0
    audio_output_tokens: int = 0  # a part of ``output_tokens``

    @property
    def total_tokens(self) -> int:
        """Tokens in and out."""
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.cached_input_tokens + other.cached_input_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.cache_write_tokens + other.cache_write_tokens,
            self.gpu_seconds + other.gpu_seconds,
            self.prefill_ms + other.prefill_ms,
            self.decode_ms + other.decode_ms,
            self.extra_requests + other.extra_requests,
            self.web_searches + other.web_searches,
            self.search_units + other.search_units,
            self.images + other.images,
            self.characters + other.characters,
            self.audio_seconds + other.audio_seconds,
            self.file_searches + other.file_searches,
            self.containers + other.containers,
            self.audio_input_tokens + other.audio_input_tokens,
            self.cached_audio_tokens + other.cached_audio_tokens,
            self.image_input_tokens + other.image_input_tokens,
            self.cached_image_tokens + other.cached_image_tokens,
            self.audio_output_tokens + other.audio_output_tokens,
        )

    def at_least(self, other: Usage) -> Usage:
        """Return the same with no fewer units than another has."""
        return replace(self, **{name: max(getattr(self, name), getattr(other, name)) for name in UNITS})
