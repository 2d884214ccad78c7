# A recording as a part of a chat or of a response, in the words of each format's upstreams.

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from billing.core.holds import Headroom
from billing.core.money import to_nano
from billing.core.prices import Price, cost_of, most_cost
from gateway.calls.estimate import probable_prompt_tokens
from gateway.dialects.chat import check_chat
from gateway.upstreams.anthropic.wire_format import AnthropicFormat
from gateway.upstreams.gemini.wire_format import GeminiFormat
from gateway.upstreams.openai.wire_format import OpenAIFormat
from gateway.upstreams.wire.errors import UpstreamUnable
from protocol import responses_to_chat
from protocol.chat import ChatRequest, Message, SpokenBefore
from protocol.errors import BadRequest
from protocol.responses import ResponsesRequest
from protocol.usage import Usage
from router.prompt_size.bounds import limit_within, usage_most
from router.prompt_size.prompt_bounds import MOST_CHAT_AUDIO_TOKENS, bound_prompt
from tests.support.house import model
from tests.support.sounds import wav
from tests.wire.traffic import asking

DATA = base64.b64encode(wav(seconds=3)).decode()
WAV = wav(seconds=1).decode("latin-1")
PART: dict[str, Any] = {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}
HEARING = Price(input=to_nano(1), output=to_nano(2), audio_input=to_nano(40))


def in_base64(file: str) -> str:
    return base64.b64encode(file.encode("latin-1")).decode()


def chat(*parts: dict[str, Any], role: str = "user") -> ChatRequest:
    body = {"model": "m", "messages": [{"role": role, "content": [*parts, {"type": "text", "text": "Hi"}]}]}
    return msgspec.convert(body, ChatRequest)


def response() -> ChatRequest:
    body = {"model": "m", "input": [{"role": "user", "content": [PART, {"type": "input_text", "text": "Hi"}]}]}
    return responses_to_chat.to_chat(msgspec.convert(body, ResponsesRequest))


@pytest.mark.parametrize("request_", [chat(PART), response()], ids=["chat", "response"])
def test_a_recording_reaches_an_upstream_in_its_own_words(request_: ChatRequest) -> None:
    """Where the format has a part for it; Claude has none, and says so, so that another target may be asked."""
    asked = asking(request_)
    openais = json.loads(OpenAIFormat().build_request(asked).body)["messages"][0]["content"]
    geminis = json.loads(GeminiFormat().build_request(asked).body)["contents"][0]["parts"]

    assert openais[0] == PART
    assert geminis[0] == {"inlineData": {"mimeType": "audio/wav", "data": DATA}}
    with pytest.raises(UpstreamUnable, match="hears nothing") as caught:
        AnthropicFormat().build_request(asked)
    assert caught.value.moves_on


def test_a_recording_is_held_by_its_length_at_the_price_of_what_is_heard() -> None:
    """A second that has begun counts. The rest is held as words; a prompt without a recording at no price of any."""
    heard, words = (usage_most(request, model("m", price=HEARING)) for request in (chat(PART), chat()))

    assert heard.audio_input_tokens == 4 * MOST_CHAT_AUDIO_TOKENS and words.audio_input_tokens == 0
    assert heard.input_tokens == words.input_tokens + 4 + heard.audio_input_tokens  # a part has marks around it
    used = Usage(heard.input_tokens, output_tokens=heard.output_tokens, audio_input_tokens=heard.audio_input_tokens)
    assert most_cost(heard, HEARING) == cost_of(used, HEARING)
    assert most_cost(words, HEARING) == cost_of(Usage(words.input_tokens, output_tokens=words.output_tokens), HEARING)
    assert bound_prompt(chat(PART, PART)).heard[0] == 2 * heard.audio_input_tokens


@pytest.mark.parametrize(("role", "data", "param"), [("system", DATA, "type"), ("assistant", DATA, "type")])
def test_a_recording_stands_in_a_turn_of_the_users(role: str, data: str, param: str) -> None:
    """No API knows it elsewhere."""
    with pytest.raises(BadRequest) as caught:
        check_chat(chat(PART, role=role))

    assert caught.value.param == f"messages[0].content[0].{param}"


@pytest.mark.parametrize("head", [WAV, "ID3\x03\0\0\0\0\0\x01." + WAV, "ID3\x03\0\0\0\0\0\x01.\xff\xfb", "\xff\xf3"])
def test_a_wav_and_an_mp3_are_recordings(head: str) -> None:
    """Tags before it are passed over; what is called the other is told so, before an upstream is asked."""
    form, other = ("wav", "mp3") if "RIFF" in head else ("mp3", "wav")

    assert chat({"type": "input_audio", "input_audio": {"data": in_base64(head), "format": form}})
    with pytest.raises(msgspec.ValidationError, match=f"no {other.upper()} in base64 is in 'data'"):
        chat({"type": "input_audio", "input_audio": {"data": in_base64(head), "format": other}})


FLAC_WITHIN = WAV[:20] + "\xac\xf1" + WAV[22:]  # the number of FLAC where that of PCM stood
WRONG = (
    "RIFF....WAVEfmt ",
    FLAC_WITHIN,
    "",
    "a secret of many words",
    "fLaC",
    "OggS",
    "ID3\x03\0\0\0\0\0\x01.fLaC",
    "ID3\x03\0\0\0\0\0\x80fLaC" + "." * 124 + "\xff\xfb",  # FLAC to who reads seven bits, MP3 to who reads eight
    "\xff\xf1\x50",
)


def test_what_is_no_base64_is_told_what_would_be() -> None:
    """In words, not as an expression: the prefix of a data URL is the usual mistake."""
    with pytest.raises(msgspec.ValidationError, match=r"^'data' is no base64 .* no 'data:…;base64,' before it"):
        chat({"type": "input_audio", "input_audio": {"data": "data:audio/wav;base64," + DATA, "format": "wav"}})


@pytest.mark.parametrize("data", ["not base64", "AAA=AAA=", f"data:audio/wav;base64,{DATA}", *map(in_base64, WRONG)])
@pytest.mark.parametrize("form", ["wav", "mp3"])
def test_what_is_neither_is_no_recording(data: str, form: str) -> None:
    """What packs silence to nothing, as AAC, FLAC and Ogg do, could last longer than it is held for; no policy
    reads it."""
    with pytest.raises(msgspec.ValidationError):
        chat({"type": "input_audio", "input_audio": {"data": data, "format": form}})


def test_a_recording_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its body is decoded, beside the event loop. What it comes to is asked for again on the loop, as its
    client leaves and while its answer runs: to unpack 20 MB took the loop a tenth of a second, many tags more."""
    asked = chat(PART)
    monkeypatch.setattr("protocol.chat.b64decode", None)

    assert bound_prompt(asked).heard[0] == 4 * MOST_CHAT_AUDIO_TOKENS
    assert probable_prompt_tokens(asked) > 0


def test_an_answer_by_voice_is_held_at_the_price_of_sound() -> None:
    """As far as its limit goes, and as much again is heard of an earlier one as the model can have said."""
    speaking, words = model("m", price=replace(HEARING, audio_output=to_nano(80))), chat()
    spoken = replace(words, modalities=("text", "audio"), max_tokens=100)
    before = replace(words, messages=(*words.messages, Message("assistant", audio=SpokenBefore("audio_1"))))
    asked, heard = usage_most(spoken, speaking), usage_most(before, speaking)
    room = Headroom(tokens=None, nanousd=most_cost(asked, speaking.price))
    fits = limit_within(spoken, (speaking,), room, bound_prompt(spoken))

    assert asked.audio_output_tokens == asked.output_tokens == fits == 100
    assert heard.audio_input_tokens == speaking.max_output and usage_most(words, speaking).audio_input_tokens == 0
    assert heard.input_tokens > usage_most(words, speaking).input_tokens + speaking.max_output
