# Texts said aloud, by the stock openai package: bytes as they are made, charged by the character or by the upstream's
# tokens.

from __future__ import annotations

import base64
import json
import uuid
from decimal import Decimal
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI

from tests.support.house import House
from tests.support.leaving import ask_and_leave
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.upstream_scripts import Fault, Script
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("strict_upstream")

URL = "/v1/audio/speech"
TEXT = "Grüezi, two coins a gate please."  # 32 characters, six words
ASK: dict[str, Any] = {"model": "voice", "voice": "alloy", "input": TEXT}


def test_characters_are_held_and_charged(house: House, openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """Each at its price, known before the call; the bytes come through as they are."""
    with openai.audio.speech.with_streaming_response.create(**ASK, response_format="wav", speed=1.5) as spoken:
        heard, row = b"".join(spoken.iter_bytes()), house.record_of(spoken.http_response)
        media_type = spoken.headers["content-type"]
    (sent,) = upstream.requests

    assert (heard, media_type) == (TEXT.encode(), "audio/wav")
    assert sent.body == {"model": "tts-1", "voice": "alloy", "input": TEXT, "response_format": "wav", "speed": 1.5}
    assert (row["endpoint"], row["units"], row["output_tokens"]) == ("speech", {"characters": 32}, 0)
    assert (row["cost_usd"], row["held_nanousd"]) == (32 * 0.000015, 32 * 15_000)
    with house.client() as client:
        assert client.get("/v1/models/voice").json()["price"]["character"] == 0.000015


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_tokens_are_counted_by_the_upstream(
    house: House, openai: OpenAI, upstream: ScriptedUpstream, stream_format: Any
) -> None:
    """It counts in its events alone: it is asked for these, and the client gets what it asked for."""
    raw = openai.audio.speech.with_raw_response.create(
        model="actor", voice={"id": "voice_1"}, input=TEXT, instructions="Warmly.", stream_format=stream_format
    )
    row, (sent,) = house.record_of(raw.http_response), upstream.requests
    cost = Decimal(9 * 6 + 120 * 120) / 10**7

    assert (sent.body or {})["stream_format"] == "sse"
    assert (row["input_tokens"], row["output_tokens"], row["units"]) == (9, 120, None)
    assert Decimal(str(row["cost_usd"])) == cost and row["held_nanousd"] >= 1024 * 12_000
    if stream_format == "audio":
        assert (raw.content, raw.headers["content-type"]) == (TEXT.encode(), "audio/mpeg")
        return
    events = [json.loads(line.removeprefix("data: ")) for line in raw.text.splitlines() if line.startswith("data: ")]
    assert b"".join(base64.b64decode(event.get("audio", "")) for event in events) == TEXT.encode()
    assert events[-1]["type"] == "speech.audio.done" and Decimal(events[-1]["usage"]["cost_usd"]) == cost


def test_what_is_not_counted_is_estimated(house: House, openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """By the length of the text, within the hold."""
    upstream.script("no-usage", model="gpt-4o-mini-tts")
    raw = openai.audio.speech.with_raw_response.create(**ASK | {"model": "actor"})

    assert house.record_of(raw.http_response)["output_tokens"] == 45


def test_an_answer_is_given_again(house: House, upstream: ScriptedUpstream) -> None:
    """With an Idempotency-Key: the same bytes of the same kind, paid once."""
    with house.client() as client:
        headers = {"idempotency-key": str(uuid.uuid4())}
        first, again = (client.post(URL, json=ASK, headers=headers) for _ in range(2))

    assert (first.content, again.content) == (TEXT.encode(), TEXT.encode())
    assert first.headers["content-type"] == again.headers["content-type"] == "audio/mpeg"
    assert again.headers["idempotent-replayed"] and len(upstream.requests) == 1


def test_audio_that_breaks_has_no_end(house: House, openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """Bytes cannot say so: the body ends before its end. Events tell of it."""
    upstream.script(Script(fault=Fault.RESET, after=2, pace=0.01))
    with house.client() as client:
        with pytest.raises(httpx.RemoteProtocolError):
            client.post(URL, json=ASK)
        told = client.post(URL, json=ASK | {"model": "actor", "stream_format": "sse"})

    assert '"type":"error"' in told.text and "speech.audio.done" not in told.text


def test_who_leaves_owes_the_characters(house: House, upstream: ScriptedUpstream) -> None:
    """The upstream had all of them."""
    upstream.script(Script(fault=Fault.HANG, after=2))
    ask_and_leave(house, URL, ASK | {"user": "leaves-speech"}, lambda: len(upstream.requests) == 1)
    with house.client() as client:
        path = "/v1/calls?user=leaves-speech"
        until(lambda: client.get(path).raise_for_status().json()["data"])
        (row,) = client.get(path).json()["data"]

    assert (row["status"], row["cost_usd"]) == ("interrupted", 32 * 0.000015)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"input": " "}, "must not be empty"),
        ({"input": "a" * 4_097}, "at most 4096 characters"),
        ({"speed": 5}, "from 0.25 to 4"),
        ({"response_format": "midi"}, "response_format"),
        ({"model": "brush"}, "lacks speech"),
    ],
)
def test_bad_input_is_told_what_would_be_right(openai: OpenAI, wrong: dict[str, Any], words: str) -> None:
    """A 400 that names the field."""
    with pytest.raises(BadRequestError, match=words) as caught:
        openai.audio.speech.create(**ASK | wrong)

    assert caught.value.param == next(iter(wrong))
