# What clients send that no SDK sends: offers of HTTP/2, heads without an end, questions for a head alone.

from __future__ import annotations

import json

import pytest

from protocol.serving.http_server import LONGEST_HEAD, MOST_HEADERS
from tests.support.house import House
from tests.support.raw_client import tell

ASKED = json.dumps({"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}).encode()
OFFER = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQB\r\n"


def post(house: House, more: str, body: bytes = ASKED) -> bytes:
    """Return the bytes of a chat request with ``more`` headers."""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {house.team_key}\r\n{more}\r\n"
    )
    return head.encode() + body


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
def test_an_offer_of_http_2_is_answered_in_http_1(house: House, is_chunked: bool) -> None:
    """As the client of Java's own library sends it, with each request: the body counts, the next request too."""
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(ASKED), ASKED) if is_chunked else ASKED
    length = "transfer-encoding: chunked\r\n" if is_chunked else f"content-length: {len(ASKED)}\r\n"
    offered = post(house, OFFER + length, body)
    last = post(house, f"connection: close, Upgrade\r\nupgrade: h2c\r\n{length}", body)
    answer = tell(house.url, offered[:100], offered[100:-20], offered[-20:] + last)

    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.count(b'"object":"chat.completion"') == 2


@pytest.mark.parametrize("keeps", ["", "connection: keep-alive\r\n"], ids=["usual", "keep-alive"])
def test_a_client_of_http_1_0_gets_no_chunks(house: House, keeps: str) -> None:
    """It knows none: a stream ends with the connection, and what has a length says so."""
    streamed = json.dumps(json.loads(ASKED) | {"stream": True}).encode()
    answers = [
        tell(
            house.url, post(house, f"{keeps}content-length: {len(body)}\r\n", body).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        )
        for body in (ASKED, streamed)
    ]
    (plain_head, _, plain), (stream_head, _, stream) = (answer.partition(b"\r\n\r\n") for answer in answers)

    assert b"transfer-encoding" not in plain_head + stream_head
    assert b"connection: close" in plain_head and b"connection: close" in stream_head
    assert b"content-length: %d" % len(plain) in plain_head
    assert json.loads(plain)["object"] == "chat.completion"
    assert stream.startswith(b"data: {") and stream.endswith(b"data: [DONE]\n\n")
    assert all(line.startswith(b"data: ") for line in stream.split(b"\n\n")[:-1])


@pytest.mark.parametrize("begins", [b"GET /v1/models HTTP/1.1\r\nx: ", b"GET /", b"GET / HTTP/1.1\r\n"])
def test_a_head_without_an_end_is_refused(house: House, begins: bytes) -> None:
    """Before anybody has looked at a key; others would wait for its bytes to be put together."""
    line = b"x: y\r\n" if begins.endswith(b"\r\n") else b"xxxxxx"
    answer = tell(house.url, begins, *[line * 10_000] * (LONGEST_HEAD // 60_000 + 3))

    assert answer.startswith(b"HTTP/1.1 431 ") and b"x-request-id: 0" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_a_head_of_very_many_fields_is_refused(house: House) -> None:
    """Sixty thousand empty ones fit into its bytes, and each costs something."""
    answer = tell(house.url, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n", b"a:\r\n" * 62_000, b"\r\n")

    assert answer.startswith(b"HTTP/1.1 431 ") and b"x-request-id: 0" in answer
    assert str(MOST_HEADERS) in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


@pytest.mark.parametrize(
    "said", [b"FOO / HTTP/1.1\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", b"\x16\x03\x01\r\n\r\n"]
)
def test_what_is_no_request_is_told_in_our_shape(house: House, said: bytes) -> None:
    """Another protocol, an unknown method, a tunnel."""
    head, _, body = tell(house.url, said).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 400 ") and b"x-request-id: 0" in head
    assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize(("path", "status"), [("/health/ready", 200), ("/v1/models", 200), ("/v1/completions", 405)])
def test_a_head_is_that_of_get(house: House, path: str, status: int) -> None:
    """Balancers and monitors ask so whether somebody is there."""
    with house.client() as client:
        asked, got = client.head(path), client.get(path)

    assert (asked.status_code, asked.content) == (status, b"")
    assert asked.headers["content-length"] == got.headers["content-length"]
