# Images by URL, as clients of each dialect send them, towards an upstream that may stand in the house.

from __future__ import annotations

from typing import Any

import pytest

from tests.support.house import House
from tests.support.scripted_upstream import ScriptedUpstream

METADATA = "http://169.254.169.254/latest/meta-data/iam/security-credentials/"


def chat(url: str) -> tuple[str, dict[str, Any]]:
    parts = [{"type": "text", "text": "See."}, {"type": "image_url", "image_url": {"url": url}}]
    return "/v1/chat/completions", {"model": "small", "messages": [{"role": "user", "content": parts}]}


def message(url: str) -> tuple[str, dict[str, Any]]:
    image = {"type": "image", "source": {"type": "url", "url": url}}
    return "/v1/messages", {"model": "small", "max_tokens": 9, "messages": [{"role": "user", "content": [image]}]}


def tool_result(url: str) -> tuple[str, dict[str, Any]]:
    image = {"type": "image", "source": {"type": "url", "url": url}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [image]}
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    turns = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    return "/v1/messages", {"model": "small", "max_tokens": 9, "messages": turns, "tools": tools}


def count(url: str) -> tuple[str, dict[str, Any]]:
    _, body = message(url)
    return "/v1/messages/count_tokens", {"model": "claude", "messages": body["messages"]}


@pytest.mark.parametrize("url", [METADATA, "file:///etc/passwd", "http://127.0.0.1:6379/", "https://localhost/"])
@pytest.mark.parametrize("asked", [chat, message, tool_result, count])
def test_an_image_of_the_house_is_shown_to_no_upstream(
    house: House, upstream: ScriptedUpstream, asked: Any, url: str
) -> None:
    """400 that says what would be right; no upstream hears of the call, and it leaves no row."""
    upstream.forget()
    path, body = asked(url)
    with house.client() as client:
        answer = client.post(path, json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "data URL" in answer.json()["error"]["message"]
    assert upstream.requests == []


@pytest.mark.parametrize(
    ("asked", "url"),
    [
        (chat, "data:image/png;base64,iVBORw0KGgo="),
        *((asked, "https://93.184.216.34/a.png") for asked in (chat, message, tool_result, count)),
    ],
)
def test_other_images_arrive_as_they_were_sent(house: House, upstream: ScriptedUpstream, asked: Any, url: str) -> None:
    """Inside the request, or at a public https address."""
    upstream.forget()
    path, body = asked(url)
    with house.client() as client:
        client.post(path, json=body).raise_for_status()

    (seen,) = upstream.requests
    assert url.encode() in seen.raw
