# Recordings written down, by the stock openai package: charged by the second or by tokens, in every form.

from __future__ import annotations

import io
import json
import uuid
import wave
from decimal import Decimal
from typing import Any

import pytest
from openai import APIStatusError, AzureOpenAI, OpenAI

from tests.support.house import House
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.upstream_scripts import Script

pytestmark = pytest.mark.usefixtures("strict_upstream")

URL = "/v1/audio/transcriptions"
TEXT = "Two coins a gate."


def recorded(seconds: float) -> bytes:
    """Return silence as WAV: 8,000 bytes a second behind a head of 44."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 1, 8_000, 0, "NONE", ""))
        file.writeframes(b"\x80" * int(8_000 * seconds))
    return out.getvalue()


FILE = ("gate.wav", recorded(2.5), "audio/wav")
ASK: dict[str, Any] = {"model": "scribe", "file": FILE}
SUBTITLES = {
    "text": f"{TEXT}\n",
    "srt": f"1\n00:00:00,000 --> 00:00:02,500\n{TEXT}\n\n",
    "vtt": f"WEBVTT\n\n00:00:00.000 --> 00:00:02.500\n{TEXT}\n\n",
}


def test_seconds_are_held_and_charged(house: House, openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """Held for what the file's head says, charged what the upstream counts; the file comes whole and once."""
    raw = openai.audio.transcriptions.with_raw_response.create(**ASK, language="en", temperature=0.2, prompt="Tolls.")
    made, row, (sent,) = raw.parse(), house.record_of(raw.http_response), upstream.requests
    body = sent.body or {}

    assert made.text == TEXT and made.usage is not None and made.usage.type == "duration" and made.usage.seconds == 3
    assert (body["model"], body["language"], body["temperature"], body["prompt"]) == (
        "whisper-1",
        "en",
        "0.2",
        "Tolls.",
    )
    assert (body["file"]["name"], body["file"]["type"], body["file"]["size"]) == ("gate.wav", "audio/wav", 20_044)
    assert (row["endpoint"], row["units"], row["cost_usd"]) == ("transcriptions", {"audio_seconds": 3}, 0.0003)
    assert row["held_nanousd"] == 3 * 100_000 and Decimal(made.usage.cost_usd) == Decimal("0.0003")  # type: ignore[union-attr]
    with house.client() as client:
        assert client.get("/v1/models/scribe").json()["price"]["audio_second"] == 0.0001


@pytest.mark.parametrize("form", ["text", "srt", "vtt"])
def test_texts_and_subtitles_are_charged_as_exactly(house: House, openai: OpenAI, form: Any) -> None:
    """Upstreams count in JSON alone: they are asked for that, and the form is written here."""
    raw = openai.audio.transcriptions.with_raw_response.create(**ASK, response_format=form)

    assert raw.text == SUBTITLES[form] and raw.headers["content-type"].startswith("text/plain")
    assert house.record_of(raw.http_response)["cost_usd"] == 0.0003


def test_all_that_an_upstream_tells_comes_through(openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """Segments with their times, as it has them; a translation is counted as well, and says no more than asked."""
    granular: Any = {"response_format": "verbose_json", "timestamp_granularities": ["segment"]}
    told: Any = openai.audio.transcriptions.create(**ASK, **granular)
    english: Any = openai.audio.translations.create(**ASK)

    assert (told.language, told.duration, told.segments[0].end) == ("english", 2.5, 2.5)
    assert (upstream.requests[0].body or {})["timestamp_granularities"] == ["segment"]
    assert english.text == TEXT and english.usage["seconds"] == 3 and not hasattr(english, "segments")


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_counted_by_the_upstream(house: House, openai: OpenAI, stream: bool) -> None:
    """Whole and streamed; held at the most that the seconds can be."""
    raw = openai.audio.transcriptions.with_raw_response.create(**ASK | {"model": "clerk"}, stream=stream)
    row, cost = house.record_of(raw.http_response), Decimal(25 * 6 + 4 * 10) / 10**6

    assert (row["input_tokens"], row["output_tokens"], row["units"]) == (25, 4, None)
    assert Decimal(str(row["cost_usd"])) == cost and row["held_nanousd"] >= 3 * 16 * 6_000 + 1024 * 10_000
    if stream:
        lines = raw.http_response.read().decode().splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        assert "".join(event.get("delta", "") for event in events) == events[-1]["text"] == TEXT
        assert events[-1]["type"] == "transcript.text.done" and Decimal(events[-1]["usage"]["cost_usd"]) == cost


def test_what_does_not_stream_comes_in_events_all_the_same(openai: OpenAI) -> None:
    """Whisper answers whole."""
    with openai.audio.transcriptions.create(**ASK, stream=True) as stream:
        kinds = [event.type for event in stream]

    assert kinds == ["transcript.text.delta", "transcript.text.done"]


def test_what_is_not_counted_is_estimated_within_the_hold(
    house: House, openai: OpenAI, upstream: ScriptedUpstream
) -> None:
    """By the file's head."""
    upstream.script("no-usage")
    raw = openai.audio.transcriptions.with_raw_response.create(**ASK)

    assert house.record_of(raw.http_response)["units"] == {"audio_seconds": 3}


def test_an_answer_is_given_again_and_another_file_is_another_request(house: House, upstream: ScriptedUpstream) -> None:
    """An Idempotency-Key stands for a form with its file."""
    headers, fields = {"idempotency-key": str(uuid.uuid4())}, {"model": "scribe"}
    with house.client() as client:
        first, again = (client.post(URL, data=fields, files={"file": FILE}, headers=headers) for _ in range(2))
        other = client.post(URL, data=fields, files={"file": ("gate.wav", recorded(1))}, headers=headers)

    assert first.json() == again.json() and again.headers["idempotent-replayed"] and len(upstream.requests) == 1
    assert other.status_code == 409


def test_a_route_goes_on_with_the_same_file(openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """It is there for as long as the call."""
    upstream.script(Script(status=500), model="whisper-1")
    made: Any = openai.audio.transcriptions.create(**ASK, extra_body={"models": ["clerk"]})
    sent = [(request.body or {})["file"]["sha256"] for request in upstream.requests]

    assert made.model_used == "clerk" and len(sent) > 1 and len(set(sent)) == 1


def test_a_deployment_of_azures_client_is_the_model_of_a_form(house: House, upstream: ScriptedUpstream) -> None:
    """The path's name counts, whatever the form says."""
    base_url = f"{house.url}/openai/deployments/scribe"
    with AzureOpenAI(base_url=base_url, api_key=house.team_key, api_version="2024-10-21") as azure:
        made = azure.audio.transcriptions.create(**ASK | {"model": "another"})

    assert made.text == TEXT and [sent.body and sent.body["model"] for sent in upstream.requests] == ["whisper-1"]


def test_no_field_is_smuggled_into_the_form(openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """Names and texts that look like parts of a form stay what they are."""
    odd = '--b\r\ncontent-disposition: form-data; name="model"\r\n\r\ndear\r\n'
    openai.audio.transcriptions.create(model="scribe", file=(f'a"; name="model{odd}.wav', FILE[1]), prompt=odd)
    body = upstream.requests[-1].body or {}

    assert body["model"] == "whisper-1" and body["prompt"] == odd and len(body) == 3


@pytest.mark.parametrize(
    ("wrong", "status", "words"),
    [
        ({"file": ("a.wav", b"")}, 400, "empty"),
        ({"file": ("a.wav", b"a" * (25 * 2**20 + 1))}, 413, "longer than 25 MiB"),
        ({"temperature": 2}, 400, "from 0 to 1"),
        ({"response_format": "docx"}, 400, "response_format"),
        ({"model": "brush"}, 400, "lacks transcription"),
    ],
)
def test_bad_input_is_told_what_would_be_right(openai: OpenAI, wrong: dict[str, Any], status: int, words: str) -> None:
    """An error that names the field."""
    with pytest.raises(APIStatusError, match=words) as caught:
        openai.audio.transcriptions.create(**ASK | wrong)

    assert (caught.value.status_code, caught.value.param) == (status, next(iter(wrong)))


def test_what_is_no_form_is_refused(house: House) -> None:
    """With what would be right."""
    with house.client() as client:
        answers = [
            client.post(URL, json={"model": "scribe"}),
            client.post(URL, data={"model": "scribe"}, files={"other": ("a", b"a")}),
            client.post(URL, files={"file": FILE}),
            client.post(URL, data={"model": "scribe", "file[]": "a"}, files={"file": FILE}),
        ]

    assert [answer.status_code for answer in answers] == [400, 400, 400, 400]
    assert "multipart/form-data" in answers[0].text and "'file'" in answers[1].text and "'model'" in answers[2].text
