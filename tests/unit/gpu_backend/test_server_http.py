# The front over HTTP, with a scripted engine behind it: shapes, errors, and what happens when either side goes away.

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import pre_tokenizers

from gpu_backend.engine.messages import Abort, Embed, Generate, LoadReport, NewTokens
from gpu_backend.engine.sequence import FinishReason
from tests.support.fake_engine import READY, TIMINGS, FakeEngine, silent, speaking
from tests.support.front import END, running_front, write_small_files

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
RESUMED = "resume_token_ids"
LOAD_FIELDS = ["instance_id", "model_id", "status", "queue_depth", "running", "free_blocks", "total_blocks"]
LOAD_FIELDS += ["kv_utilization", "tokens_per_second", "requests_per_second", "prefix_hit_rate"]


def ids(text: str) -> list[int]:

    order = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [order[character] for character in "".join(part for part, _ in split)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_files(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def shared_engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def url(folder: Path, shared_engine: FakeEngine) -> Iterator[str]:
    with running_front(folder, shared_engine) as url:
        yield url


@pytest.fixture
def engine(shared_engine: FakeEngine) -> FakeEngine:
    """The engine behind ``url``; each test gives it a script."""
    shared_engine.script = speaking([*ids("Hello"), END], FinishReason.STOP)
    shared_engine.process.commands.clear()
    return shared_engine


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=10) as client:
        yield client


def chunks_of(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = response.text.split("\n\n")
    assert events.pop() == ""
    return [event if event == "data: [DONE]" else json.loads(event.removeprefix("data: ")) for event in events]


def test_a_chat_is_answered_whole(engine: FakeEngine, http: httpx.Client) -> None:
    """Text without the end token, its reason, and the usage with our own fields."""
    answer = http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "from-the-gateway"})
    body = answer.json()

    assert answer.headers["x-request-id"] == "from-the-gateway"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert (body["object"], body["model"], body["id"][:9]) == ("chat.completion", "tiny", "chatcmpl-")
    assert body["usage"] == {
        "prompt_tokens": len("<user>hi<assistant>"),
        "completion_tokens": 6,
        "total_tokens": len("<user>hi<assistant>") + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
        "cached_tokens": 0,
        "gpu_seconds": 0.25,
        "queue_ms": 1.0,
        "prefill_ms": 2.0,
        "decode_ms": 3.0,
    }


def test_a_stream_has_a_role_deltas_an_end_and_usage(engine: FakeEngine, http: httpx.Client) -> None:
    """Every chunk has the same id and, with include_usage, a null usage; the last has nothing but the usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    *chunks, last, done = chunks_of(http.post("/v1/chat/completions", json={**CHAT, **options}))
    choices = [chunk["choices"][0] for chunk in chunks]

    assert done == "data: [DONE]"
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello"
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "stop")
    assert [token for choice in choices for token in choice.get("token_ids", [])] == [*ids("Hello"), END]
    assert all(chunk["usage"] is None and chunk["id"] == last["id"] for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)


def test_without_include_usage_no_chunk_speaks_of_it(engine: FakeEngine, http: httpx.Client) -> None:
    """A client that did not ask must not meet a chunk without choices."""
    *chunks, _ = chunks_of(http.post("/v1/chat/completions", json={**CHAT, "stream": True}))

    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_the_gateways_headers_and_fields_reach_the_engine(engine: FakeEngine, http: httpx.Client) -> None:
    """Tenant, weight, tier, deadline and what is resumed travel in the command."""
    headers = {"x-tenant": "team_a", "x-weight": "3", "x-tier": "batch", "x-deadline-ms": "900"}
    resumed = {"resume_token_ids": ids("Oh: "), "resume_text_chars": 2, "seed": 5, "max_tokens": 40}
    body = http.post("/v1/chat/completions", json={**CHAT, **resumed}, headers=headers).json()
    (command,) = [command for command in engine.process.commands if isinstance(command, Generate)]

    assert (command.tenant, command.weight, command.tier, command.deadline_ms) == ("team_a", 3.0, "batch", 900)
    assert (command.resume_token_ids, command.sampling.seed) == (tuple(ids("Oh: ")), 5)
    assert body["choices"][0]["message"]["content"] == ": Hello"
    assert body["usage"]["completion_tokens"] == 4 + 6


def test_the_reply_may_fill_what_is_left_of_the_context(engine: FakeEngine, http: httpx.Client) -> None:
    """Without max_tokens a chat reply ends by itself or with the context; more than that is not asked of the engine."""
    prompt = len("<user>hi<assistant>")
    for more in ({}, {"max_tokens": 1000}, {"max_completion_tokens": 5}):
        http.post("/v1/chat/completions", json={**CHAT, **more})
    limits = [command.sampling.max_tokens for command in engine.process.commands if isinstance(command, Generate)]

    assert limits == [64 - prompt, 64 - prompt, 5]


def test_a_stop_string_stops_the_engine_too(engine: FakeEngine, http: httpx.Client) -> None:
    """The reply ends before the stop string; the engine is told, and its last word brings the timings."""
    heard = speaking(ids("one STOP two"))

    def script(command: Any) -> Any:
        return heard(command)[:10] if isinstance(command, Generate) else silent(command)

    engine.script = script
    body = http.post("/v1/chat/completions", json={**CHAT, "stop": ["STOP"]}).json()

    assert (body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]) == ("one ", "stop")
    assert (body["usage"]["completion_tokens"], body["usage"]["gpu_seconds"]) == (8, 0.25)
    assert [command.reply_index for command in engine.process.commands if isinstance(command, Abort)] == [0]


def test_completions_number_replies_prompt_by_prompt(engine: FakeEngine, http: httpx.Client) -> None:
    """Two prompts with two replies each are four choices; echo puts each prompt before its own."""
    asked = {"model": "tiny", "prompt": ["ab", "cd"], "n": 2, "echo": True, "return_token_ids": True}
    body = http.post("/v1/completions", json=asked).json()

    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "abHello"),
        (1, "abHello"),
        (2, "cdHello"),
        (3, "cdHello"),
    ]
    assert (body["object"], body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (
        "text_completion",
        4,
        24,
    )
    assert body["choices"][3]["token_ids"] == [*ids("Hello"), END]


def test_streamed_completions_join_to_the_whole(engine: FakeEngine, http: httpx.Client) -> None:
    """Echo comes once, before the first piece of its reply."""
    asked = {"model": "tiny", "prompt": [ids("ab")], "n": 2, "echo": True}
    whole = http.post("/v1/completions", json=asked).json()
    *chunks, _ = chunks_of(http.post("/v1/completions", json={**asked, "stream": True}))
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]

    assert texts == [choice["text"] for choice in whole["choices"]] == ["abHello", "abHello"]


def test_an_echo_alone_needs_no_engine(engine: FakeEngine, http: httpx.Client) -> None:
    """max_tokens 0 with echo returns the prompt."""
    body = http.post("/v1/completions", json={"model": "tiny", "prompt": "ab", "max_tokens": 0, "echo": True}).json()

    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("ab", "length")
    assert body["usage"]["completion_tokens"] == 0
    assert not engine.process.commands


def test_embeddings_come_as_floats_or_base64(engine: FakeEngine, http: httpx.Client) -> None:
    """Base64 is little-endian float32; the order is the input's."""
    asked = {"model": "tiny", "input": ["a", "bc"]}
    floats = http.post("/v1/embeddings", json=asked).json()
    packed = http.post("/v1/embeddings", json={**asked, "encoding_format": "base64"}).json()

    assert [(d["index"], d["embedding"]) for d in floats["data"]] == [(0, [1.0, 0.0]), (1, [1.0, 0.0])]
    assert struct.unpack("<2f", b64decode(packed["data"][0]["embedding"])) == (1.0, 0.0)
    assert (floats["usage"]["prompt_tokens"], floats["usage"]["total_tokens"]) == (3, 3)
    assert "completion_tokens" not in floats["usage"]
    assert [c.prompt_token_ids for c in engine.process.commands[:2] if isinstance(c, Embed)] == [
        tuple(ids("a")),
        tuple(ids("bc")),
    ]


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/v1/chat/completions", b"{", 400, "invalid_json", None),
        ("/v1/chat/completions", b'{"model": "tiny", "model": "x", "messages": []}', 400, "duplicate_key", "model"),
        ("/v1/chat/completions", b'{"model": "tiny", "messages": []}', 400, "invalid_value", "messages"),
        ("/v1/chat/completions", b'{"messages": []}', 400, "missing_required_parameter", "model"),
        ("/v1/chat/completions", b"\xff", 400, None, None),
        ("/v1/chat/completions", json.dumps({**CHAT, "model": "other"}).encode(), 404, "model_not_found", "model"),
        ("/v1/chat/completions", json.dumps({**CHAT, "n": "2"}).encode(), 400, "invalid_type", "n"),
        ("/v1/completions", b'{"model": "tiny", "prompt": ""}', 400, "invalid_value", "prompt"),
        ("/v1/completions", b'{"model": "tiny", "prompt": []}', 400, "invalid_value", "prompt"),
        ("/v1/completions", b'{"model": "tiny", "prompt": [260]}', 400, "invalid_value", "prompt"),
        ("/v1/completions", b'{"model": "tiny", "prompt": [-1]}', 400, "invalid_value", "prompt"),
        ("/v1/completions", b'{"model":"tiny","prompt":"a","resume_token_ids":[999]}', 400, "invalid_value", RESUMED),
        ("/v1/completions", b'{"model": "tiny", "prompt": ["a", "b"], "resume_token_ids": [1]}', 400, None, "prompt"),
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
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 41943040\r\n\r\n{")
        head = connection.recv(65536)

    assert head.startswith(b"HTTP/1.1 413")
    assert b"request_too_large" in head


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


def test_a_stream_that_breaks_ends_in_an_error_and_no_done(folder: Path) -> None:
    """The process dies in mid-reply: the client is told, and does not take what it has for whole."""
    engine = FakeEngine()
    engine.script = lambda c: [(NewTokens(c.request_id, 0, tuple(ids("Hel"))),)] if isinstance(c, Generate) else []
    with running_front(folder, engine) as url, httpx.Client(base_url=url, timeout=10) as http:
        with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            lines = response.iter_lines()
            first = next(line for line in lines if "Hel" in line)
            engine.process.die()
            rest = [line for line in lines if line]

        assert response.status_code == 200 and first
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_error"
        assert "data: [DONE]" not in rest


@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["plain", "streamed"])
def test_a_client_that_leaves_is_noticed(engine: FakeEngine, url: str, more: dict[str, Any]) -> None:
    """Before and after the first token, streamed or not, the engine hears of it."""
    engine.script = lambda c: (
        [(NewTokens(c.request_id, 0, tuple(ids("Hel"))),)] if isinstance(c, Generate) else silent(c)
    )
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({**CHAT, **more}).encode()
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        generate = engine.process.wait_for(lambda command: isinstance(command, Generate))
        if more:
            assert connection.recv(10)
    abort = engine.process.wait_for(lambda command: isinstance(command, Abort))

    assert isinstance(generate, Generate)
    assert abort == Abort(generate.request_id)


def test_a_model_without_a_template_serves_completions_only(tmp_path: Path) -> None:
    """Chat says what to use instead."""
    folder = write_small_files(tmp_path, chat_template=None)
    with running_front(folder, FakeEngine(speaking(ids("x")))) as url, httpx.Client(base_url=url) as http:
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


def test_health_and_load_speak_of_the_engines_state(folder: Path) -> None:
    """Starting is a 503 that says so; a draining engine is healthy and takes nothing."""
    engine = FakeEngine(is_ready=False)
    with running_front(folder, engine) as url, httpx.Client(base_url=url) as http:
        starting = http.get("/health")
        refused = http.post("/v1/chat/completions", json=CHAT)
        engine.process.say(LoadReport(1, 2, 3, 8, 0.5, 6.0, 7.0, 0.25))

        engine.process.say(READY)
        while http.get("/health").status_code != 200:
            pass
        load = http.get("/load").json()
        drained = http.post("/drain")
        draining = http.post("/v1/chat/completions", json=CHAT)

        assert (starting.status_code, starting.json()["status"]) == (503, "starting")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert list(load) == LOAD_FIELDS
        assert (load["instance_id"], load["status"], load["kv_utilization"]) == ("front-1", "active", 0.5)
        assert drained.json()["status"] == http.get("/load").json()["status"] == "draining"
        assert (draining.status_code, draining.json()["error"]["code"]) == (503, "overloaded")
        assert http.get("/health").status_code == 200


def test_the_model_list_shows_the_one_model(http: httpx.Client) -> None:
    """Another name is a 404 in OpenAI's shape."""
    listed = http.get("/v1/models").json()

    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert http.get("/v1/models/tiny").json() == listed["data"][0]
    assert http.get("/v1/models/org/other").json()["error"]["code"] == "model_not_found"


def test_metrics_count_what_was_answered(engine: FakeEngine, http: httpx.Client) -> None:
    """Under vLLM's names where they mean the same."""

    def value(name: str) -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))

    before = value("vllm:generation_tokens_total"), value("vllm:request_success_total")
    http.post("/v1/chat/completions", json={**CHAT, "n": 2})

    assert value("vllm:generation_tokens_total") == before[0] + 12
    assert value("vllm:request_success_total") == before[1] + 2
    assert value("tollgate_engine_up") == 1


def test_the_front_never_imports_torch(folder: Path) -> None:
    """The weights live in another process; what listens stays small and starts at once."""
    program = (
        "import sys, gpu_backend.__main__; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert ran.stdout.strip() == "[]"
