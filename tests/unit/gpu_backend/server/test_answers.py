# The front over HTTP, with a scripted engine behind it: what is answered, whole and streamed.

from __future__ import annotations

import json
import struct
from base64 import b64decode
from typing import Any

import httpx
import pytest

from gpu_backend.step.messages import Abort, Embed, FinishReason, Generate, NewTokens
from tests.support.fake_engine import FakeEngine, silent, speaking
from tests.support.front import CHAT, END, token_ids


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
        "first_token_steps": 2,
    }


def test_a_stream_has_a_role_deltas_an_end_and_usage(engine: FakeEngine, http: httpx.Client) -> None:
    """Every chunk has the same id and, with include_usage, a null usage; the last has nothing but the usage. The end
    token comes with the end, not in a chunk of its own."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    *chunks, last, done = chunks_of(http.post("/v1/chat/completions", json={**CHAT, **options}))
    choices = [chunk["choices"][0] for chunk in chunks]

    assert done == "data: [DONE]"
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello"
    assert all(choice["delta"]["content"] for choice in choices[1:-1])
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "stop")
    assert [token for choice in choices for token in choice.get("token_ids", [])] == [*token_ids("Hello"), END]
    assert all(chunk["usage"] is None and chunk["id"] == last["id"] for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)


def test_each_chunk_tells_the_usage_so_far_where_that_is_asked_for(engine: FakeEngine, http: httpx.Client) -> None:
    """As vLLM has it: ``continuous_usage_stats`` beside ``include_usage``. The prompt is in the headers, too."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = http.post("/v1/chat/completions", json={**CHAT, "stream": True, "stream_options": options})
    *chunks, last, _ = chunks_of(answer)
    made = [chunk["usage"]["completion_tokens"] for chunk in chunks]

    assert {chunk["usage"]["prompt_tokens"] for chunk in [*chunks, last]} == {len("<user>hi<assistant>")}
    assert made == sorted(made) and 0 < made[0] <= made[-1] == 6
    assert (answer.headers["x-prompt-tokens"], answer.headers["x-cached-tokens"]) == (
        str(len("<user>hi<assistant>")),
        "0",
    )


@pytest.mark.parametrize(
    ("path", "asked"), [("chat/completions", CHAT), ("completions", {"model": "tiny", "prompt": "hi"})]
)
def test_a_stream_may_tell_its_device_time_as_it_goes(
    engine: FakeEngine, http: httpx.Client, path: str, asked: dict[str, Any]
) -> None:
    """Who leaves before the usage comes has heard it; who did not ask hears nothing."""

    def script(command: Any) -> Any:
        tokens = enumerate(token_ids("Hello") if isinstance(command, Generate) else [], 1)
        ends = {5: FinishReason.LENGTH}
        return [
            (NewTokens(command.request_id, 0, (t,), finish_reason=ends.get(i), gpu_seconds=i / 8),) for i, t in tokens
        ]

    engine.script = script
    *told, _ = chunks_of(http.post(f"/v1/{path}", json={**asked, "stream": True, "return_gpu_seconds": True}))
    *silent_ones, _ = chunks_of(http.post(f"/v1/{path}", json={**asked, "stream": True}))
    seconds = [choice["gpu_seconds"] for chunk in told for choice in chunk["choices"] if "gpu_seconds" in choice]

    assert seconds == [1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8]
    assert not any("gpu_seconds" in choice for chunk in silent_ones for choice in chunk["choices"])


def test_without_include_usage_no_chunk_speaks_of_it(engine: FakeEngine, http: httpx.Client) -> None:
    """A client that did not ask must not meet a chunk without choices."""
    *chunks, _ = chunks_of(http.post("/v1/chat/completions", json={**CHAT, "stream": True}))

    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_the_gateways_headers_and_fields_reach_the_engine(engine: FakeEngine, http: httpx.Client) -> None:
    """Tenant, weight, tier, deadline and what is resumed travel in the command."""
    headers = {"x-tenant": "team_a", "x-weight": "3", "x-tier": "batch", "x-deadline-ms": "900000"}
    resumed = {"resume_token_ids": token_ids("Oh: "), "resume_text_chars": 2, "seed": 5, "max_tokens": 40}
    body = http.post("/v1/chat/completions", json={**CHAT, **resumed}, headers=headers).json()
    (command,) = [command for command in engine.process.commands if isinstance(command, Generate)]

    assert (command.tenant, command.weight, command.tier, command.deadline_ms) == ("team_a", 3.0, "batch", 900_000)
    assert (command.resume_token_ids, command.sampling.seed) == (tuple(token_ids("Oh: ")), 5)
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
    heard = speaking(token_ids("one STOP two"))

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
    assert body["choices"][3]["token_ids"] == [*token_ids("Hello"), END]


def test_streamed_completions_join_to_the_whole(engine: FakeEngine, http: httpx.Client) -> None:
    """Echo comes once, before the first piece of its reply."""
    asked = {"model": "tiny", "prompt": [token_ids("ab")], "n": 2, "echo": True}
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
        tuple(token_ids("a")),
        tuple(token_ids("bc")),
    ]
