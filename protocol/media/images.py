# Pictures made of words, or of words and pictures, in OpenAI's shapes; and what a picture's first bytes tell of it.

from __future__ import annotations

import base64
import binascii
import re
from typing import Literal

import msgspec
from msgspec import Raw, Struct

MOST_IMAGES = 10  # of one request,
MOST_EDITED = 16  # and that it may bring
MOST_HEADER = 256 * 1024  # bytes of a picture that are searched for its size: thumbnails and profiles come before it
MOST_PARTIAL = 3  # before the whole one, in a stream
PNG = b"\x89PNG\r\n\x1a\n"
MOST_SEGMENTS = 32  # of a JPEG that are looked at: cameras write a dozen before the frame
_SEGMENT = re.compile(rb"\xff++[^\xff]")  # its marker, after any number of fill bytes


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


class PictureFile(Struct, frozen=True, omit_defaults=True):
    """What is known of a picture that came along, whose bytes go beside the request, as a recording's do; or where one
    lies that did not."""

    name: str = ""
    media_type: str = ""  # as its first bytes have it
    size: int = 0  # bytes
    sha256: str = ""  # of the bytes
    pixels: tuple[int, int] | None = None  # width and height, where it tells them
    url: str = ""


class ImageEditRequest(ImageRequest, frozen=True, omit_defaults=True, kw_only=True):
    """The same, made of pictures. The mask's transparent parts say where the first of them may change, what is drawn on
    the markup how."""

    image: tuple[PictureFile, ...]
    mask: PictureFile | None = None
    markup: PictureFile | None = None
    input_fidelity: Literal["high", "low"] | None = None

    @property
    def files(self) -> tuple[PictureFile, ...]:
        """All pictures, in the order of their bytes."""
        return (*self.image, *filter(None, (self.mask, self.markup)))


class PictureRef(Struct, frozen=True):
    """A picture of a request in JSON: its data URL, or the address where it lies."""

    image_url: str | None = None
    file_id: str | None = None


class ImageEditBody(ImageRequest, frozen=True, kw_only=True):
    """The same in JSON, as OpenAI has it beside the form."""

    images: tuple[PictureRef, ...]
    mask: PictureRef | None = None
    markup: PictureRef | None = None
    input_fidelity: Literal["high", "low"] | None = None


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

    def streamed(self, image: Image) -> StreamedPicture:
        """Return one of the pictures as a stream has it."""
        data = Raw(msgspec.json.encode(image.b64_json)) if image.b64_json else Raw()
        told = (self.size, self.quality, self.background, self.output_format)
        return StreamedPicture(data, image.url, None, *told)


class StreamedPicture(Struct, frozen=True):
    """A picture in a stream: one that is not whole yet, by its number among those, or the whole one."""

    b64_json: Raw = Raw()
    url: str | None = None
    partial_image_index: int | None = None
    size: str | None = None
    quality: str | None = None
    background: str | None = None
    output_format: str | None = None


def size_of(url: str) -> tuple[int, int] | None:
    """Return width and height of the PNG, JPEG, GIF or WebP in a ``data:`` URL; ``None`` for whatever else."""
    head, found, data = url[:128].partition(";base64,")
    if not found or not head.startswith("data:image/"):
        return None
    begin = len(head) + len(found)
    for most in (4 * 64, 4 * MOST_HEADER // 3):  # a JPEG alone may have its size far behind
        try:
            data = url[begin : begin + most]
            start = base64.b64decode(data[: len(data) // 4 * 4])
        except (binascii.Error, ValueError):
            return None
        if (size := size_in(start)) is not None:
            return size if min(size) > 0 else None
        if start[:2] != b"\xff\xd8":
            return None
    return None


def media_type_in(start: bytes | bytearray) -> str | None:
    """Return the type of the PNG, JPEG or WebP that begins so."""
    if start[:8] == PNG:
        return "image/png"
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "image/webp"
    return "image/jpeg" if start[:3] == b"\xff\xd8\xff" else None


def size_in(start: bytes) -> tuple[int, int] | None:
    """Return the size that the beginning of a picture tells."""
    if start[:8] == PNG and start[12:16] == b"IHDR":
        return int.from_bytes(start[16:20]), int.from_bytes(start[20:24])
    if start[:6] in (b"GIF87a", b"GIF89a"):
        return int.from_bytes(start[6:8], "little"), int.from_bytes(start[8:10], "little")
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return _webp_size(start[12:])
    return _jpeg_size(start) if start[:2] == b"\xff\xd8" else None


def _webp_size(chunk: bytes) -> tuple[int, int] | None:
    match chunk[:4]:
        case b"VP8X":
            return 1 + int.from_bytes(chunk[12:15], "little"), 1 + int.from_bytes(chunk[15:18], "little")
        case b"VP8L":
            bits = int.from_bytes(chunk[9:13], "little")
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case b"VP8 ":
            return int.from_bytes(chunk[14:16], "little") & 0x3FFF, int.from_bytes(chunk[16:18], "little") & 0x3FFF
    return None


def _jpeg_size(start: bytes) -> tuple[int, int] | None:
    place = 2
    for _ in range(MOST_SEGMENTS):
        if (found := _SEGMENT.match(start, place)) is None:
            return None
        marker, place = start[found.end() - 1], found.end()
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # a frame begins
            height, width = start[place + 3 : place + 5], start[place + 5 : place + 7]
            return (int.from_bytes(width), int.from_bytes(height)) if len(width) == 2 else None
        place += max(2, int.from_bytes(start[place : place + 2]))
    return None
