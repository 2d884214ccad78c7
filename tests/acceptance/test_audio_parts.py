# Recordings as parts of prompts, asked of a gateway: told, held by their length, booked by the tokens that were heard.

from __future__ import annotations

import base64
from typing import Any

import pytest

from router.prompt_size.prompt_bounds import MOST_CHAT_AUDIO_TOKENS
from tests.support.house import House
from tests.support.scripted_upstream import Script, ScriptedUpstream
from tests.support.sounds import wav

DATA = base64.b64encode(wav(seconds=2)).decode()
PART: Any = {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}
IN_CHAT = {"messages": [{"role": "user", "content": [PART, {"type": "text", "text": "What is said?"}]}]}
IN_RESPONSE = {"input": [{"role": "user", "content": [PART, {"type": "input_text", "text": "What is said?"}]}]}
GEMINIS = {"inlineData": {"mimeType": "audio/wav", "data": DATA}}


@pytest.mark.parametrize(
    ("path", "model", "asked", "told"),
    [
        ("/v1/chat/completions", "small", IN_CHAT, PART),
        ("/v1/chat/completions", "gemini", IN_CHAT, GEMINIS),
        ("/v1/responses", "native", IN_RESPONSE, PART),  # asked as a chat
    ],
)
def test_a_recording_is_told_held_and_booked(
    house: House, upstream: ScriptedUpstream, path: str, model: str, asked: dict[str, Any], told: Any
) -> None:
    """Its tokens cost what a heard token does, in the row and in the answer's usage."""
    upstream.forget()
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    upstream.script(Script(audio_tokens=7))
    with house.client() as client:
        answer = client.post(path, json={"model": model, most: 100} | asked)
    assert answer.status_code == 200, answer.text
    sent, row = upstream.requests[-1].body or {}, house.record_of(answer)
    turn = sent["contents"][0]["parts"] if model == "gemini" else sent["messages"][0]["content"]

    assert turn[0] == told and upstream.violations == []
    assert row["held_tokens"] - 100 > 2 * MOST_CHAT_AUDIO_TOKENS
    assert row["units"] == {"audio_input_tokens": 7}
