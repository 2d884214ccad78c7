# Pictures made of words, in OpenAI's shapes.

from __future__ import annotations

from typing import Literal

from msgspec import Struct

MOST_IMAGES = 10  # of one request


class ImageRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What to make pictures of, and how many and of which kind."""

    model: str
    prompt: str
    n: int | None = None
    size: str | None = None  # WIDTHxHEIGHT, or auto
    quality: str | None = None
    background: str | None = None
    moderation: str | None = None
    complexity: str | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: int | None = None
    response_format: Literal["url", "b64_json"] | None = None
    style: str | None = None
    stream: bool | None = None
    partial_images: int | None = None
    user: str | None = None
    safety_identifier: str | None = None

    @property
    def number(self) -> int:
        """How many pictures are asked for."""
        return self.n or 1


class Image(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One picture: in base64, or where it lies."""

    b64_json: str | None = None
    url: str | None = None
    revised_prompt: str | None = None


class ImageReply(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The pictures, and what the upstream says of them."""

    images: tuple[Image, ...]
    size: str | None = None
    quality: str | None = None
    background: str | None = None
    output_format: str | None = None
