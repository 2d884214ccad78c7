# Texts to vectors.

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from protocol.completions import Prompts, check_prompts


class EmbeddingRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Texts (or token ids) to embed; ``encoding_format`` says how the vectors travel."""

    model: str
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None

    def __post_init__(self) -> None:
        check_prompts(self.input)


class EmbeddingReply(Struct, frozen=True):
    """One vector per input, in order: a list of floats, or base64 of little-endian float32."""

    vectors: tuple[tuple[float, ...] | str, ...]
