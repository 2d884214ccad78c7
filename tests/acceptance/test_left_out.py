# What an upstream lacks and that changes no meaning is left out, and every answer says so: whole, streamed, replayed.

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.house import House
from tests.support.scripted_upstream import ScriptedUpstream

USER = {"role": "user", "content": "Hi"}
CHAT: dict[str, Any] = {"model": "claude", "messages": [USER], "max_tokens": 50}
DROPPED = "x-tollgate-dropped"
THINKS = {"reasoning_effort": "high", "max_tokens": 4000}


@pytest.fixture(autouse=True)
def _strict(upstream: ScriptedUpstream) -> Iterator[None]:
    upstream.forget()
    yield
    assert upstream.violations == []


def post(house: House, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    with house.client() as client:
        return client.post(f"/v1/{path}", json=body, headers=headers)


@pytest.mark.parametrize("stream", [False, True])
def test_a_seed_that_the_model_lacks_is_left_out_and_told(house: House, stream: bool) -> None:
    """The call is answered, and its header names what the upstream was not told; also when it is answered again."""
    key = {"idempotency-key": str(uuid.uuid4())}
    answers = [post(house, "chat/completions", CHAT | {"seed": 7, "stream": stream}, **key) for _ in range(2)]
    plain = post(house, "chat/completions", CHAT | {"stream": stream})

    assert [(answer.status_code, answer.headers[DROPPED]) for answer in answers] == [(200, "seed")] * 2
    assert DROPPED not in plain.headers


def test_a_target_that_knows_a_field_leaves_nothing_out(house: House, upstream: ScriptedUpstream) -> None:
    """What is left out is a matter of who answers."""
    answer = post(house, "chat/completions", CHAT | {"model": "small", "seed": 7})

    assert DROPPED not in answer.headers
    assert (upstream.requests[-1].body or {})["seed"] == 7


def test_fields_that_no_price_covers_and_no_list_names_are_told(house: House) -> None:
    """A name that a caller made up makes no header of its own, however it is spelt and however many there are."""
    odd = {"colour": 1, "a\r\nset-cookie: x": 2, "é" * 200: 3}
    many = {f"field{number}": number for number in range(100)}
    answer, other = (post(house, "chat/completions", CHAT | {"model": "small"} | more) for more in (odd, many))

    assert answer.status_code == 200 and "set-cookie" not in answer.headers
    assert {"colour", "a%0D%0Aset-cookie%3A%20x"} < set(answer.headers[DROPPED].split(", "))
    assert len(answer.headers[DROPPED]) < 200 and len(other.headers[DROPPED].split(", ")) == 32


@pytest.mark.parametrize("model", ["small", "claude"])
def test_fields_inside_of_items_are_told_as_well(house: House, model: str) -> None:
    """In both dialects, by the way that leads to them; a count of tokens says what it did not count."""
    turn = USER | {"content": [{"type": "text", "text": "Hi", "lang": "en"}]}
    body = {"model": model, "messages": [turn], "max_tokens": 9}
    answers = [post(house, path, body) for path in ("chat/completions", "messages", "messages/count_tokens")]

    assert [(one.status_code, one.headers[DROPPED]) for one in answers] == [(200, "messages.content.lang")] * 3


def test_a_chat_may_say_top_k_to_claude(house: House, upstream: ScriptedUpstream) -> None:
    """Its own API knows it; where the model thinks, it is left out and told."""
    plain, thinks = (post(house, "chat/completions", CHAT | {"top_k": 5} | more) for more in ({}, THINKS))
    first, second = ((request.body or {}) for request in upstream.requests)

    assert DROPPED not in plain.headers and first["top_k"] == 5
    assert thinks.headers[DROPPED] == "top_k" and "top_k" not in second


def test_anthropics_clients_are_told_in_their_own_words(house: House, upstream: ScriptedUpstream) -> None:
    """Marks for Claude's cache and a top_k have no place at an OpenAI upstream."""
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    body = {"model": "small", "max_tokens": 9, "messages": [USER], "system": system, "top_k": 5}
    answer, claude = post(house, "messages", body), post(house, "messages", body | {"model": "claude"})

    assert answer.headers[DROPPED] == "top_k, cache_control"
    assert DROPPED not in claude.headers and (upstream.requests[-1].body or {})["top_k"] == 5


@pytest.mark.parametrize("name", ["thread", "compaction", "billing_policy"])
def test_what_would_mean_something_else_is_refused_by_its_name(
    house: House, upstream: ScriptedUpstream, name: str
) -> None:
    """Without its thread a turn has no conversation before it: leaving that out would be another question."""
    body = {"model": "claude", "max_tokens": 9, "messages": [USER]}
    answer, plain = post(house, "messages", body | {name: {"type": "x"}}), post(house, "messages", body | {name: None})

    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(f"'{name}' is not supported")
    assert plain.status_code == 200 and len(upstream.requests) == 1


def test_anthropics_tool_runner_goes_on_without_a_thread(house: House, upstream: ScriptedUpstream) -> None:
    """It asks for one unless told not to, and sends all turns once it hears that there is none."""
    from anthropic import Anthropic, beta_tool  # see tests/support/longest.py

    opened: list[int] = []

    @beta_tool
    def open_gate(width: int) -> str:
        """Open the gate."""
        opened.append(width)
        return "It is open."

    use: Any = [{"role": "user", "content": 'Use open_gate {"width": 3}'}]
    with Anthropic(base_url=house.url, api_key=house.team_key) as client:
        asked: Any = {"model": "claude", "max_tokens": 99, "messages": use}
        said = client.beta.messages.tool_runner(**asked, tools=[open_gate]).until_done()

    assert opened == [3] and said.content[0].type == "text"
    assert [len((request.body or {})["messages"]) for request in upstream.requests] == [1, 3]


def test_a_limit_that_was_lowered_is_told(house: House, upstream: ScriptedUpstream) -> None:
    """No answer is cut short without a word; thinking stays within the lowered limit."""
    thinking = {"type": "enabled", "budget_tokens": 31_999}
    body = {"model": "claude", "max_tokens": 32_000, "messages": [USER], "thinking": thinking}
    most = house.settings.models["claude"].max_output
    answer, lower = post(house, "messages", body), post(house, "chat/completions", CHAT)
    sent = upstream.requests[0].body or {}

    assert (answer.status_code, answer.headers["x-tollgate-max-tokens"]) == (200, str(most))
    assert sent["max_tokens"] == most and sent.get("thinking", {}).get("budget_tokens", 0) < most
    assert "x-tollgate-max-tokens" not in lower.headers


def test_the_user_of_claude_code_reaches_an_openai_upstream_as_a_digest(
    house: House, upstream: ScriptedUpstream
) -> None:
    """Several refuse more than 64 characters; the books keep the name as it was said."""
    name = f"user_{'a' * 64}_account_{uuid.uuid4()}_session_{uuid.uuid4()}"
    body = {"model": "small", "max_tokens": 9, "messages": [USER], "metadata": {"user_id": name}}
    answers = [post(house, "messages", body) for _ in range(2)]
    users = {(request.body or {})["user"] for request in upstream.requests}

    assert [answer.status_code for answer in answers] == [200, 200]
    assert len(users) == 1 and len(users.pop()) == 64
    assert house.record_of(answers[0])["user_tag"] == name


def test_a_tool_of_claudes_own_goes_to_claude_alone(house: House, upstream: ScriptedUpstream) -> None:
    """With the beta that it belongs to; elsewhere it is refused by its name, and so is one that the upstream runs."""
    computer = {"type": "computer_20250124", "name": "computer", "display_width_px": 800, "display_height_px": 600}
    body = {"model": "claude", "max_tokens": 9, "messages": [USER], "tools": [computer]}
    answer, other = post(house, "messages", body), post(house, "messages", body | {"model": "small"})
    searching = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    server = post(house, "messages", body | {"tools": [searching]})

    assert answer.status_code == 200
    assert (upstream.requests[0].body or {})["tools"] == [computer]
    assert upstream.requests[0].headers["anthropic-beta"] == "computer-use-2025-01-24"
    assert other.status_code == 400 and "computer_20250124" in other.json()["error"]["message"]
    assert server.status_code == 400 and "tools[0]" in server.json()["error"]["message"]
