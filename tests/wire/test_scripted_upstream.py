# The scripted upstream is a judge, so it is judged first: strict where OpenAI is, and wrong only when told to be.

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.upstream_scripts import NAMED, Fault, Script, parse_script
from tests.support.waiting import until

HELLO: dict[str, Any] = {"model": "gpt-4o", "messages": [{"role": "user", "content": "Hello"}]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def running() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream() as upstream:
        yield upstream


@pytest.fixture
def upstream(running: ScriptedUpstream) -> ScriptedUpstream:
    running.forget()
    return running


def post(upstream: ScriptedUpstream, body: dict[str, Any], **headers: str) -> httpx.Response:
    sent = {"authorization": "Bearer sk-upstream", **{name.replace("_", "-"): value for name, value in headers.items()}}
    with httpx.Client(timeout=10.0) as client:
        return client.post(f"{upstream.url}/chat/completions", json=body, headers=sent)


def said_by(turns: list[dict[str, Any]]) -> dict[str, Any]:
    return {**HELLO, "messages": turns}


@pytest.mark.parametrize(
    "body",
    [
        {**HELLO, "surprise": 1},
        {**HELLO, "stream_options": {"include_usage": True}},
        {**HELLO, "max_tokens": 5, "max_completion_tokens": 5},
        {**HELLO, "temperature": 3},
        {**HELLO, "top_logprobs": 3},
        {**HELLO, "tool_choice": "auto"},
        {**HELLO, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {**HELLO, "response_format": {"type": "json_object"}},
        said_by([]),
        said_by([{"role": "robot", "content": "beep"}]),
        said_by([{"role": "user", "content": "Hi", "surprise": 1}]),
        said_by([{"role": "assistant"}]),
        said_by([{"role": "tool", "content": "12:00", "tool_call_id": "call_1"}]),
        said_by([{"role": "assistant", "tool_calls": [CALL]}, {"role": "user", "content": "Well?"}]),
    ],
    ids=lambda body: json.dumps(body)[-70:],
)
def test_what_openai_refuses_is_refused_and_noted(upstream: ScriptedUpstream, body: dict[str, Any]) -> None:
    """A 400 with all four keys, and a violation that a test can see."""
    answer = post(upstream, body)

    assert answer.status_code == 400
    assert list(answer.json()["error"]) == ["message", "type", "param", "code"]
    assert len(upstream.violations) == 1


@pytest.mark.parametrize("name", ["cookie", "x_team_id", "x_tier", "x_api_key", "x_stainless_lang", "traceparent"])
def test_a_header_that_leaked_is_noted(upstream: ScriptedUpstream, name: str) -> None:
    """Nothing of a client's headers has business upstream."""
    assert post(upstream, HELLO, **{name: "1"}).status_code == 400
    assert "no provider should see" in upstream.violations[0]


@pytest.mark.parametrize("key", ["", "Bearer tg-a-teams-key"])
def test_only_a_providers_key_is_taken(upstream: ScriptedUpstream, key: str) -> None:
    """A team's own key upstream would be the worst of leaks."""
    assert post(upstream, HELLO, authorization=key).status_code == 401
    assert upstream.violations


def test_the_same_question_has_the_same_answer_however_it_is_sent(upstream: ScriptedUpstream) -> None:
    """Streamed and whole, the words and the usage are equal."""
    whole = post(upstream, HELLO).json()
    streamed = post(upstream, {**HELLO, "stream": True, "stream_options": {"include_usage": True}}).text
    chunks = [json.loads(event[6:]) for event in streamed.split("\n\n")[:-2]]

    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert streamed.endswith("data: [DONE]\n\n") and len({chunk["id"] for chunk in chunks}) == 1
    assert upstream.violations == []


def test_prepared_answers_are_the_same_bytes() -> None:
    """What load is measured with differs in nothing but its cost (and the number in the id)."""
    bodies = [HELLO, {**HELLO, "stream": True}, {**HELLO, "stream": True, "stream_options": {"include_usage": True}}]
    with ScriptedUpstream() as careful, ScriptedUpstream(fast=True) as fast:
        for number, body in enumerate(bodies):
            slow_text = post(careful, body).text.replace(f'{number}","object', '0","object')

            assert post(fast, body).text == slow_text


def test_prepared_answers_come_with_the_list_of_models() -> None:
    """A router in front looks there before it sends a call."""
    with ScriptedUpstream(models=("gpt-4o", "gpt-4o:tokens=16"), fast=True) as fast:
        listed = httpx.get(f"{fast.url}/models", headers={"authorization": "Bearer sk-upstream"}, timeout=10.0).json()

    assert [model["id"] for model in listed["data"]] == ["gpt-4o", "gpt-4o:tokens=16"]


@pytest.mark.parametrize("name", NAMED)
def test_every_script_can_be_played(upstream: ScriptedUpstream, name: str) -> None:
    """Each ends in an answer, a broken connection or silence, for streamed and for plain calls."""
    falls_silent = name in (Fault.HANG, Fault.HANG_BEFORE_HEADERS, Fault.ROLE_ONLY, Fault.PINGS_ONLY, Fault.LATE_END)
    for body in (HELLO, {**HELLO, "stream": True}):
        upstream.script(name, times=1)
        outcome: object
        try:
            with httpx.stream(
                "POST",
                f"{upstream.url}/chat/completions",
                json=body,
                headers={"authorization": "Bearer sk-upstream"},
                timeout=0.3 if falls_silent and (name != Fault.LATE_END or "stream" in body) else 10.0,
            ) as answer:
                outcome = answer.status_code
                until = time.monotonic() + 1.0
                for _ in answer.iter_raw():
                    if time.monotonic() > until:
                        break
        except httpx.HTTPError as exc:
            outcome = type(exc)

        if "reset" in name or name == Fault.BROKEN:
            assert outcome in (httpx.ReadError, httpx.RemoteProtocolError)
        elif name in (Fault.LOST_END, Fault.LATE_END):
            broken = httpx.ReadTimeout if falls_silent else httpx.ReadError
            assert outcome is broken if "stream" in body else outcome == 200
        elif name == Fault.PINGS_ONLY:
            assert outcome in (200, httpx.ReadTimeout)
        elif falls_silent:
            assert outcome is httpx.ReadTimeout
        else:
            assert outcome == NAMED[name].status
    assert upstream.violations == []


def test_a_client_that_leaves_is_noticed(upstream: ScriptedUpstream) -> None:
    """The moment is recorded: tests of cancellation measure by it."""
    upstream.script("hang,after=1")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{upstream.url}/chat/completions",
            json={**HELLO, "stream": True},
            headers={"authorization": "Bearer sk-upstream"},
            timeout=0.2,
        )
    until(lambda: upstream.requests[0].closed_at)

    assert 0.15 < (upstream.requests[0].closed_after or 0) < 10
    assert upstream.requests[0].tokens_sent == 1


def test_scripts_are_chosen_by_order_model_and_key(upstream: ScriptedUpstream) -> None:
    """An order from the test comes first and runs out; then the model's suffix; then the key's."""
    upstream.script("503", times=1)
    one = post(upstream, {**HELLO, "model": "gpt-4o:500"}).status_code
    two = post(upstream, {**HELLO, "model": "gpt-4o:500"}).status_code
    three = post(upstream, HELLO, authorization="Bearer sk-second:529").status_code

    assert (one, two, three) == (503, 500, 529)


def test_a_script_can_be_written_as_text() -> None:
    """A name, then fields; numbers are read as numbers."""
    assert parse_script("reset,after=3,pace=0.02") == Script(fault=Fault.RESET, after=3, pace=0.02)
    assert parse_script("tokens=16") == Script(tokens=16)
    assert parse_script("429-seconds,retry_after=7").retry_after == "7"
