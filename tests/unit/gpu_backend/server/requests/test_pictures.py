# Pictures over HTTP: what the engine is asked of them, and what is refused before anything is decoded.

from __future__ import annotations

import struct
import threading
import zlib
from base64 import b64encode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import convert
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gpu_backend.models.config.vision import vision_config
from gpu_backend.server.checkpoint.sight import sight_of
from gpu_backend.server.checkpoint.tokens import TextCodec
from gpu_backend.server.requests import pictures
from gpu_backend.server.requests.pictures import Pixels, place_pictures
from gpu_backend.step.config import PicturesConfig
from gpu_backend.step.messages import Generate
from protocol.chat import Message
from protocol.errors import BadRequest
from tests.support.fake_engine import FakeEngine, speaking
from tests.support.front import (
    ALPHABET,
    CHAT,
    END,
    IMAGE,
    IMAGE_END,
    LINE,
    SEEING_TEMPLATE,
    VISION,
    running_front,
    token_ids,
    write_small_files,
)
from tests.support.tiny_vision import TinyGemma

images = pytest.importorskip("PIL.Image")
LIMITS = {"max_images": 3, "max_image_pixels": 10_000, "max_image_bytes": 50_000}


def url_of(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{b64encode(data).decode()}"


def picture(width: int, height: int, kind: str = "PNG", colour: str = "red", **more: Any) -> str:
    written = BytesIO()
    images.new("RGB", (width, height), colour).save(written, kind, **more)
    return url_of(written.getvalue(), kind.lower())


def bomb(width: int, height: int) -> str:
    """Return a PNG of few bytes that says it has so many pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return url_of(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)))


def many_scans(number: int) -> str:
    """Return a JPEG whose last scan, of a few bytes, comes so many more times."""
    written = BytesIO()
    images.new("L", (32, 32), 128).save(written, "JPEG", progressive=True)
    data = written.getvalue()
    return url_of(data[:-2] + data[data.rindex(b"\xff\xda") : -2] * number + data[-2:], "jpeg")


def said(*urls: str, role: str = "user") -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return CHAT | {"messages": [{"role": role, "content": [{"type": "text", "text": "See"}, *parts]}]}


@pytest.fixture(scope="module")
def seeing_engine() -> FakeEngine:
    return FakeEngine(speaking([*token_ids("red"), END]), max_model_len=100)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, seeing_engine: FakeEngine) -> Iterator[httpx.Client]:
    folder = write_small_files(tmp_path_factory.mktemp("sees"), SEEING_TEMPLATE, VISION)
    with running_front(folder, seeing_engine, **LIMITS) as url, httpx.Client(base_url=url, timeout=10) as client:
        yield client


def asked(seeing: httpx.Client, engine: FakeEngine, body: dict[str, Any], **headers: str) -> Generate:
    """Ask, and return what the engine heard."""
    engine.process.commands.clear()
    answer = seeing.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    (command,) = [each for each in engine.process.commands if isinstance(each, Generate)]
    assert answer.json()["usage"]["prompt_tokens"] == len(command.prompt_token_ids)
    return command


def test_picture_is_lines_of_tokens_where_it_stands(seeing: httpx.Client, seeing_engine: FakeEngine) -> None:
    """Words, then two lines of three tokens of 8 × 8 pixels, then the next picture, each with its pixels."""
    command = asked(seeing, seeing_engine, said(picture(20, 12), picture(8, 8, colour="blue")))

    row = [IMAGE] * 3
    first, second = command.pictures
    words = token_ids("<user>See")
    assert command.prompt_token_ids == (
        *words, *row, LINE, *row, IMAGE_END, IMAGE, IMAGE_END, *token_ids("<assistant>")
    )  # fmt: skip
    assert (first.start, first.num_tokens, first.width, first.height) == (len(words), 7, 24, 16)
    assert (second.start, second.num_tokens, second.width, second.height) == (len(words) + 8, 1, 8, 8)
    assert first.pixels == bytes((255, 0, 0)) * 24 * 16
    assert second.pixels == bytes((0, 0, 255)) * 8 * 8
    assert first.token_id == second.token_id == IMAGE


def test_tokens_around_a_gemmas_picture_are_those_of_the_whole_text() -> None:
    """As transformers encodes it with the picture's tokens written out: line breaks that meet are one token."""
    letters = dict(ALPHABET) | {"ĊĊ": 256, "ĊĊĊ": 257, "ĊĊĊĊ": 258}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("ĊĊ", "ĊĊ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in marks])
    vision = vision_config(TinyGemma().config())
    assert vision is not None
    codec, around = TextCodec(tokenizer), vision.tokens
    sight = sight_of(vision, codec, 1)
    text = "user\n<start_of_image><start_of_image>\nSee <start_of_image>it"
    written = f"{around.before}{around.image * 9}{around.after}"

    prompt, placed = place_pictures(
        codec.encode(text, 99, add_special_tokens=False), [Pixels(12, 12, b"")] * 3, sight, "", 99
    )

    assert list(prompt) == tokenizer.encode(text.replace(marks[0], written)).ids
    assert [prompt[each.start : each.end] for each in placed] == [(sight.image,) * 9] * 3
    assert all(each.both_ways and prompt[each.start - 1] == sight.written for each in placed)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF"])
def test_every_format_is_read(kind: str, seeing: httpx.Client, seeing_engine: FakeEngine) -> None:
    """One larger than the tower reads is made smaller, as it lies."""
    (found,) = asked(seeing, seeing_engine, said(picture(90, 45, kind))).pictures

    assert (found.width, found.height) == (64, 32)


def test_scans_of_a_usual_number_are_read(seeing: httpx.Client, seeing_engine: FakeEngine) -> None:
    """Also where more seem to follow the picture's end, as films do in a telephone's pictures."""
    url = many_scans(20)
    (found,) = asked(seeing, seeing_engine, said(url + b64encode(b"\xff\xda\0\2" * 99).decode())).pictures

    assert found.pixels == asked(seeing, seeing_engine, said(many_scans(0))).pictures[0].pixels


def test_grey_of_16_bits_keeps_its_shades(seeing: httpx.Client, seeing_engine: FakeEngine) -> None:
    """A dark one is not cut off to white."""
    written = BytesIO()
    images.new("I;16", (8, 8), 0x4000).save(written, "PNG")
    (found,) = asked(seeing, seeing_engine, said(url_of(written.getvalue()))).pictures

    assert set(found.pixels) == {0x40}


def test_camera_on_its_side_is_turned(seeing: httpx.Client, seeing_engine: FakeEngine) -> None:
    """As its EXIF says, by which everything else shows it."""
    exif = images.Exif()
    exif[0x0112] = 6  # turn it by a quarter
    (found,) = asked(seeing, seeing_engine, said(picture(32, 16, "JPEG", exif=exif))).pictures

    assert (found.width, found.height) == (16, 32)


def test_digest_names_pixels_and_whose_they_are(seeing: httpx.Client, seeing_engine: FakeEngine) -> None:
    """The same pixels have one name, whatever they were written in, for one tenant."""

    def digest(url: str, tenant: str) -> bytes:
        return asked(seeing, seeing_engine, said(url), **{"x-tenant": tenant}).pictures[0].digest

    red = digest(picture(16, 16), "a")
    assert digest(picture(16, 16, "WEBP", lossless=True), "a") == red
    assert red not in (digest(picture(16, 16, colour="blue"), "a"), digest(picture(16, 16), "b"))


def test_what_would_be_asked_is_shown(seeing: httpx.Client) -> None:
    """Counted conversations have the tokens of their pictures, too; the list of models says that they are read."""
    body = said(picture(16, 8))
    rendered = seeing.post("/v1/chat/completions/render", json=body).json()["token_ids"]
    counted = seeing.post("/tokenize", json={"messages": body["messages"]}).json()

    assert rendered.count(IMAGE) == 2
    assert counted["tokens"] == rendered
    assert seeing.get("/v1/models").json()["data"][0]["input_modalities"] == ["text", "image"]


@pytest.mark.parametrize(
    ("urls", "code", "words"),
    [
        (["https://example.com/cat.png"], "unsupported_parameter", "fetches no images"),
        (["data:text/plain;base64,aGk="], "unsupported_parameter", "fetches no images"),
        (["data:image/png,red"], "unsupported_parameter", "fetches no images"),
        ([url_of(b"no picture")], "invalid_value", "cannot be read"),
        (["data:image/png;base64,a"], "invalid_value", "cannot be read"),
        ([url_of(b"BM" + bytes(100))], "invalid_value", "cannot be read"),
        ([bomb(101, 100)], "invalid_value", "101 × 100 pixels; one has at most 10,000"),
        ([bomb(2**31 - 1, 2**31 - 1)], "invalid_value", "at most 10,000 pixels"),
        ([bomb(50, 50)], "invalid_value", "cannot be read"),
        ([url_of(bytes(60_000))], "invalid_value", "at most 50,000 bytes"),
        ([picture(101, 100, "JPEG")], "invalid_value", "101 × 100 pixels"),
        ([many_scans(60)], "invalid_value", "more than 64 scans"),
        ([picture(8, 8)] * 4, "invalid_value", "at most 3 images here; this one has 4"),
    ],
    ids=range(13),
)  # fmt: skip
def test_what_is_no_picture_for_this_engine_is_refused(
    urls: list[str], code: str, words: str, seeing: httpx.Client, seeing_engine: FakeEngine
) -> None:
    """The error names the part and says what to send; the engine hears nothing."""
    seeing_engine.process.commands.clear()
    answer = seeing.post("/v1/chat/completions", json=said(*urls))

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code)
    assert words in error["message"]
    assert error["param"] == f"messages[0].content[{len(urls)}]"
    assert seeing_engine.process.commands == []


def test_a_side_is_bounded_too() -> None:
    """A picture of few pixels may have a million lines."""
    with pytest.raises(BadRequest, match=r"65536 pixels; a side has at most 65,535 here"):
        pictures.find_pictures(tuple(convert(said(bomb(1, 65_536))["messages"], list[Message])), PicturesConfig())


async def test_the_first_that_cannot_be_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the messages have them, whichever fails first."""
    other_failed = threading.Event()

    def fail(where: str, *_: Any) -> None:
        if where == "first":
            other_failed.wait(10)
        other_failed.set()
        raise BadRequest(where)

    monkeypatch.setattr(pictures, "_read", fail)
    vision = vision_config(VISION)
    assert vision is not None

    with pytest.raises(BadRequest, match="first"):
        await pictures.read_pictures([("first", ""), ("second", "")], vision, PicturesConfig())


def test_pictures_of_open_calls_have_their_memory(seeing: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few bytes may unfold to many: what is beyond comes back later."""
    monkeypatch.setattr("gpu_backend.server.client.engine_client.MOST_PICTURE_BYTES", 2 * 16 * 16 * 3)
    one, two = (seeing.post("/v1/chat/completions", json=said(*[picture(16, 16)] * count)) for count in (2, 3))

    assert (one.status_code, two.status_code, two.json()["error"]["code"]) == (200, 503, "overloaded")


def test_pictures_count_for_the_context(seeing: httpx.Client) -> None:
    """Of 100 tokens, two pictures of 64 × 64 pixels take 144."""
    answer = seeing.post("/v1/chat/completions", json=said(picture(64, 64), picture(64, 64)))

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_words_make_no_picture(seeing: httpx.Client, seeing_engine: FakeEngine) -> None:
    """What a caller writes as a picture's token is text."""
    command = asked(seeing, seeing_engine, CHAT | {"messages": [{"role": "user", "content": "[IMG]"}]})

    assert IMAGE not in command.prompt_token_ids
    assert command.pictures == ()


def test_template_that_leaves_a_picture_out_is_told(tmp_path: Path) -> None:
    """Rather than an answer about a picture that the model has not seen."""
    folder = write_small_files(tmp_path, SEEING_TEMPLATE, VISION)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{% endfor %}<assistant>")
    with running_front(folder, FakeEngine()) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=said(picture(8, 8), role="tool"))

    assert answer.status_code == 400
    assert "writes 0 of the 1 images" in answer.json()["error"]["message"]


def test_engine_without_a_decoder_says_so(seeing: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves texts all the same, and its list of models has none that reads pictures."""
    monkeypatch.setattr(pictures, "can_decode", lambda: False)
    monkeypatch.setattr("gpu_backend.server.front.can_decode", lambda: False)
    answer = seeing.post("/v1/chat/completions", json=said(picture(8, 8)))

    assert "pip install 'tollgate[vision]'" in answer.json()["error"]["message"]
    assert seeing.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert seeing.get("/v1/models").json()["data"][0]["input_modalities"] == ["text"]
