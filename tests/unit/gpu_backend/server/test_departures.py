# The front over HTTP: what happens when the engine or the client goes away in the middle.

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpu_backend.server import answers
from gpu_backend.server.client import engine_client
from gpu_backend.step.messages import Abort, Command, Event, FinishReason, Generate, NewTokens
from tests.support.fake_engine import TIMINGS, FakeEngine, silent
from tests.support.front import CHAT, running_front, token_ids


def begin_to_speak(command: Command) -> list[tuple[Event, ...]]:
    """Say three letters and nothing more."""
    if isinstance(command, Generate):
        return [(NewTokens(command.request_id, 0, tuple(token_ids("Hel"))),)]
    return silent(command)


def test_an_error_of_the_engine_before_the_first_token_has_a_status(engine: FakeEngine, http: httpx.Client) -> None:
    """Streams too: the status is sent only when there is something to stream."""
    engine.script = lambda command: (
        [(NewTokens(command.request_id, 0, (), finish_reason=FinishReason.ERROR, timings=TIMINGS, error="poison"),)]
        if isinstance(command, Generate)
        else []
    )
    for more in ({}, {"stream": True}):
        answer = http.post("/v1/chat/completions", json={**CHAT, **more})

        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
        assert "poison" in answer.json()["error"]["message"]


def test_a_stream_that_breaks_ends_in_an_error_and_no_done(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies in mid-reply, and none comes after it: the client is told, and does not take it for whole."""
    monkeypatch.setattr(engine_client, "RESTARTS", 0)
    engine = FakeEngine()
    engine.script = lambda c: (
        [(NewTokens(c.request_id, 0, tuple(token_ids("Hel"))),)] if isinstance(c, Generate) else []
    )
    with running_front(folder, engine) as url, httpx.Client(base_url=url, timeout=10) as http:
        with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            lines = response.iter_lines()
            first = next(line for line in lines if "Hel" in line)
            engine.process.die()
            rest = [line for line in lines if line]

        assert response.status_code == 200 and first
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_error"
        assert "data: [DONE]" not in rest


def test_a_stream_that_waits_says_that_the_engine_lives(
    engine: FakeEngine, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as its process reports: one that stands still is not said to live."""
    monkeypatch.setattr(answers, "SILENCE", 0.05)
    engine.script = begin_to_speak
    is_read = threading.Event()
    reports = threading.Thread(target=lambda: [engine.process.say() for _ in iter(lambda: is_read.wait(0.02), True)])
    with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}, timeout=3.0) as response:
        lines = response.iter_lines()
        reports.start()
        try:
            assert [next(line for line in lines if line.startswith(":")) for _ in range(3)] == [": alive"] * 3
        finally:
            is_read.set()
            reports.join()
        with pytest.raises(httpx.ReadTimeout):
            list(lines)


@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["plain", "streamed"])
def test_a_client_that_leaves_is_noticed(engine: FakeEngine, url: str, more: dict[str, Any]) -> None:
    """Before and after the first token, streamed or not, the engine hears of it."""
    engine.script = begin_to_speak
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({**CHAT, **more}).encode()
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        generate = engine.process.wait_for(lambda command: isinstance(command, Generate))
        if more:
            assert connection.recv(10)
    assert isinstance(generate, Generate)

    engine.process.wait_for(lambda command: command == Abort(generate.request_id))  # or it fails: no abort came


@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["plain", "streamed"])
def test_a_reply_that_misses_its_deadline_is_given_up(
    engine: FakeEngine, http: httpx.Client, more: dict[str, Any]
) -> None:
    """x-deadline-ms is kept: the reader gets a 504, the engine its room back."""
    engine.script = silent
    answer = http.post("/v1/chat/completions", json={**CHAT, **more}, headers={"x-deadline-ms": "30"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert isinstance(engine.process.wait_for(lambda command: isinstance(command, Abort)), Abort)
