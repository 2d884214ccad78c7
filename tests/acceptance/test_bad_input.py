# Bad input gets the exact error object and a message that helps; nobody else notices.

from __future__ import annotations

import gzip
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.house import House

FINE = b'{"model":"small","messages":[{"role":"user","content":"hi"}]}'


def post(house: House, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    with house.client() as client:
        return client.post(path, content=body, headers={"content-type": "application/json", **headers})


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code", "request_id"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{", "invalid_json", None),
        (b"", "invalid_json", None),
        (b"null", "invalid_type", None),
        (FINE.replace(b"hi", b"\xff"), "invalid_json", None),
        (FINE[:-1] + b',"model":"large"}', "duplicate_key", "model"),
        (FINE.replace(b'"user"', b'"user","role":"system"'), "duplicate_key", "role"),
        (b'{"model":"small"}', "missing_required_parameter", "messages"),
        (b'{"model":"small","messages":[]}', "invalid_value", "messages"),
        (b'{"model":"small","messages":"hi"}', "invalid_type", "messages"),
        (b'{"model":7,"messages":[]}', "invalid_type", "model"),
        (FINE[:-1] + b',"temperature":3}', "invalid_value", "temperature"),
        (FINE[:-1] + b',"n":0}', "invalid_value", "n"),
        (FINE[:-1] + b',"tier":"soon"}', "invalid_value", "tier"),
        (FINE[:-1] + b',"n":' + b"9" * 400 + b"}", "invalid_value", "n"),
        (FINE[:-1] + b',"max_tokens":' + b"9" * 400 + b"}", "invalid_value", "max_tokens"),
        (FINE[:-1] + b',"max_cost_usd":' + b"9" * 400 + b"}", "invalid_value", "max_cost_usd"),
        (FINE[:-1] + b',"max_tokens":5,"max_completion_tokens":6}', "invalid_value", "max_completion_tokens"),
        (FINE[:-1] + b',"temperature":NaN}', "invalid_json", None),
        (FINE[:-1] + b',"stream_options":{"include_usage":true}}', "invalid_value", "stream_options"),
        (FINE[:-1] + b',"service_tier":"priority"}', "unsupported_parameter", "service_tier"),
        (b"[" * 100_000, "invalid_json", None),
        (FINE[:-1] + b',"user":"' + b"x" * 600 + b'"}', "invalid_value", "user"),
        (FINE[:-1] + b',"metadata":{"k":"' + b"x" * 600 + b'"}}', "invalid_value", "metadata"),
    ],
)
def test_a_faulty_body_is_a_400_that_names_the_fault(
    house: House, body: bytes, code: str | None, param: str | None
) -> None:
    """Malformed JSON, duplicate keys, wrong types and values: 400, with the field and a code."""
    answer = post(house, body)
    error = error_of(answer)

    assert answer.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert code is None or error["code"] == code


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_compressed_body_is_a_415_that_says_so(house: House, path: str) -> None:
    """Not a 400 about bytes that its sender never saw."""
    answer = post(house, gzip.compress(FINE), path, **{"content-encoding": "gzip"})

    assert answer.status_code == 415 and "content-encoding" in answer.json()["error"]["message"]


def test_an_unknown_model_is_a_404(house: House) -> None:
    """The code is OpenAI's model_not_found."""
    answer = post(house, FINE.replace(b"small", b"no-such-model"))

    assert answer.status_code == 404
    assert error_of(answer)["code"] == "model_not_found"


@pytest.mark.parametrize("key", ["", "nonsense", "tg-" + "x" * 43, "tgadmin-" + "x" * 43, "tg-\u00e9"])
def test_an_unknown_key_is_a_401(house: House, key: str) -> None:
    """A missing, malformed or unknown key: 401 invalid_api_key, before the body is looked at."""
    headers = {"authorization": f"Bearer {key}".encode()} if key else {}
    answer = httpx.post(f"{house.url}/v1/chat/completions", headers=headers, content=b"{", timeout=10)

    assert answer.status_code == 401
    assert error_of(answer)["code"] == "invalid_api_key"


def test_a_key_in_x_api_key_is_a_key(house: House) -> None:
    """Clients of the other dialect send their key in x-api-key."""
    answer = httpx.get(f"{house.url}/v1/models", headers={"x-api-key": house.team_key}, timeout=10)

    assert answer.status_code == 200


def test_another_teams_id_is_a_403(house: House) -> None:
    """x-team-id, in header or body, must be the key's own team."""
    in_header = post(house, FINE, **{"x-team-id": "team_z"})
    in_body = post(house, FINE[:-1] + b',"team_id":"team_z"}')

    assert (in_header.status_code, in_body.status_code) == (403, 403)


def test_header_and_body_that_disagree_are_a_400(house: House) -> None:
    """The same option said twice must say the same."""
    answer = post(house, FINE[:-1] + b',"tier":"batch"}', **{"x-tier": "interactive"})

    assert answer.status_code == 400
    assert error_of(answer)["param"] == "tier"


def test_a_prompt_longer_than_the_context_is_a_400(house: House) -> None:
    """A prompt that cannot fit even if every word were one token is refused before an upstream hears of it."""
    answer = post(house, FINE.replace(b"hi", b"word " * 9000))

    assert answer.status_code == 400
    assert error_of(answer)["code"] == "context_length_exceeded"
    assert "prompt is too long: 9" in error_of(answer)["message"]  # LangChain and LiteLLM know it by these words


def test_a_body_that_is_too_long_is_refused_by_its_length(house: House) -> None:
    """40 MiB announced: 413 comes back although not one byte of the body was sent."""
    url = urlsplit(house.url)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {house.team_key}\r\n"
        f"content-type: application/json\r\ncontent-length: {40 * 2**20}\r\n\r\n"
    )
    with socket.create_connection((url.hostname, url.port), timeout=5) as line:
        line.sendall(head.encode())
        answer = line.recv(65536)

    assert answer.startswith(b"HTTP/1.1 413")
    assert b"32 MiB" in answer


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("GET", "/v1/nothing", 404, "unknown_url"), ("DELETE", "/v1/chat/completions", 405, "method_not_supported")],
)
def test_an_unknown_route_or_method_has_the_error_shape(
    house: House, method: str, path: str, status: int, code: str
) -> None:
    """Even what has no handler answers with the error object and a request id."""
    with house.client() as client:
        answer = client.request(method, path)

    assert answer.status_code == status
    assert error_of(answer)["code"] == code
    assert answer.headers["x-request-id"]


def test_bad_requests_leave_a_running_stream_alone(house: House) -> None:
    """A stream beside a hundred faulty requests ends as it would have ended alone."""
    body = FINE[:-1] + b',"stream":true}'
    with house.client() as client, client.stream("POST", "/v1/chat/completions", content=body) as stream:
        lines = stream.iter_lines()
        first = next(line for line in lines if line)
        for _ in range(100):
            assert post(house, b"{").status_code == 400
        rest = [line for line in lines if line]

    assert first.startswith("data: ")
    assert rest[-1] == "data: [DONE]"
