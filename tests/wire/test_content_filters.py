# What upstreams say when a content filter of their own refuses a call: each in its words, all of them one error.

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.upstreams.anthropic.wire_format import AnthropicFormat
from gateway.upstreams.openai.wire_format import OpenAIFormat
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFiltered
from tests.wire.traffic import CHAT, read_stream

FOUND = {"hate": {"filtered": True, "severity": "high"}, "violence": {"filtered": False}, "a\nb": {"filtered": True}}
AZURE = {
    "message": "The response was filtered.",
    "type": None,
    "param": "prompt",
    "code": "content_filter",
    "innererror": {"code": "ResponsibleAIPolicyViolation", "content_filter_result": FOUND},
}
XAI = {
    "code": "The caller does not have permission to execute the specified operation",
    "error": "Content violates usage guidelines. Team: t-1, API key ID: k-1, Failed check: SAFETY_CHECK_TYPE_BIO",
}
OPENROUTER = {"code": 403, "message": 'Your input was flagged for "x".', "metadata": {"reasons": ["violence", 5]}}
ANTHROPIC = {"type": "invalid_request_error", "message": "Output blocked by content filtering policy"}
OPENAI = {"code": "invalid_prompt", "message": "Your prompt was flagged as potentially violating our usage policy."}

SAID: list[tuple[int, Any, str]] = [
    (400, {"error": AZURE}, "this call (hate): The response was filtered."),
    (400, {"error": OPENAI}, f"this call: {OPENAI['message']}"),
    (400, {"error": {"message": "Bad words.", "code": "data_inspection_failed"}}, "this call: Bad words."),
    (400, {"error": {"message": "Content Exists Risk", "type": "invalid_request_error"}}, "Content Exists Risk"),
    (403, {"error": OPENROUTER}, "this call (violence)."),
    (403, XAI, "this call."),  # its words name the house's account
    (400, {"type": "error", "error": ANTHROPIC}, ANTHROPIC["message"]),
]


@pytest.mark.parametrize("wire", [OpenAIFormat(), AnthropicFormat()], ids=["openai", "anthropic"])
@pytest.mark.parametrize(("status", "said", "words"), SAID, ids=lambda value: str(value)[:30])
def test_a_filter_refuses_the_call_and_not_the_key(wire: Any, status: int, said: Any, words: str) -> None:
    """Whatever the status, it is the caller's 400 under one code; no other target is asked, no key set aside."""
    error = wire.read_error(status, {}, json.dumps(said).encode())

    assert isinstance(error, UpstreamFiltered)
    assert (error.status, error.code, error.moves_on, error.outcome) == (
        400,
        "content_policy_violation",
        False,
        "filtered",
    )
    assert error.message.endswith(words)


@pytest.mark.parametrize("wire", [OpenAIFormat(), AnthropicFormat()], ids=["openai", "anthropic"])
def test_a_refused_key_is_still_one(wire: Any) -> None:
    """A 403 that speaks of no content is about the house's key."""
    error = wire.read_error(403, {}, json.dumps({"error": {"message": "Not from here.", "code": "country"}}).encode())

    assert (error.status, error.outcome) == (502, "refused_key")


@pytest.mark.parametrize(
    ("wire", "frames"),
    [
        (OpenAIFormat(), f"data: {json.dumps({'error': AZURE})}\n\n"),
        (AnthropicFormat(), f"event: error\ndata: {json.dumps({'type': 'error', 'error': ANTHROPIC})}\n\n"),
    ],
    ids=["openai", "anthropic"],
)
def test_a_filter_that_speaks_in_a_stream_is_no_fault_of_the_upstream(wire: Any, frames: str) -> None:
    """Neither retried nor counted against its endpoint, as an error in a stream is otherwise."""
    assert read_stream(wire.open_events(CHAT), [frames.encode()]) == ([], "filtered")


def test_a_filter_that_speaks_under_a_200_is_understood() -> None:
    """OpenRouter sends what goes wrong while a model speaks as the body of an answer."""
    with pytest.raises(UpstreamFiltered):
        OpenAIFormat().read_reply(CHAT, json.dumps({"error": OPENROUTER}).encode())
    with pytest.raises(UpstreamError):
        OpenAIFormat().read_reply(CHAT, json.dumps({"error": {"code": 502, "message": "Provider is down."}}).encode())
