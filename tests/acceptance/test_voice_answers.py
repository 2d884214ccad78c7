# Answers by voice in chats, asked of a gateway by the openai package: said, held and booked at the price of sound.

from __future__ import annotations

import base64
import json
from decimal import Decimal
from typing import Any

import httpx
import pytest
from openai import OpenAI

from gateway.calls.estimate import spoken_tokens
from tests.acceptance.test_contents import contents_of, keep
from tests.support.house import House
from tests.support.openai_answers import EXPIRES, SOUND_TOKENS
from tests.support.paying_team import PayingTeam
from tests.support.scripted_upstream import Script, ScriptedUpstream
from tests.support.upstream_scripts import Told

VOICE: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "pcm16"}}
WORDS = "Two coins a gate"
CHAT: dict[str, Any] = {"model": "speaker", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100, **VOICE}


def ask(house: House, upstream: ScriptedUpstream, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    """Ask for an answer of known words, whichever was asked before."""
    upstream.forget()
    upstream.script(Script(text=WORDS, usage=more.pop("usage", Told.RIGHT)))
    with house.client() as client:
        return client.post("/v1/chat/completions", json=CHAT | more, headers=headers)


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def test_an_answer_by_voice_is_told_held_and_booked(house: House, openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """As the package reads it, beside the tokens of its words those of its sound; and gone on from by its id."""
    upstream.forget()
    upstream.script(Script(text=WORDS))
    first = openai.chat.completions.with_raw_response.create(**CHAT, store=True)
    message, usage = first.parse().choices[0].message, first.parse().usage
    row = house.record_of(httpx.Response(200, headers=first.headers))
    stored = openai.chat.completions.retrieve(first.parse().id).choices[0].message.audio
    turns = [*CHAT["messages"], message.to_dict(), {"role": "user", "content": "And back?"}]
    second = ask(house, upstream, messages=turns)
    after, told = house.record_of(second), upstream.requests[-1].body or {}
    kept_as = told["messages"][1].pop("audio")["id"]

    assert message.audio is not None and message.content is None
    assert stored is not None and (stored.id, stored.transcript, stored.data) == (message.audio.id, WORDS, "")
    assert (message.audio.transcript, message.audio.expires_at) == (WORDS, EXPIRES)
    assert base64.b64decode(message.audio.data) == b"".join(
        word.encode() * 3 for word in ("Two", " coins", " a", " gate")
    )
    assert usage is not None and usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.audio_tokens == 4 * SOUND_TOKENS == row["units"]["audio_output_tokens"]
    assert Decimal(str(row["cost_usd"])) == Decimal(4 * row["input_tokens"] + 16 * 4 + 64 * 20) / 1_000_000
    assert told["messages"][1] == {"role": "assistant"} and kept_as.startswith("audio_") and len(kept_as) == 26
    assert_teams_alone(house, upstream, kept_as, message.audio.id)
    assert {*second.headers["x-tollgate-dropped"].split(", ")} == {
        f"messages.audio.{name}" for name in ("data", "transcript", "expires_at")
    }
    assert upstream.violations == [] and after["held_tokens"] >= row["held_tokens"] + 1024  # as long as one can be


def assert_teams_alone(house: House, upstream: ScriptedUpstream, kept_as: str, told: str) -> None:
    """Neither the provider's id, nor what another team was told, has that sound heard; counting tells nothing of it."""
    asked = len(upstream.requests)
    for key, ident in ((None, kept_as), (PayingTeam(house).key, told), (None, told[:-4] + "AAA=")):
        turns = [*CHAT["messages"], {"role": "assistant", "audio": {"id": ident}}, {"role": "user", "content": "?"}]
        with house.client(key) as client:
            answer = client.post("/v1/chat/completions", json=CHAT | {"messages": turns})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[1].audio.id")
        assert "Send its transcript" in answer.json()["error"]["message"] and ident not in answer.text
    assert len(upstream.requests) == asked


def test_it_comes_in_pieces(house: House, upstream: ScriptedUpstream) -> None:
    """Its words, its sound, behind the end until when it is known; counted by its words where nothing else does."""
    answer = ask(house, upstream, stream=True, stream_options={"include_usage": True}, usage=Told.NONE)
    choices = [choice for chunk in chunks_of(answer) for choice in chunk["choices"]]
    pieces = [choice["delta"]["audio"] for choice in choices if "audio" in choice["delta"]]
    details = chunks_of(answer)[-1]["usage"]["completion_tokens_details"]

    assert "".join(piece.get("transcript", "") for piece in pieces) == WORDS
    assert b"".join(base64.b64decode(piece.get("data", "")) for piece in pieces)[:6] == b"TwoTwo"
    assert pieces[0]["id"].startswith("audio_") and pieces[-1] == {"expires_at": EXPIRES}
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert not any(choice["delta"].get("content") for choice in choices)
    assert spoken_tokens(WORDS) <= details["audio_tokens"] <= spoken_tokens(WORDS) + 4  # each word by itself
    assert house.record_of(answer)["units"] == {"audio_output_tokens": details["audio_tokens"]}


def test_the_same_key_gets_the_same_sound_and_no_cache_has_any(house: House, upstream: ScriptedUpstream) -> None:
    """An Idempotency-Key keeps it as it keeps any answer; the cache makes it anew, for its id is known for an hour."""
    keyed = [ask(house, upstream, {"idempotency-key": "voice"}).json() for _ in range(2)]
    cached = [ask(house, upstream, cache="all").headers["x-cache"] for _ in range(2)]

    assert keyed[0]["choices"][0]["message"]["audio"] and keyed[0] == keyed[1]
    assert cached == ["off", "off"]


@pytest.mark.parametrize("stream", [False, True])
def test_contents_have_its_words_and_not_its_sound(house: House, upstream: ScriptedUpstream, *, stream: bool) -> None:
    """As of a recording that comes as an upload."""
    team = PayingTeam(house)
    keep(house, team, {"keep_days": 7}).raise_for_status()
    upstream.script(Script(text=WORDS))
    with house.client(team.key) as client:
        answer = client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    kept = contents_of(house, team, answer.headers["x-request-id"]).json()["answer"]["choices"][0]["message"]

    assert kept["audio"]["transcript"] == WORDS and "data" not in kept["audio"]


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"audio": None}, "audio", "with a 'voice' and a 'format'"),
        ({"modalities": ["text"]}, "modalities", '["text", "audio"]'),
        ({"modalities": ["text", "image"]}, "modalities[1]", "Known here: audio, text."),
        ({"audio": {"voice": "alloy", "format": "ogg"}}, "audio.format", "aac, flac, mp3, opus, pcm16, wav"),
        ({"model": "claude"}, "modalities", "has no voice"),
        ({"model": "gemini"}, "modalities", "has no voice"),
        ({"model": "silent"}, "modalities", "it lacks voice. Models that can: small"),
        ({"messages": [{"role": "user", "content": "Hi", "audio": {"id": "a"}}]}, "messages[0].audio", "assistant"),
    ],
)
def test_what_cannot_be_is_refused_by_name(house: House, asked: dict[str, Any], param: str, words: str) -> None:
    """Before an upstream hears of it, and with what would be right."""
    with house.client() as client:
        answer = client.post("/v1/chat/completions", json=CHAT | asked)

    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]
