# Pictures as clients send them, in data URLs: checked, decoded beside the event loop, made as large as the model's
# tower reads them, and put in their places in the prompt. Pillow decodes them, an extra, and is not imported before.

from __future__ import annotations

import asyncio
import base64
import binascii
import importlib.util
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from io import BytesIO
from typing import TYPE_CHECKING

from gpu_backend.models.config.vision import VisionConfig
from gpu_backend.server.checkpoint.sight import Sight
from gpu_backend.server.client.errors import ContextLengthExceeded
from gpu_backend.step.config import PicturesConfig
from gpu_backend.step.picture import Picture
from protocol.chat import ImagePart, Message
from protocol.errors import BadRequest, UnsupportedParameter, invalid_param
from protocol.media.images import size_of

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
SEND = "Send a PNG, JPEG, WebP or GIF as a data URL (data:image/png;base64,…)."
WHITE = (255, 255, 255, 255)
MOST_SIDE = 2**16 - 1  # pixels, as most formats have it: decoders take seconds for a million lines of a pixel each
MOST_SCANS = 64  # of a JPEG: each of a few bytes may go over the whole picture; encoders write a dozen
_MARKER = re.compile(rb"\xff([\x02-\xcf\xd9-\xfe])")  # with a length, or the end; decoders skip the others

# Each takes the memory of a picture of the largest size, several times over.
_decoding = ThreadPoolExecutor(2, "pictures")


@dataclass(frozen=True, slots=True)
class Pixels:
    """A picture as the model's tower reads it."""

    width: int
    height: int
    data: bytes = field(repr=False)  # rows of RGB


@cache
def can_decode() -> bool:
    """Whether Pillow is installed."""
    return importlib.util.find_spec("PIL") is not None


def find_pictures(messages: Sequence[Message], limits: PicturesConfig) -> tuple[tuple[str, str], ...]:
    """Return where each picture of a conversation is, and its URL. Raises ``BadRequest`` for too many, or too large."""
    found = [
        (f"messages[{i}].content[{j}]", part.image_url.url)
        for i, message in enumerate(messages)
        if isinstance(message.content, tuple)
        for j, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]
    if not found:
        return ()
    if not limits.max_images:
        words = "This engine takes no images (--max-images 0). Leave the image out."
        raise UnsupportedParameter(words, param=found[0][0])
    if not can_decode():
        words = "This engine cannot read images: Pillow is not installed beside it (pip install 'tollgate[vision]')."
        raise UnsupportedParameter(words, param=found[0][0])
    if len(found) > limits.max_images:
        where = found[limits.max_images][0]
        raise invalid_param(where, f"A request has at most {limits.max_images} images here; this one has {len(found)}.")
    for where, url in found:
        _check(where, url, limits)
    return tuple(found)


async def read_pictures(
    found: Sequence[tuple[str, str]], vision: VisionConfig, limits: PicturesConfig
) -> tuple[Pixels, ...]:
    """Return the pixels of pictures by their URLs. Raises ``BadRequest`` for the first that cannot be read."""
    loop = asyncio.get_running_loop()
    reading = [loop.run_in_executor(_decoding, _read, where, url, vision, limits) for where, url in found]
    read: list[Pixels] = []
    for each in await asyncio.gather(*reading, return_exceptions=True):
        if isinstance(each, BaseException):
            raise each
        read.append(each)
    return tuple(read)


def place_pictures(
    tokens: Sequence[int], pictures: Sequence[Pixels], sight: Sight, tenant: str, most: int
) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
    """Return a prompt of at most ``most`` tokens with those of its pictures, and where these are.

    Raises ``BadRequest`` where the chat template has left one out, or the prompt is too long.
    """
    places = [place for place, token in enumerate(tokens) if token == sight.written]
    if len(places) != len(pictures):
        written = f"writes {len(places)} of the {len(pictures)} images of these messages"
        raise invalid_param("messages", f"The model's chat template {written}. Put images into turns of the user.")
    placed, prompt, done = list[Picture](), list[int](), 0
    for one, place in zip(pictures, places, strict=True):
        sight.extend(prompt, tokens[done:place])
        sight.extend(prompt, sight.before)
        own = sight.rows_of(one.width, one.height)
        digest = blake2b(f"{len(tenant)} {tenant} {one.width} ".encode(), digest_size=16)
        digest.update(one.data)
        placed.append(
            Picture(
                start=len(prompt),
                num_tokens=len(own),
                token_id=sight.image,
                digest=digest.digest(),
                width=one.width,
                height=one.height,
                pixels=one.data,
                tower_tokens=sight.tower_tokens(one.width, one.height),
                columns=sight.vision.grid(one.width, one.height)[1] if sight.vision.has_axes else 0,
                moved=placed[-1].moves if placed else 0,
                both_ways=sight.vision.both_ways,
            )
        )
        prompt += own
        sight.extend(prompt, sight.after)
        done = place + 1
    sight.extend(prompt, tokens[done:])
    if len(prompt) > most:
        raise ContextLengthExceeded(most + 1, len(prompt), "messages")
    return tuple(prompt), tuple(placed)


def _check(where: str, url: str, limits: PicturesConfig) -> None:
    """Refuse what is no picture that comes along, or one that is too large: nothing of it is decoded."""
    head, is_base64, data = url.partition(";base64,")
    if not is_base64 or not head[:11].lower() == "data:image/":
        raise UnsupportedParameter(f"This engine fetches no images. {SEND}", param=where)
    if len(data) * 3 // 4 > limits.max_image_bytes:
        raise invalid_param(where, f"An image has at most {limits.max_image_bytes:,} bytes here.")
    if (size := size_of(url)) is not None:
        _check_size(where, *size, limits)


def _check_size(where: str, width: int, height: int, limits: PicturesConfig) -> None:
    if width * height > limits.max_image_pixels:
        most = f"at most {limits.max_image_pixels:,} pixels"
        raise invalid_param(where, f"The image has {width} × {height} pixels; one has {most} here. Make it smaller.")
    if max(width, height) > MOST_SIDE:
        words = f"The image has {width} × {height} pixels; a side has at most {MOST_SIDE:,} here. Make it smaller."
        raise invalid_param(where, words)


def _read(where: str, url: str, vision: VisionConfig, limits: PicturesConfig) -> Pixels:
    from PIL import Image, ImageOps

    def unreadable(why: object) -> BadRequest:
        return invalid_param(where, f"The image cannot be read ({why}). {SEND}")

    try:
        data = base64.b64decode(url.partition(";base64,")[2])
        image: Image.Image = Image.open(BytesIO(data), formats=FORMATS)
    except binascii.Error as exc:
        raise unreadable(exc) from exc
    except Exception as exc:  # decoders raise whatever they come upon
        raise unreadable(type(exc).__name__) from exc
    width, height = image.size
    _check_size(where, width, height, limits)  # again, as the decoder finds it: nothing is decoded yet
    if data.startswith(b"\xff\xd8") and _has_many_scans(data):
        raise invalid_param(where, f"The image has more than {MOST_SCANS} scans. Save it again as a usual JPEG.")
    try:
        image = _of_colours(ImageOps.exif_transpose(image))
    except Exception as exc:
        raise unreadable(type(exc).__name__) from exc
    rows, columns = vision.grid(*image.size)
    width, height = columns * vision.token_side, rows * vision.token_side
    how = Image.Resampling[vision.resampling]
    return Pixels(width, height, image.resize((width, height), how).tobytes())


def _has_many_scans(jpeg: bytes) -> bool:
    """Whether a JPEG has more scans than is usual; what lies behind its end is not looked at."""
    place, scans = 2, 0
    while scans <= MOST_SCANS and (found := _MARKER.search(jpeg, place)) is not None and found[1] != b"\xd9":
        scans += found[1] == b"\xda"
        place = found.end() + int.from_bytes(jpeg[found.end() : found.end() + 2])
    return scans > MOST_SCANS


def _of_colours(image: Image) -> Image:
    """Return the picture in RGB, on white where it is transparent."""
    if image.mode.startswith("I"):  # grey in 16 bits, which ``convert`` cuts off at 255
        image = image.convert("I").point(lambda grey: grey * (1 / 256)).convert("L")
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    from PIL import Image as images

    image = image.convert("RGBA")
    return images.alpha_composite(images.new("RGBA", image.size, WHITE), image).convert("RGB")
