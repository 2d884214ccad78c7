# How many tokens a picture takes of a prompt, by the formula of the model's maker.
# Formulas: OpenAI, "Images and vision"; Anthropic, "Vision" and "PDF support"; Google, "Image understanding"; Qwen2-VL
# and its kin; Pixtral, which Mistral's models that see have been since; Gemma 3.

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import lru_cache

from msgspec import Struct

from protocol.chat import ChatRequest, FilePart, ImagePart, ImageUrl, PdfFile
from protocol.media.images import PictureFile, size_of
from router.prompt_size.pdf_pages import MOST_PAGES, pages_most

# The dearest of all: gpt-4o-mini, 2833 + 8 tiles of 5667. It holds where neither model nor size is known.
DEAREST = 2833 + 8 * 5667
LOW_DETAIL_DEAREST = 16_384  # detail is only some providers' word; others go by the size: Qwen2-VL and its kin
PAGE_TEXT_TOKENS = 3_500  # of one page of a PDF: 1,500 to 3,000 (Anthropic, "PDF support"), and marks for citations


class Picture(Struct, frozen=True):
    """A picture of a prompt: width and height where they are known, and whether little is asked for; or a PDF."""

    size: tuple[int, int] | None
    is_low: bool
    pages: int = 0  # of a PDF, each of which is a picture and a text


Formula = Callable[[Picture], int]


def images_of(request: ChatRequest) -> Iterator[ImageUrl | PdfFile]:
    """Yield every image and every PDF in a request."""
    for message in request.messages:
        if isinstance(message.content, tuple):
            for part in message.content:
                if isinstance(part, ImagePart):
                    yield part.image_url
                elif isinstance(part, FilePart):
                    yield part.file


def picture_of(image: ImageUrl | PdfFile | PictureFile) -> Picture:
    """Return what counts of an image, or of a PDF."""
    if isinstance(image, PictureFile):
        return Picture(image.pixels, is_low=False)
    if isinstance(image, PdfFile):
        head, found, data = image.url.partition(";base64,")
        return Picture(None, is_low=False, pages=pages_most(data) if found and head.startswith("data:") else MOST_PAGES)
    return Picture(size_of(image.url), image.detail == "low")


def picture_tokens_most(model: str, picture: Picture) -> int:
    """Return the tokens that a picture never exceeds on a model, by the name that its upstream has for it."""
    if picture.pages:
        return picture.pages * (PAGE_TEXT_TOKENS + _formula_of(model)(Picture(None, is_low=False, pages=1)))
    return _formula_of(model)(picture)


def _tiles(base: int, tile: int) -> Formula:
    """OpenAI's tiles: fitted into 2048 × 2048, the shorter side to 768, each 512 × 512 of it a tile."""

    def tokens(picture: Picture) -> int:
        if picture.is_low:
            return base
        if picture.size is None:
            return base + 8 * tile
        width, height = picture.size
        scale = min(1.0, 2048 / max(width, height), 768 / min(width, height))
        return base + min(8, math.ceil(_scaled(width, scale) / 512) * math.ceil(_scaled(height, scale) / 512)) * tile

    return tokens


def _patches(side: int, most: int, factor: float = 1.0, least: int = 1) -> Formula:
    """Squares of ``side`` pixels, ``most`` of them at the most, of ``factor`` tokens."""

    def tokens(picture: Picture) -> int:
        patches = most
        if picture.size is not None:
            width, height = picture.size
            patches = min(most, max(least, math.ceil(width / side) * math.ceil(height / side)))
        return math.ceil(patches * factor)

    return tokens


def _crops(picture: Picture) -> int:
    """Gemini 2's crops of 258 tokens; Gemini 3 takes 1,120, or 2,240 at its highest resolution. A page is one crop."""
    if picture.pages:
        return 2_240
    if picture.size is None:
        return DEAREST
    width, height = picture.size
    crop = max(256, min(768, int(min(width, height) / 1.5)))
    return min(DEAREST, max(2_240, 258 * math.ceil(width / crop) * math.ceil(height / crop)))


def _dearest(*formulas: Formula) -> Formula:
    return lambda picture: max(formula(picture) for formula in formulas)


def _scaled(side: int, scale: float) -> int:
    return math.ceil(side * scale - 1e-6)


def _lines(picture: Picture) -> int:
    """Pixtral's and Mistral's: lines of 16 × 16 up to 1024 pixels a side, or 28 × 28 up to 1540, with a token after
    each; a camera's picture may lie on its side."""
    if picture.size is None:
        return 64 * 65
    long, short = max(picture.size), min(picture.size)
    sizes = [
        (_fitted(long, long, most, side), _fitted(short, long, most, side)) for side, most in ((16, 1024), (28, 1540))
    ]
    return max(lines * (across + 1) for across, lines in [*sizes, *(pair[::-1] for pair in sizes)])


def _fitted(pixels: int, longest: int, most: int, side: int) -> int:
    return math.ceil(min(most, max(1, pixels * min(1.0, most / longest))) / side)


def _soft_tokens(_: Picture) -> int:
    """Gemma 3's 256 and the marks and line breaks around them, of the whole and of four crops where a server makes
    some."""
    return 5 * (256 + 4) + 32


_QWEN = _patches(28, 16_384, least=256)
_CLAUDE = _patches(27, 4_784)  # one token for each 28 × 28, or width × height / 750: 27.4 × 27.4
_MINI = _tiles(2833, 5667)

# By how a model's name begins; the first that fits counts.
_FORMULAS: tuple[tuple[str, Formula], ...] = (
    (r"gpt-image-1", _tiles(65 + 6_240, 129)),  # as of high fidelity, and of no less than its own tiles
    (r"gpt-4o-mini", _MINI),
    (r"gpt-4\.1-mini|gpt-5-mini", _patches(32, 1_536, 1.62)),
    (r"gpt-4\.1-nano|gpt-5-nano", _patches(32, 1_536, 2.46)),
    (r"o4-mini", _patches(32, 1_536, 1.72)),
    (r"gpt-4\.1", _dearest(_tiles(85, 170), _patches(32, 1_536))),
    (r"(chatgpt-4o|gpt-4o|gpt-4\.5|gpt-4-turbo)", _tiles(85, 170)),
    (r"gpt-5(?!\.)", _tiles(70, 140)),
    (r"gpt-5\.", _dearest(_tiles(85, 170), _patches(32, 10_000, 1.2))),
    (r"o[13](?!-mini)", _tiles(75, 150)),
    (r"claude-(3|(opus|sonnet)-4(-[0156])?($|-2|@)|haiku-4)", _patches(27, 1_640)),
    (r"claude-", _CLAUDE),
    (r"gemini-", _crops),
    (r"qwen", _QWEN),
    (r"gemma-?3(?!n)", _soft_tokens),
    (r"(pixtral|[dm]\w*stral)", _lines),
)


def _unknown(picture: Picture) -> int:
    """Return the most of any formula; of one in little detail the most of those that know no such word."""
    if picture.is_low:
        return LOW_DETAIL_DEAREST if picture.size is None else max(_MINI(picture), _QWEN(picture), _CLAUDE(picture))
    return DEAREST if picture.size is None else max(formula(picture) for _, formula in _FORMULAS)


@lru_cache(1_000)
def _formula_of(model: str) -> Formula:
    name = model.rpartition("/")[2].lower()
    return next((formula for begins, formula in _FORMULAS if re.match(begins, name)), _unknown)
