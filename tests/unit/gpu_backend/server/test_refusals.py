# The front over HTTP: what is refused, with which words, before the engine hears of it.

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fake_engine import FakeEngine, speaking
from tests.support.front import CHAT, running_front, token_ids, write_small_files

RESUMED, STOPS = "resume_token_ids", "stop_token_ids"
TRANSFER = "kv_transfer_params"
HOLD = {"do_remote_decode": True}
BOTH = {**HOLD, "do_remote_prefill": True}
WRONG_TRANSFERS = [
    json.dumps({**CHAT, TRANSFER: BOTH}).encode(),
    json.dumps({**CHAT, TRANSFER: HOLD, "stream": True}).encode(),
    json.dumps({**CHAT, TRANSFER: {"remote_port": 2**16}}).encode(),
    json.dumps({**CHAT, TRANSFER: {"remote_host": "h" * 257}}).encode(),
    json.dumps({**CHAT, TRANSFER: {"remote_cached_tokens": -1}}).encode(),
]
TWO_PROMPTS = json.dumps({"model": "tiny", "prompt": ["a", "b"], TRANSFER: HOLD}).encode()
CROWD = json.dumps({"model": "tiny", "prompt": ["a"] * 17, "n": 128}).encode()  # 2,176 replies


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/v1/chat/completions", b"{", 400, "invalid_json", None),
        ("/v1/chat/completions", b'{"model": "tiny", "model": "x", "messages": []}', 400, "duplicate_key", "model"),
        ("/v1/chat/completions", b'{"model": "tiny", "messages": []}', 400, "invalid_value", "messages"),
        ("/v1/chat/completions", b'{"messages": []}', 400, "missing_required_parameter", "model"),
        ("/v1/chat/completions", b"\xff", 400, "invalid_json", None),
        ("/v1/chat/completions", json.dumps({**CHAT, "model": "other"}).encode(), 404, "model_not_found", "model"),
        ("/v1/chat/completions", json.dumps({**CHAT, "n": "2"}).encode(), 400, "invalid_type", "n"),
        ("/v1/completions", b'{"model": "tiny", "prompt": ""}', 400, "invalid_value", "prompt"),
        ("/v1/completions", b'{"model": "tiny", "prompt": []}', 400, "invalid_value", "prompt"),
        ("/v1/completions", b'{"model": "tiny", "prompt": [260]}', 400, "invalid_value", "prompt"),
        ("/v1/completions", b'{"model": "tiny", "prompt": [-1]}', 400, "invalid_value", "prompt"),
        ("/v1/completions", b'{"model":"tiny","prompt":"a","resume_token_ids":[999]}', 400, "invalid_value", RESUMED),
        ("/v1/completions", b'{"model": "tiny", "prompt": ["a", "b"], "resume_token_ids": [1]}', 400, None, "prompt"),
        ("/v1/completions", CROWD, 400, "invalid_value", "n"),
        ("/v1/completions", b'{"model":"tiny","prompt":"a","stop_token_ids":[260]}', 400, "invalid_value", STOPS),
        ("/v1/chat/completions", json.dumps({**CHAT, STOPS: [1] * 1025}).encode(), 400, "invalid_value", STOPS),
        ("/v1/chat/completions", json.dumps({**CHAT, "stop": "x" * 4097}).encode(), 400, "invalid_value", "stop"),
        ("/v1/completions", TWO_PROMPTS, 400, "invalid_value", TRANSFER),
        *(("/v1/chat/completions", body, 400, "invalid_value", TRANSFER) for body in WRONG_TRANSFERS),
        ("/v1/embeddings", b'{"model": "tiny", "input": ["a", ""]}', 400, "invalid_value", "input"),
        ("/v1/embeddings", b'{"model":"tiny","input":"a","dimensions":1}', 400, "unsupported_parameter", "dimensions"),
        ("/v1/nothing", b"{}", 404, "unknown_url", None),
        ("/v1/models", b"{}", 405, "method_not_supported", None),
    ],
)  # fmt: skip
def test_refusals_have_the_whole_error_object(
    engine: FakeEngine, http: httpx.Client, path: str, body: bytes, status: int, code: str | None, param: str | None
) -> None:
    """All four keys, the right status, and the engine never hears of it."""
    answer = http.post(path, content=body)
    error = answer.json()["error"]

    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    assert not engine.process.commands


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "x" * 60}]}, 77),
        ("/v1/completions", {"model": "tiny", "prompt": "x" * 64}, 64),
        ("/v1/completions", {"model": "tiny", "prompt": [5] * 65}, 65),
        ("/v1/embeddings", {"model": "tiny", "input": "x" * 65}, 65),
    ],
)
def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(
    engine: FakeEngine, http: httpx.Client, path: str, body: dict[str, Any], tokens: int
) -> None:
    """The message says what the model takes and what was sent; a prompt that leaves no room for a reply is too long."""
    answer = http.post(path, json=body)
    error = answer.json()["error"]

    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "64 tokens" in error["message"] and f"{tokens} tokens" in error["message"]
    assert not engine.process.commands


def test_a_body_that_is_too_long_is_refused_by_its_length(http: httpx.Client, url: str) -> None:
    """40 MiB are announced and never read."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 41943040\r\n\r\n{")
        head = connection.recv(65536)

    assert head.startswith(b"HTTP/1.1 413")
    assert b"request_too_large" in head


def test_a_model_without_a_template_serves_completions_only(tmp_path: Path) -> None:
    """Chat says what to use instead."""
    folder = write_small_files(tmp_path, chat_template=None)
    with running_front(folder, FakeEngine(speaking(token_ids("x")))) as url, httpx.Client(base_url=url) as http:
        chat = http.post("/v1/chat/completions", json=CHAT)
        completion = http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})

    assert (chat.status_code, "/v1/completions" in chat.json()["error"]["message"]) == (400, True)
    assert completion.json()["choices"][0]["text"] == "x"


def test_a_secret_is_demanded_of_everyone_but_the_health_check(folder: Path) -> None:
    """A wrong or missing bearer token is a 401 before the body is looked at."""
    with running_front(folder, FakeEngine(), api_key="s3cret") as url, httpx.Client(base_url=url) as http:
        missing = http.post("/v1/chat/completions", content=b"{")
        wrong = http.get("/load", headers={"authorization": "Bearer other"})
        right = http.get("/load", headers={"authorization": "Bearer s3cret"})
        health = http.get("/health")

    assert [missing.status_code, wrong.status_code, right.status_code, health.status_code] == [401, 401, 200, 200]
    assert missing.json()["error"]["code"] == "invalid_api_key"
