# What `tollgate doctor --live` makes of answers that lie; and that a recording holds nothing that is secret.

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from billing.core.money import to_nano
from gateway.doctor.judging import Answered, Limits, complaints
from gateway.doctor.live_calls import LiveCall, calls_for
from gateway.doctor.machine import file_system_of
from gateway.doctor.recording import Recording
from gateway.upstreams.registry import FORMATS
from protocol.chat import ChatReply
from tests.wire.traffic import TARGET

CALLS = {call.name: call for call in calls_for(TARGET.model, "openai")}
LIMITS = Limits(prompt=200, output=64, cost=to_nano("0.001"))
USAGE = {"prompt_tokens": 12, "completion_tokens": 5, "total_tokens": 17}


def judged(call: LiveCall, usage: Any = USAGE, message: Any = None, **more: Any) -> str:
    """Return what is said of an answer of OpenAI's to a call."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello you."} | (message or {}),
        "finish_reason": "stop",
    }
    whole = {"id": "c", "model": "gpt-4o-2024-08-06", "choices": [choice], "usage": usage} | more
    body = json.dumps(whole).encode()
    reply, counted = FORMATS["openai"].read_reply(call.request, body)
    assert isinstance(reply, ChatReply)
    answered = Answered(status=200, body=body, reply=reply, usage=counted)
    return "; ".join(complaints(call, answered, LIMITS, "gpt-4o"))


def test_an_honest_answer_is_well() -> None:
    """A dated name is the same model; so is a count of what costs nothing by itself."""
    assert judged(CALLS["whole"]) == ""
    assert judged(CALLS["whole"], USAGE | {"cost": 0.001, "prompt_tokens_details": {"cached_tokens": 4}}) == ""


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        (None, "it tells no usage"),
        (USAGE | {"prompt_tokens": 1200}, "1200 tokens of a prompt that can have 1 to 200"),
        (USAGE | {"completion_tokens": 500}, "500 tokens of an answer that can have 1 to 64"),
        (USAGE | {"completion_tokens": 0}, "0 tokens of an answer"),
        (USAGE | {"prompt_tokens_details": {"cached_tokens": 13}}, "more cached_tokens than prompt_tokens"),
        (
            USAGE | {"completion_tokens_details": {"reasoning_tokens": 6}},
            "more reasoning_tokens than",
        ),
        (USAGE | {"prompt_tokens_details": {"audio_tokens": 3}}, "no price is known of here: audio_tokens"),
        (USAGE | {"cost": 0.002}, "it says that this cost 0.002 USD, by the prices here it is 0.001 USD"),
    ],
)
def test_usage_that_lies_is_told(usage: Any, words: str) -> None:
    """Missing, more than can be, parts larger than their whole, what has no price, another sum."""
    assert words in judged(CALLS["whole"], usage)


def test_content_that_is_not_what_was_asked_is_told() -> None:
    """Another model, a tool that was not called or not in JSON, an end that is none, no words."""
    odd = [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": "[]"}}]

    assert "it says that mini answered" in judged(CALLS["whole"], model="mini")
    assert "had to be called was not" in judged(CALLS["tool"])
    assert "no JSON object" in judged(CALLS["tool"], message={"content": None, "tool_calls": odd})
    assert "an answer in JSON is none" in judged(CALLS["JSON"])
    assert "ends with 'stop'" in judged(CALLS["cut at its length"])
    assert "without words" in judged(CALLS["whole"], message={"content": ""})
    assert "not read from a cache" in judged(CALLS["cache, read"])


@pytest.mark.parametrize(("name", "status"), [("unknown model", 404), ("bad value", 400), ("wrong key", 401)])
def test_a_refusal_is_read_as_whose_fault_it_is(name: str, status: int) -> None:
    """What is refused as it should be is well; an answer in its place, or another error, is told."""
    call, wire = CALLS[name], FORMATS["openai"]

    def said(status: int) -> list[str]:
        failure = wire.read_error(status, {}, b'{"error": {"message": "No."}}') if status >= 400 else None
        return list(complaints(call, Answered(status=status, body=b"", failure=failure), LIMITS, "gpt-4o"))

    assert said(status) == []
    assert "answered 200" in said(200)[0] and "read as 'status_500'" in said(500)[0]


def test_a_model_that_does_not_think_may_say_so() -> None:
    """A refusal of that one call is no fault."""
    failure = FORMATS["openai"].read_error(
        400, {}, b'{"error": {"message": "Unsupported.", "param": "reasoning_effort"}}'
    )
    answered = Answered(status=400, body=b"", failure=failure)

    assert list(complaints(CALLS["thinking"], answered, LIMITS, "gpt-4o")) == []
    assert list(complaints(CALLS["whole"], answered, LIMITS, "gpt-4o")) != []


def test_every_call_can_be_said_in_every_format() -> None:
    """Some fifteen of each; a PDF where the API has a place for it."""
    for name in FORMATS:
        calls = calls_for(TARGET.model, name)
        assert len(calls) >= 15 and len({call.name for call in calls}) == len(calls)
        assert ("PDF" in {call.name for call in calls}) == (name != "openai")


def test_a_recording_holds_no_secret_and_names_no_account(tmp_path: Path) -> None:
    """Keys of any provider's form, organisations, projects, mail addresses, and a host of one's own."""
    recording = Recording(["my own key"])
    said = "my own key sk-proj-abcdefghij org-AbCdEf123 proj_abc123def a.b@example.com "
    said += "AIzaSyA0123456789abcdefghij user-1234567"
    url, body = "https://acme.openai.azure.com/v1/chat/completions?key=abc", said.encode()
    headers = {"content-type": "application/json", "set-cookie": "a=b", "openai-organization": "acme"}
    recording.add("whole", url, body, 200, headers, body)
    recording.write(tmp_path / "deep" / "file.yaml")

    text = (tmp_path / "deep" / "file.yaml").read_text()
    for secret in (*said.split()[3:], "my own key", "acme", "a=b", "key=abc"):
        assert secret not in text
    assert "https://provider.example/v1/chat/completions" in text and "application/json" in text


@pytest.mark.parametrize(
    "url",
    [
        "https://bedrock-runtime.eu-west-1.amazonaws.com/model/arn%3Aaws%3Abedrock%3Aeu-west-1%3A123456789012%3A"
        "application-inference-profile%2Facme7/converse",
        "https://aiplatform.googleapis.com/v1/projects/acme-123456789012/locations/eu/publishers/google/models/x:y",
    ],
)
def test_a_recording_names_no_account_of_a_cloud(tmp_path: Path, url: str) -> None:
    """Neither where it was asked nor what AWS says of who may not."""
    said = b'{"message": "User: arn:aws:iam::123456789012:user/acme is not authorized on arn:aws:s3:::acme/*"}'
    recording = Recording([])
    recording.add("refused", url, b"{}", 403, {}, said)
    recording.write(tmp_path / "file.yaml")

    text = (tmp_path / "file.yaml").read_text()
    assert "acme" not in text and "123456789012" not in text
    assert "is not authorized" in text and ("/converse" in text or "/locations/eu" in text)


def test_a_stream_that_is_no_text_is_kept_as_it_is(tmp_path: Path) -> None:
    """Its bytes come back; a secret within is gone all the same."""
    recording = Recording(["my own key"])
    recording.add("stream", "https://provider.example/converse-stream", b"{}", 200, {}, b"\x00\xff\xfe my own key")
    recording.write(tmp_path / "file.yaml")

    (kept,) = yaml.safe_load((tmp_path / "file.yaml").read_text())["interactions"]
    assert kept["response"]["body"]["string"] == b"\x00\xff\xfe REDACTED"


def test_the_file_system_of_the_journal_is_found() -> None:
    """By the longest mount point above it."""
    lines = (
        *("1 0 8:1 / / rw - overlay overlay rw", "2 1 8:2 / /var/lib/tollgate rw shared:1 - ext4 /dev/sda rw"),
        "3 1 0:9 / /var/lib rw - tmpfs tmpfs rw",
    )

    places = ("/var/lib/tollgate/x", "/var/lib/tollgates", "/srv")
    assert [file_system_of(Path(path), "\n".join(lines)) for path in places] == ["ext4", "tmpfs", "overlay"]
