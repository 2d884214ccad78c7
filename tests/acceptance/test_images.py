# Pictures of words, and of words and pictures, by the stock openai package: charged by the tokens that the upstream
# counts, or by the picture.

from __future__ import annotations

import asyncio
import base64
import hashlib
import struct
import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from msgspec.structs import replace
from openai import APIError, APIStatusError, BadRequestError, OpenAI, RateLimitError

from gateway.accounts.schemas import SafetyInput
from tests.support.house import House, make_team
from tests.support.leaving import ask_and_leave
from tests.support.paying_team import PayingTeam
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.upstream_scripts import Fault, Script, Told
from tests.support.waiting import until

EDITS = "/v1/images/edits"
PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + struct.pack(">II", 1024, 1024) + bytes(500)
SMALL = PNG[:16] + struct.pack(">II", 512, 512) + bytes(500)
JPEG = b"\xff\xd8\xff\xc2\x00\x11\x08" + struct.pack(">HH", 512, 512) + bytes(9)
WEBP = b"RIFF\x00\x00\x00\x00WEBPVP8X" + bytes(8) + b"\xff\x01\x00\xff\x01\x00" + bytes(4)
SEEN = 2833 + 4 * 5667  # tokens of the PNG at the most, on a model whose formula is not known


@pytest.fixture(autouse=True)
def _strict(upstream: ScriptedUpstream) -> Iterator[None]:
    upstream.forget()
    yield
    violations = upstream.violations
    upstream.forget()
    assert violations == []


def test_pictures_cost_what_their_tokens_cost(house: House, openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """The upstream's count at the model's price; held for the longest that each can be."""
    raw = openai.images.with_raw_response.generate(model="painter", prompt="A toll gate", n=2, quality="low")
    made, row, (sent,) = raw.parse(), house.record_of(raw.http_response), upstream.requests
    usage = made.usage

    assert sent.body == {"model": "gpt-image-2", "prompt": "A toll gate", "n": 2, "quality": "low"}
    assert made.data is not None and len(made.data) == 2 and made.data[0].b64_json
    assert (made.size, made.quality) == ("1024x1024", "low")
    assert usage is not None and (usage.input_tokens, usage.output_tokens) == (3, 544)
    cost = Decimal(3 * 5 + 544 * 30) / 10**6
    assert Decimal(usage.cost_usd) == cost == Decimal(str(row["cost_usd"]))  # type: ignore[attr-defined]
    assert (row["endpoint"], row["units"]) == ("images", {"images": 2})
    assert row["held_nanousd"] >= 2 * 1024 * 30_000 and row["held_tokens"] >= 2 * 1024


def test_pictures_are_priced_by_the_piece(house: House, openai: OpenAI) -> None:
    """Where the upstream has it so, and counts no tokens; nothing more is held."""
    raw = openai.images.with_raw_response.generate(model="brush", prompt="A toll gate", n=3, response_format="url")
    made, row = raw.parse(), house.record_of(raw.http_response)

    assert made.data is not None and [each.url for each in made.data][2] == "https://pictures.example/2"
    assert (row["cost_usd"], row["units"], row["held_nanousd"]) == (0.21, {"images": 3}, 210_000_000)
    assert row["output_tokens"] == 0 and row["held_tokens"] < 100
    with house.client() as client:
        assert client.get("/v1/models/brush").json()["price"]["image"] == 0.07


@pytest.mark.parametrize(
    ("model", "asked", "held", "cost"),
    [
        ("canvas", {"quality": "low", "size": "1536x1024", "n": 2}, "0.04", "0.04"),
        ("canvas", {"quality": "high", "size": "4096x4096"}, "0.17", "0.17"),
        ("canvas", {"size": "1536x1024"}, "0.17", "0.05"),
        ("canvas", {"quality": "auto"}, "0.17", "0.05"),
        ("sketch", {}, "0.17", "0.01"),
        ("sketch", {"quality": "high"}, "0.17", "0.17"),
    ],
)
def test_a_picture_costs_what_its_quality_and_size_do(
    house: House, openai: OpenAI, model: str, asked: dict[str, Any], held: str, cost: str
) -> None:
    """Held for the dearest that may come; charged by what was asked for, else by what the upstream says that it made,
    else by the price of what is left to it. The row's price says so, too."""
    raw: Any = openai.images.with_raw_response.generate(model=model, prompt="A toll gate", **asked)
    row = house.record_of(raw.http_response)
    with house.client() as client:
        call = client.get(f"/v1/calls/{row['request_id']}").json()

    assert Decimal(row["held_nanousd"]).scaleb(-9) == Decimal(held)
    assert Decimal(str(row["cost_usd"])) == Decimal(cost)
    lines = call["price"]["lines"]
    assert [Decimal(str(line["cost_usd"])) for line in lines if line["kind"] == "image"] == [Decimal(cost)]


def test_a_picture_of_an_unknown_price_is_not_asked_for(openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """The parameter that has no price is named, with what has one; a model that has one, or one price for all, may
    answer."""
    for wrong, priced in (
        ({"quality": "finest"}, "'low', 'high', 'auto'"),
        ({"size": "2048x2048", "quality": "low"}, "'1024x1024', '1536x1024'"),
    ):
        asked: dict[str, Any] = {"model": "canvas", "prompt": "A toll gate", **wrong}
        with pytest.raises(BadRequestError, match=f"is not known. It is of {priced}") as caught:
            openai.images.generate(**asked)
        assert caught.value.param == next(iter(wrong))
    assert upstream.requests == []

    other: Any = openai.images.generate(**asked, extra_body={"models": ["brush"]})
    assert other.model_used == "brush"


def test_who_leaves_owes_the_pictures(house: House, upstream: ScriptedUpstream) -> None:
    """The upstream has the prompt and goes on to make them; their tokens are estimated, within the hold."""
    upstream.script("hang-before-headers")
    with house.client() as client:
        for model, dollars in (("brush", 0.14), ("painter", (2 * 272 * 30 + 3 * 5) / 10**6)):
            seen, path = len(upstream.requests), f"/v1/calls?user=leaves-{model}"
            asked = {"model": model, "prompt": "A toll gate", "n": 2, "quality": "low", "user": f"leaves-{model}"}
            ask_and_leave(house, "/v1/images/generations", asked, lambda seen=seen: len(upstream.requests) > seen)
            until(lambda path=path: client.get(path).raise_for_status().json()["data"])
            (row,) = client.get(path).json()["data"]

            assert (row["status"], row["cost_usd"]) == ("interrupted", pytest.approx(dollars, rel=0.01))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"prompt": ""}, "must not be empty"),
        ({"prompt": "a" * 32_001}, "at most 32000 characters"),
        ({"n": 11}, "from 1 to 10"),
        ({"n": 2, "stream": True}, "A stream is of one picture"),
        ({"partial_images": 1}, "in a stream alone"),
        ({"partial_images": 4, "stream": True}, "from 0 to 3"),
        ({"output_format": "svg"}, "output_format"),
        ({"model": "claude"}, "lacks images|chat completions alone"),
    ],
)
def test_bad_input_is_told_what_would_be_right(openai: OpenAI, wrong: dict[str, Any], words: str) -> None:
    """A 400 that names the field."""
    asked: dict[str, Any] = {"model": "painter", "prompt": "A toll gate", **wrong}
    with pytest.raises(BadRequestError, match=words) as caught:
        openai.images.generate(**asked)

    assert caught.value.param == next(iter(wrong))


def test_an_answer_without_pictures_fails_over(openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """It is a fault of the upstream; the next model answers."""
    upstream.script("not-json", model="gpt-image-2")
    made = openai.images.generate(model="painter", prompt="A toll gate", extra_body={"models": ["brush"]})

    assert made.model_used == "brush"  # type: ignore[attr-defined]


def test_pictures_are_made_of_pictures(house: House, openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """All of them reach the upstream as they came, each told as what its first bytes are; held for the most tokens that
    they can be at the price of pictures, and charged as the upstream counts them and the words."""
    raw = openai.images.with_raw_response.edit(
        model="painter",
        prompt="A toll gate",
        image=[("gate.jpg", PNG, "image/jpeg"), JPEG, WEBP],
        mask=("mask.png", PNG),
        n=2,
        quality="low",
        input_fidelity="high",
        user="edits",
    )
    made, row, (sent,) = raw.parse(), house.record_of(raw.http_response), upstream.requests
    body: Any = sent.body
    told = [(each["type"], each["size"], each["sha256"]) for each in (*body.pop("image"), body.pop("mask"))]
    kinds = ((PNG, "png"), (JPEG, "jpeg"), (WEBP, "webp"), (PNG, "png"))

    assert sent.path == EDITS and told == [
        (f"image/{kind}", len(data), hashlib.sha256(data).hexdigest()) for data, kind in kinds
    ]
    assert body == {
        "model": "gpt-image-2",
        "prompt": "A toll gate",
        "n": "2",
        "quality": "low",
        "input_fidelity": "high",
        "user": "edits",
    }
    assert made.data is not None and len(made.data) == 2 and made.usage is not None
    details, cost = made.usage.input_tokens_details, Decimal(3 * 5 + 3 * 194 * 8 + 544 * 30) / 10**6
    assert (details.text_tokens, details.image_tokens, made.usage.output_tokens) == (3, 582, 544)
    assert Decimal(made.usage.cost_usd) == cost == Decimal(str(row["cost_usd"]))  # type: ignore[attr-defined]
    assert (row["endpoint"], row["units"]) == ("images.edits", {"images": 2, "image_input_tokens": 582})
    assert row["held_nanousd"] >= 2 * SEEN * 8_000 + 2 * 1024 * 30_000
    assert row["held_nanousd"] < 4 * (SEEN + 100) * 8_000 + 2 * 1024 * 30_000


@pytest.mark.parametrize("kind", ["generate", "edit"])
def test_a_picture_is_shown_before_it_is_whole(
    house: House, openai: OpenAI, upstream: ScriptedUpstream, kind: str
) -> None:
    """Each event as the upstream has it, under the name of what was asked; the last has the count and its cost. Held,
    and charged, with 100 tokens for each picture that was not whole."""
    asked: dict[str, Any] = {"model": "painter", "prompt": "A toll gate", "stream": True, "partial_images": 2}
    seen = {"image": PNG} if kind == "edit" else {}
    raw = getattr(openai.images.with_raw_response, kind)(**asked, **seen)
    *partial, whole = raw.parse()
    row, (sent,) = house.record_of(raw.http_response), upstream.requests
    name, cost = {"edit": "image_edit", "generate": "image_generation"}[kind], 3 * 5 + 194 * 8 * len(seen) + 472 * 30

    assert (sent.body or {})["stream"] in (True, "true") and raw.headers["content-type"].startswith("text/event-stream")
    assert [(each.type, each.partial_image_index, each.b64_json) for each in partial] == [
        (f"{name}.partial_image", place, f"AAA{place}") for place in range(2)
    ]
    assert (whole.type, whole.size, whole.quality, whole.output_format) == (
        f"{name}.completed",
        "1024x1024",
        "low",
        "png",
    )
    assert base64.b64decode(whole.b64_json) == b"A toll gate" and whole.model_used == "painter"
    assert (whole.usage.output_tokens, whole.usage.input_tokens_details.image_tokens) == (472, 194 * len(seen))
    assert Decimal(whole.usage.cost_usd) == Decimal(cost) / 10**6 == Decimal(str(row["cost_usd"]))
    assert row["status"] == "answered" and row["units"]["images"] == 1
    assert row["held_nanousd"] >= (1024 + 200) * 30_000 + len(seen) * SEEN * 8_000


def test_a_stream_of_pictures_ends_as_any(house: House, openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """Of a model that has none it is one event; one without a count is estimated; one that breaks says so; who leaves
    owes the picture; and a prompt that may not go out opens none."""
    asked: dict[str, Any] = {"prompt": "A toll gate", "stream": True, "quality": "low", "partial_images": 1}
    (whole,) = openai.images.generate(model="brush", **asked)
    assert whole.url == "https://pictures.example/0" and Decimal(whole.usage.cost_usd) == Decimal("0.07")  # type: ignore[union-attr]

    upstream.script(Script(usage=Told.NONE), model="gpt-image-2")
    *_, whole = openai.images.generate(model="painter", **asked)
    assert whole.usage.output_tokens == 372  # type: ignore[union-attr]

    upstream.script(Script(fault=Fault.ERROR_FRAME), model="gpt-image-2")
    shown = []
    with pytest.raises(APIError, match="reported an error"):
        shown += [each.type for each in openai.images.generate(model="painter", **asked, user="stream-breaks")]
    upstream.script(Script(fault=Fault.HANG, after=1), model="gpt-image-2")
    with openai.images.generate(model="painter", **asked, user="stream-left") as stream:
        assert next(iter(stream)).type == "image_generation.partial_image"
    upstream.forget()
    with house.client() as client:
        for user in ("stream-breaks", "stream-left"):
            until(lambda user=user: client.get(f"/v1/calls?user={user}").json()["data"])
            (row,) = client.get(f"/v1/calls?user={user}").json()["data"]
            assert (row["status"], row["cost_usd"]) == (
                "interrupted",
                pytest.approx((372 * 30 + 3 * 5) / 10**6, rel=0.01),
            )


def test_what_may_not_go_out_is_not_edited(house: House, upstream: ScriptedUpstream) -> None:
    """The prompt of an edit is judged before any upstream hears of it, whole or streamed; what the provider's own
    filter takes is told as that, and its key does not rest."""
    key = asyncio.run(make_team(house.settings, "team_safe_edits", safety=SafetyInput(input="block")))
    fields = {"model": "painter", "prompt": "The key is AKIAIOSFODNN7EXAMPLE."}
    with house.client(key) as client:
        for more in ({}, {"stream": "true"}):
            answer = client.post(EDITS, data=fields | more, files={"image": ("a.png", PNG)})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        assert upstream.requests == []
        fields["prompt"] = "A toll gate"
        blocked = Script(
            status=400,
            type="image_generation_user_error",
            code="moderation_blocked",
            message="Your request was rejected by the safety system. safety_violations=[sexual].",
        )
        upstream.script(blocked, model="gpt-image-2")
        answer = client.post(EDITS, data=fields, files={"image": ("a.png", PNG)})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "content_policy_violation")
        upstream.forget()
        upstream.script(replace(blocked, status=200, fault=Fault.ERROR_FIRST), model="gpt-image-2")
        told = client.post(EDITS, data=fields | {"stream": "true"}, files={"image": ("a.png", PNG)})
        assert (told.status_code, told.json()["error"]["code"]) == (400, "content_policy_violation")
        assert len(upstream.requests) == 1
        upstream.forget()
        assert client.post(EDITS, data=fields, files={"image": ("a.png", PNG)}).status_code == 200


def test_an_edit_in_json_is_the_same_edit(house: House, upstream: ScriptedUpstream) -> None:
    """Pictures that come as data URLs go on as files of a form, held and counted as those; where one lies at an address
    all go on as JSON, and the upstream fetches it."""
    refs = [f"data:{kind};base64,{base64.b64encode(data).decode()}" for kind, data in (("image/png", PNG), ("x", WEBP))]
    refs[1] = refs[1].replace("data:x", "data:image/webp")
    body: dict[str, Any] = {"model": "painter", "prompt": "A toll gate", "quality": "low", "user": "json"}
    images = [{"image_url": ref} for ref in refs]
    with house.client() as client:
        answer = client.post(EDITS, json={**body, "images": images, "mask": images[0], "n": 2})
        sent: Any = upstream.requests[-1].body
        row = house.record_of(answer)
        assert [each["sha256"] for each in (*sent["image"], sent["mask"])] == [
            hashlib.sha256(data).hexdigest() for data in (PNG, WEBP, PNG)
        ]
        assert sent["n"] == "2" and answer.json()["usage"]["input_tokens_details"]["image_tokens"] == 388
        assert row["units"] == {"images": 2, "image_input_tokens": 388}
        assert 2 * SEEN * 8_000 <= row["held_nanousd"] - 2 * 1024 * 30_000 < 4 * (SEEN + 100) * 8_000

        answer = client.post(EDITS, json={**body, "images": images[:1], "markup": images[0]})
        sent = upstream.requests[-1].body
        assert sent["markup"]["sha256"] == sent["image"]["sha256"]
        assert house.record_of(answer)["held_nanousd"] >= 2 * SEEN * 8_000

        images.append({"image_url": "https://93.184.215.14/gate.png"})
        answer = client.post(EDITS, json={**body, "images": images, "mask": images[0]})
        assert upstream.requests[-1].body == {**body, "model": "gpt-image-2", "images": images, "mask": images[0]}
        assert house.record_of(answer)["units"]["image_input_tokens"] == 3 * 194


@pytest.mark.parametrize(
    ("images", "param", "words"),
    [
        ([], "images", "1 to 16 pictures"),
        ([{"image_url": "https://93.184.215.14/a"}] * 17, "images", "1 to 16 pictures"),
        ([{"file_id": "file-1"}], "images[0].file_id", "not kept here as files: send 'image_url'"),
        ([{"image_url": "http://93.184.215.14/a"}], "images[0].image_url", "a data URL of a picture"),
        ([{"image_url": "https://127.0.0.1/a"}], "images", "public https URL"),
        ([{"image_url": "data:image/png;base64,!!!!"}], "images[0].image_url", "a data URL of a picture"),
        ([{"image_url": "data:image/png;base64,é"}], "images[0].image_url", "a data URL of a picture"),
        ([{"image_url": "data:image/gif;base64,R0lGODlhAAAA"}], "images[0]", "no PNG, JPEG or WebP"),
    ],
)
def test_a_wrong_edit_in_json_is_told_what_would_be_right(
    house: House, upstream: ScriptedUpstream, images: list[dict[str, str]], param: str, words: str
) -> None:
    """A 400 that names the field; no upstream hears of it."""
    with house.client() as client:
        answer = client.post(EDITS, json={"model": "painter", "prompt": "A toll gate", "images": images})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert words in answer.json()["error"]["message"] and upstream.requests == []


@pytest.mark.parametrize("name", ["image", "url", "image_url"])
def test_pictures_come_in_their_fields_alone(house: House, upstream: ScriptedUpstream, name: str) -> None:
    """Elsewhere, an upstream would fetch what was not looked at, and nothing is held for it."""
    fields = {"model": "painter", "prompt": "A toll gate"}
    image = {"image_url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"}
    where = "https://169.254.169.254/latest"
    with house.client() as client:
        answers = [client.post(EDITS, json={**fields, "images": [image], name: where})]
        if name != "image":
            answers.append(client.post(EDITS, data={**fields, f"{name}[]": where}, files={"image": ("a.png", PNG)}))

    assert {(each.status_code, each.json()["error"]["param"]) for each in answers} == {(400, name)}
    assert upstream.requests == []


def test_an_edit_is_priced_by_the_piece(house: House, openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """Of one picture, under the name that one has; what the upstream does not count is estimated."""
    raw = openai.images.with_raw_response.edit(model="brush", prompt="A toll gate", image=PNG, n=3)
    row, body = house.record_of(raw.http_response), upstream.requests[0].body or {}

    assert body["image"]["size"] == len(PNG) and (row["cost_usd"], row["held_nanousd"]) == (0.21, 210_000_000)
    upstream.script("no-usage")
    raw = openai.images.with_raw_response.edit(model="painter", prompt="A toll gate", image=PNG, quality="low")
    assert house.record_of(raw.http_response)["units"] == {"images": 1, "image_input_tokens": 1_024}


def test_an_edit_goes_on_with_the_same_pictures(openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """At the next model, where an upstream fails; what it refuses is told as its answer has it."""
    asked: dict[str, Any] = {"model": "painter", "prompt": "A toll gate", "image": PNG}
    upstream.script(Script(status=500), model="gpt-image-2")
    made: Any = openai.images.edit(**asked, extra_body={"models": ["brush"]})
    sent = {(request.body or {})["image"]["sha256"] for request in upstream.requests}

    assert made.model_used == "brush" and len(upstream.requests) > 1 and sent == {hashlib.sha256(PNG).hexdigest()}
    refused = Script(status=400, type="invalid_request_error", message="The mask has another size.")
    upstream.script(refused, model="gpt-image-2")
    with pytest.raises(BadRequestError, match="The mask has another size"):
        openai.images.edit(**asked)


def test_what_pictures_can_cost_has_to_be_there(house: House, upstream: ScriptedUpstream) -> None:
    """A budget that has room for an edit of one has none for one of two; no upstream hears of that."""
    team = PayingTeam(house, usd_per_day=(SEEN + 200) * 8 / 10**6 + 1024 * 30 / 10**6)
    client = OpenAI(base_url=f"{house.url}/v1", api_key=team.key, max_retries=0)
    asked: dict[str, Any] = {"model": "painter", "prompt": "A toll gate"}
    with pytest.raises(RateLimitError, match="smaller than this request alone"):
        client.images.edit(**asked, image=[PNG, PNG])

    assert upstream.requests == []
    assert client.images.edit(**asked, image=PNG).data


def test_an_edit_is_given_again(house: House, upstream: ScriptedUpstream) -> None:
    """An Idempotency-Key stands for a form with its pictures, however it is cut into parts: another picture is another
    request. The cache keeps none, and says so. A prompt may have 32,000 characters of any writing."""
    headers, fields = (
        {"idempotency-key": str(uuid.uuid4()), "x-cache": "all"},
        {"model": "brush", "prompt": "門" * 30_000},
    )
    with house.client() as client:
        first, again, other = (
            client.post(EDITS, data=fields, files={"image": ("a.png", data)}, headers=headers)
            for data in (PNG, PNG, PNG + b"1")
        )

    assert first.json() == again.json() and again.headers["idempotent-replayed"] and len(upstream.requests) == 1
    assert other.status_code == 409 and first.headers["x-cache"] == "off"


@pytest.mark.parametrize(
    ("wrong", "status", "words"),
    [
        ({"image": ("a.gif", b"GIF89a" + bytes(20))}, 400, "no PNG, JPEG or WebP"),
        ({"image": [PNG, b""]}, 400, "empty"),
        ({"image": [PNG] * 17}, 400, "at most 16 times"),
        ({"image": PNG + bytes(25 * 2**20)}, 413, "longer than 25 MiB"),
        ({"mask": JPEG}, 400, "no PNG"),
        ({"mask": SMALL}, 400, "is 512 × 512 pixels large: it must be as large as the first picture, 1024 × 1024"),
        ({"markup": PNG, "mask": PNG}, 400, "not both"),
        ({"prompt": ""}, 400, "must not be empty"),
        ({"n": 11}, 400, "from 1 to 10"),
        ({"n": 2, "stream": True}, 400, "A stream is of one picture"),
        ({"model": "gemini"}, 400, "takes chat completions"),
    ],
)
def test_a_wrong_edit_is_told_what_would_be_right(
    openai: OpenAI, upstream: ScriptedUpstream, wrong: dict[str, Any], status: int, words: str
) -> None:
    """An error that names the field; no upstream hears of it."""
    asked: dict[str, Any] = {"model": "painter", "prompt": "A toll gate", "image": PNG, **wrong}
    with pytest.raises(APIStatusError, match=words) as caught:
        openai.images.edit(**asked)

    assert (caught.value.status_code, caught.value.param) == (status, next(iter(wrong)))
    assert upstream.requests == []


def test_an_edit_is_a_form_with_pictures(house: House) -> None:
    """What is missing is named; the API's description has the form."""
    with house.client() as client:
        plain = client.post(EDITS, json={"model": "painter"})
        bare = client.post(EDITS, data={"model": "painter", "prompt": "A"}, files={"mask": ("a.png", PNG)})
        described = client.get("/openapi.json").json()
    (form,) = described["paths"][EDITS]["post"]["requestBody"]["content"].items()
    shape = described["components"]["schemas"][form[1]["schema"]["$ref"].rpartition("/")[2]]

    assert (plain.status_code, plain.json()["error"]["param"]) == (400, "prompt")
    assert (bare.status_code, bare.json()["error"]["param"]) == (400, "image")
    assert form[0] == "multipart/form-data" and set(shape["required"]) == {"model", "prompt", "image"}
    assert shape["properties"]["image"]["items"] == {"type": "string", "format": "binary"}
