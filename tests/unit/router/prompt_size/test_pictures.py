"""Pictures in tokens: each maker's formula at the picture's size, and the formula's most where that is not known."""

from __future__ import annotations

import base64
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_backend.models.config.vision import VisionConfig, vision_config
from protocol.chat import ImageUrl
from protocol.media.images import MOST_SEGMENTS, size_of
from router.prompt_size.pictures import DEAREST, Picture, picture_of, picture_tokens_most

MODELS = (
    *(
        "gpt-4o",
        "gpt-4o-mini",
        "gpt-4.1",
        "gpt-4.1-mini",
        "gpt-4.1-nano",
        "gpt-5",
        "gpt-5-mini",
        "gpt-5.2",
        "o3",
        "o4-mini",
    ),
    *(
        "claude-sonnet-4-5",
        "claude-3-5-sonnet-20241022",
        "claude-opus-4-7",
        "gemini-2.5-pro",
        "qwen2.5-vl-72b",
        "my-model",
    ),
)


def tower(architecture: str, patch_size: int, image_size: int) -> VisionConfig:
    """Return what the engine knows of a model that reads pictures."""
    sizes = {"model_type": "pixtral", "patch_size": patch_size, "image_size": image_size}
    found = vision_config({"architectures": [architecture], "text_config": {}, "vision_config": sizes})
    assert found is not None
    return found


def qwen() -> VisionConfig:
    """Return what the engine knows of a Qwen2.5-VL, as its files say it."""
    processor = {"min_pixels": 3136, "max_pixels": 12_845_056}
    config = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {"hidden_size": 1280}}
    found = vision_config(config, processor)
    assert found is not None
    return found


OWN = {
    "pixtral-12b": tower("LlavaForConditionalGeneration", 16, 1024),
    "mistral-small-3.2-24b-instruct": tower("Mistral3ForConditionalGeneration", 14, 1540),
    "qwen2.5-vl-72b": qwen(),
    "any-name": tower("Mistral3ForConditionalGeneration", 14, 1540),
}


def test_a_gemma_takes_no_more_than_its_engine_says() -> None:
    """With the tokens around it, and those of a server that adds crops."""
    gemma = vision_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {},
            "vision_config": {"image_size": 896, "patch_size": 14},
        }
    )
    assert gemma is not None
    rows, columns = gemma.grid(1, 1)

    assert 5 * (rows * columns + 4) <= picture_tokens_most("google/gemma-3-27b-it", Picture(None, is_low=False)) < 2_000


def jpeg(width: int, height: int, before: int = 0) -> bytes:
    """Return the beginning of a JPEG with so many bytes of profiles before its frame."""
    profiles = b"".join(b"\xff\xe2" + struct.pack(">H", 60_002) + bytes(60_000) for _ in range(before // 60_000))
    frame = b"\xff\xc2\x00\x11\x08" + struct.pack(">HH", height, width)
    return b"\xff\xd8" + profiles + b"\xff\xc4\x00\x04\x00\x00" + frame + bytes(9)


def webp(kind: bytes, data: bytes) -> bytes:
    """Return the beginning of a WebP with one chunk."""
    return b"RIFF\x00\x00\x00\x00WEBP" + kind + b"\x00\x00\x00\x00" + data + bytes(4)


PICTURES = {
    "png": b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + struct.pack(">II", 640, 480) + bytes(5),
    "gif": b"GIF89a" + struct.pack("<HH", 640, 480) + bytes(3),
    "jpeg": jpeg(640, 480),
    "jpeg with profiles": jpeg(640, 480, before=180_000),
    "webp": webp(b"VP8 ", b"\x00\x00\x00\x9d\x01\x2a" + struct.pack("<HH", 640, 480)),
    "webp, lossless": webp(b"VP8L", b"\x2f" + struct.pack("<I", 639 | 479 << 14)),
    "webp, extended": webp(b"VP8X", bytes(4) + b"\x7f\x02\x00\xdf\x01\x00"),
}


def url_of(data: bytes) -> str:
    return "data:image/any;base64," + base64.b64encode(data + bytes(300)).decode()


@pytest.mark.parametrize("kind", PICTURES)
def test_a_header_tells_the_size(kind: str) -> None:
    """Of every kind of picture that providers take, however much comes before it."""
    assert size_of(url_of(PICTURES[kind])) == (640, 480)


@pytest.mark.parametrize(
    "url",
    [
        *(
            "https://pictures.example/1.png",
            "data:image/png;base64,",
            "data:image/png;base64,!!!!",
            "data:text/plain,hi",
        ),
        *(url_of(b"BM" + bytes(60)), url_of(PICTURES["png"][:14]), url_of(jpeg(640, 480, before=480_000))),
        url_of(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(20)),
    ],
)
def test_what_tells_no_size_is_of_any(url: str) -> None:
    """An address elsewhere, no base64, another kind, no size, or a frame that begins too far behind."""
    assert picture_of(ImageUrl(url)).size is None
    assert picture_tokens_most("gpt-4o", picture_of(ImageUrl(url))) == 85 + 8 * 170


def test_no_search_for_a_frame_is_longer_than_a_camera_needs() -> None:
    """Each byte of a body could make work: fill bytes are passed over at once, endless segments are not followed."""
    fill, segment = b"\xff" * 150_000, b"\xff\xe1\x00\x02"
    frame = jpeg(640, 480)[2:]

    assert size_of(url_of(b"\xff\xd8" + fill + frame)) == (640, 480)
    assert size_of(url_of(b"\xff\xd8" + segment * (MOST_SEGMENTS - 2) + frame)) == (640, 480)
    assert size_of(url_of(b"\xff\xd8" + segment * 1000 + frame)) is None


@given(st.binary(max_size=200), st.sampled_from(sorted(PICTURES)), st.integers(0, 60))
def test_no_bytes_break_the_search(noise: bytes, kind: str, cut: int) -> None:
    """A picture that is none has no size, or one that its first bytes tell."""
    for data in (noise, PICTURES[kind][:cut] + noise):
        size = size_of(url_of(data))
        assert size is None or min(size) > 0


@pytest.mark.parametrize(
    ("name", "size", "tokens"),
    [
        ("gpt-4o", (1024, 1024), 765),  # examples of OpenAI's page
        ("gpt-4o", (2048, 4096), 1105),
        ("gpt-4o-2024-11-20", (512, 512), 255),
        ("openai/gpt-4o-mini", (1024, 1024), 2833 + 4 * 5667),
        ("gpt-5", (1024, 1024), 70 + 4 * 140),
        ("gpt-4.1-mini", (1024, 1024), 1659),  # 1024 × 1.62
        ("gpt-4.1-mini", (4000, 1474), 2489),  # as it is billed: 1536 × 1.62
        ("o4-mini", (1800, 2400), 2642),
        ("claude-sonnet-4-5", (8000, 8000), 1_640),
        ("claude-opus-4-7", (8000, 8000), 4_784),
        ("pixtral-12b-2409", (1024, 1024), 64 * 65),
        ("mistral-small-3.1-24b-instruct", (3080, 1540), 64 * 33),  # a Pixtral's, on its side
        ("ministral-3-14b", (28, 28), 2 * 3),
        ("my-deployment", (1024, 1024), 2833 + 4 * 5667),
        ("gpt-image-1.5", (1024, 1024), 65 + 6_240 + 4 * 129),  # billed 65 + 129, or + 4,160
        ("gpt-image-2", (1024, 1024), 2833 + 4 * 5667),
    ],
)
def test_each_maker_has_its_formula(name: str, size: tuple[int, int], tokens: int) -> None:
    """By the name of the model, wherever it is served; of a name that tells none, the dearest."""
    assert picture_tokens_most(name, Picture(size, False)) == tokens


@given(st.sampled_from(sorted(OWN)), st.integers(1, 20_000), st.integers(1, 20_000), st.booleans())
def test_what_our_engine_takes_is_held(name: str, width: int, height: int, is_turned: bool) -> None:
    """By rows of its tokens and what stands after each, also of a picture that its camera says lies on its side."""
    vision = OWN[name]
    rows, columns = vision.grid(*((height, width) if is_turned else (width, height)))

    assert rows * (columns + bool(vision.tokens.line)) <= picture_tokens_most(name, Picture((width, height), False))


@pytest.mark.parametrize(("width", "height", "billed"), [(200, 200, 64), (1000, 1000, 1334), (1092, 1092, 1590)])
def test_claude_counts_pixels(width: int, height: int, billed: int) -> None:
    """Examples of Anthropic's page, whichever of its two formulas is the newer."""
    assert billed <= picture_tokens_most("claude-sonnet-4-5", Picture((width, height), False)) < 1.1 * billed + 1


@given(st.sampled_from(MODELS), st.integers(1, 20_000), st.integers(1, 20_000), st.booleans())
def test_no_size_exceeds_what_is_held_without_one(name: str, width: int, height: int, is_low: bool) -> None:
    """And no model exceeds the dearest of all."""
    most = picture_tokens_most(name, Picture(None, is_low))

    assert 0 < picture_tokens_most(name, Picture((width, height), is_low)) <= most <= DEAREST
