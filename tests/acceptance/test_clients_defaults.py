# What clients send without being told to, in their own bytes, and what they do when they are set up wrongly: it works,
# or the answer says what to set.

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.house import House
from tests.support.scripted_upstream import ScriptedUpstream

VERSION = {"anthropic-version": "2023-06-01"}
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(autouse=True)
def _strict(upstream: ScriptedUpstream) -> Iterator[None]:
    upstream.forget()
    yield
    assert upstream.violations == []


def post(house: House, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    with house.client() as client:
        return client.post(path, json=body, headers=headers)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/v1/responses", "Is /v1/responses meant? The client's base URL has one /v1 too many."),
        ("/v1/assistants", "The Assistants API"),
        ("/v1/models/small:generateContent", "Gemini's API"),
        ("/v1beta/models/small:streamGenerateContent", "Gemini's API"),
        ("/messages/batches", "Is /v1/messages/batches meant? The client's base URL ends without its /v1."),
        ("/chat/completions", "Is /v1/chat/completions meant? The client's base URL ends without its /v1."),
        ("/v1/v1/chat/completions", "Is /v1/chat/completions meant? The client's base URL has one /v1 too many."),
        ("/v1/chat/completions/chat/completions", "Is /v1/chat/completions meant? Base URLs end in /v1"),
        ("/openai/deployments/small/chat", "GET /openapi.json lists what there is."),
        ("/embeddings", "Is /v1/embeddings meant? The client's base URL ends without its /v1."),
        ("/v1/v1/messages", "Is /v1/messages meant? The client's base URL has one /v1 too many."),
        ("/messages", "Is /v1/messages meant? The client's base URL ends without its /v1."),
        ("/v1/fine_tuning/jobs", "GET /openapi.json lists what there is."),
    ],
)
def test_a_client_at_the_wrong_url_hears_which_is_right(house: House, path: str, words: str) -> None:
    """The base URL is what most people set wrongly, and some clients ask for what was stored with a response."""
    answer = post(house, path, {"model": "small", "messages": [USER]})
    dialect = post(house, path, {"model": "small", "messages": [USER]}, **VERSION)

    assert (answer.status_code, dialect.status_code) == (404, 404)
    told = answer.json()["error"]["message"]
    assert told.startswith(f"Unknown request URL: POST {path}. ") and words in told
    assert dialect.json()["type"] == "error" and dialect.json()["error"]["message"] == told


@pytest.mark.parametrize("model", ["small", "claude"])
@pytest.mark.parametrize(
    "said",
    [
        {"tools": []},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tool_choice": "none"},
        {"functions": None, "function_call": None, "tools": None, "tool_choice": None},
        {"stream": False, "stream_options": None, "n": 1, "best_of": 1, "use_beam_search": False, "top_logprobs": 0},
        {"store": False, "metadata": {}, "service_tier": "auto", "user": "u", "safety_identifier": "s"},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "verbosity": "medium", "modalities": ["text"]},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "ignore_eos": True},
        {"temperature": 0.0, "repetition_penalty": 1.0, "top_p": 1.0, "top_k": -1, "stop": None, "logprobs": None},
        {"response_format": {"type": "text"}, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}},
    ],
    ids=str,
)
def test_what_frameworks_say_by_default_is_no_obstacle(house: House, model: str, said: dict[str, Any]) -> None:
    """Whatever means nothing, or what is so anyway, refuses no call."""
    answer = post(house, "/v1/chat/completions", {"model": model, "messages": [USER], "max_tokens": 5, **said})

    assert answer.status_code == 200, answer.text


def test_a_json_object_of_claude_comes_as_the_text_of_its_answer(house: House) -> None:
    """Its dialect has schemas alone; the models that know no other way refuse it by name (tests/wire)."""
    body = {"model": "claude", "messages": [USER], "response_format": {"type": "json_object"}}
    (choice,) = post(house, "/v1/chat/completions", body).json()["choices"]

    assert isinstance(json.loads(choice["message"]["content"]), dict) and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("service_tier", "flex", """Leave it out, or send "auto" or "default"."""),
        ("functions", [{"name": "f", "parameters": {}}], "Send 'tools'."),
        ("prediction", {"type": "content", "content": "a"}, "Leave it out."),
    ],
)
def test_what_has_no_price_is_refused_with_what_would_do(house: House, field: str, value: object, words: str) -> None:
    """Nothing that costs something else is left out in silence."""
    error = post(house, "/v1/chat/completions", {"model": "small", "messages": [USER], field: value}).json()["error"]

    assert (error["code"], error["param"]) == ("unsupported_parameter", field)
    assert error["message"].endswith(words)


def test_a_part_that_no_model_takes_is_told_with_those_that_do(house: House) -> None:
    """The names of what would be right stand in the refusal."""
    part = {"type": "input_video", "input_video": {}}
    body = {"model": "small", "messages": [{"role": "user", "content": [part]}]}
    error = post(house, "/v1/chat/completions", body).json()["error"]

    assert error["param"] == "messages[0].content[0].type"
    assert error["message"].endswith("Known here: text, image_url, file, input_audio, refusal.")


@pytest.mark.parametrize("stream", [False, True])
def test_auto_goes_on_where_a_model_lacks_a_parameter(house: House, upstream: ScriptedUpstream, stream: bool) -> None:
    """Who leaves the choice to us need not know which of our models knows what: our own engine knows no effort."""
    upstream.script("status=400,type=invalid_request_error,code=unsupported_parameter", model="small")
    asked = {"model": "auto", "messages": [USER], "reasoning_effort": "low", "stream": stream}
    answer = post(house, "/v1/chat/completions", asked)

    assert answer.status_code == 200, answer.text
    record = house.record_of(answer)
    assert record["model_used"] == "large"
    assert [each["outcome"] for each in record["attempts"]] == ["refused", "ok"]


def test_many_stops_are_for_the_model_to_take(house: House) -> None:
    """Editors complete code with a dozen of them; four is a limit of OpenAI's alone."""
    stops = [f"<stop_{number}>" for number in range(17)]
    asked = {"model": "claude", "messages": [USER], "max_tokens": 5}
    fine = post(house, "/v1/chat/completions", asked | {"stop": stops[:16]})
    more = post(house, "/v1/chat/completions", asked | {"stop": stops})

    assert (fine.status_code, more.status_code) == (200, 400)
    assert "at most 16" in more.json()["error"]["message"]


def test_models_are_listed_in_the_callers_dialect(house: House) -> None:
    """Anthropic's package reads names, dates and limits of them; a name that is unknown is its own error."""
    import anthropic

    with anthropic.Anthropic(base_url=house.url, api_key=house.team_key, max_retries=0) as client:
        listed = list(client.models.list())
        shown = client.models.retrieve("old-name")
        with pytest.raises(anthropic.NotFoundError) as unknown:
            client.models.retrieve("nobody")
    with house.client() as plain:
        names = [model["id"] for model in plain.get("/v1/models").json()["data"]]

    assert [model.id for model in listed] == names
    assert all(model.type == "model" and model.display_name and model.created_at.year > 2025 for model in listed)
    assert (shown.id, shown.max_input_tokens, shown.max_tokens) == ("old-name", 8192, 1024)
    body: Any = unknown.value.body
    assert body["error"]["type"] == "not_found_error"


# As Claude Code asks: beta headers, ?beta=true, blocks with marks for the cache, a tool with more to it than we know,
# and instructions among the turns.
CODING: dict[str, Any] = {
    "max_tokens": 32000,
    "system": [{"type": "text", "text": "You help with code.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>\nIt is Sunday.\n</system-reminder>"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I shall look.", "signature": ""},
            {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a.py"},
             "caller": {"type": "direct"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "print(1)"}]},
        ]},
        {"role": "system", "content": "The user has opened b.py."},
        {"role": "assistant", "content": [{"type": "text", "text": "It prints 1."}]},
        {"role": "user", "content": [{"type": "text", "text": "And b?", "cache_control": {"type": "ephemeral"}}]},
    ],
    "tools": [{
        "name": "Read", "description": "Read a file.", "eager_input_streaming": True, "defer_loading": False,
        "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
                         "properties": {"path": {"type": "string"}}, "required": ["path"],
                         "additionalProperties": False},
    }],
    "metadata": {"user_id": "user_1_account__session_2"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "temperature": 1,
    "stream": True,
}  # fmt: skip
BETAS = {"anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14", "x-app": "cli", **VERSION}


@pytest.mark.parametrize("model", ["small", "claude"])
@pytest.mark.parametrize("thinking", [None, {"type": "adaptive"}, {"type": "between_tools"}, {"type": "disabled"}])
def test_a_coding_agent_of_anthropics_is_answered_by_any_model(
    house: House, upstream: ScriptedUpstream, model: str, thinking: dict[str, str] | None
) -> None:
    """Its requests arrive with instructions where they stood; Claude's own fields reach Claude alone."""
    body = CODING | {"model": model} | ({} if thinking is None else {"thinking": thinking})
    answer = post(house, "/v1/messages?beta=true", body, **BETAS)
    count = {name: value for name, value in body.items() if name not in ("max_tokens", "stream", "metadata")}
    counted = post(house, "/v1/messages/count_tokens?beta=true", count, **BETAS)

    assert answer.status_code == 200 and "event: message_stop" in answer.text, answer.text
    assert counted.json()["input_tokens"] > 20
    sent = upstream.requests[0].body or {}
    roles = [turn["role"] for turn in sent["messages"]]
    if model == "claude":
        assert roles == ["user", "assistant", "user", "system", "assistant", "user"]
        assert sent.get("thinking") == thinking
    else:
        assert roles == ["system", "user", "assistant", "tool", "system", "assistant", "user"]
        assert "thinking" not in sent


def test_a_budget_of_thinking_is_answered_by_a_model_that_knows_none(house: House, upstream: ScriptedUpstream) -> None:
    """What Anthropic's clients say of thinking is a measure; an upstream without efforts is asked without one."""
    upstream.script("unknown=reasoning_effort", model="large")
    thinking = {"type": "enabled", "budget_tokens": 1024}
    asked = {"model": "large", "max_tokens": 2000, "messages": [USER], "thinking": thinking}
    answers = [post(house, "/v1/messages", asked) for _ in range(2)]
    named = post(house, "/v1/chat/completions", {"model": "large", "messages": [USER], "reasoning_effort": "low"})

    assert [answer.status_code for answer in answers] == [200, 200]
    assert ["reasoning_effort" in (request.body or {}) for request in upstream.requests] == [True, False, False, True]
    assert named.status_code == 400 and "reasoning_effort" in named.json()["error"]["message"]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "Alone."}],
        [USER, {"role": "system", "content": [{"type": "image", "source": {"type": "url", "url": "https://a.b/c"}}]}],
    ],
    ids=["alone", "an image"],
)
def test_instructions_are_words_beside_what_is_said(house: House, messages: list[dict[str, Any]]) -> None:
    """A conversation is more than instructions, and those are text."""
    answer = post(house, "/v1/messages", {"model": "small", "max_tokens": 9, "messages": messages})

    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
