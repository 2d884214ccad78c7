# How an answer is written: what leaves together, how a body is framed, and which answers are refused as no HTTP.

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from protocol.serving.exchange import ONE_PIECE, Exchange

START = "http.response.start"
BODY = "http.response.body"


class Wire:
    """A transport that keeps what is written, write by write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        """Write at once."""
        self.writes.append(bytes(data))

    def writelines(self, pieces: tuple[bytes, ...]) -> None:
        """Write at once, without a copy."""
        self.writes.append(b"".join(pieces))

    def close(self) -> None:
        """End."""
        self.is_closed = True


def exchange(wire: Wire, method: str = "POST", *, knows_chunks: bool = True) -> Exchange:
    connection: Any = SimpleNamespace(
        scope={"method": method},
        transport=wire,
        flow=FlowControl(wire),  # type: ignore[arg-type]
        logger=logging.getLogger("tests"),
        on_response_complete=lambda: None,
        expect_100_continue=False,
        server_state=SimpleNamespace(default_headers=[(b"date", b"today")]),
    )
    return Exchange(connection, keep_alive=knows_chunks, knows_chunks=knows_chunks)


async def said(one: Exchange, headers: list[tuple[bytes, bytes]], *pieces: bytes, status: int = 200) -> None:
    await one.send({"type": START, "status": status, "headers": headers})
    for place, piece in enumerate(pieces):
        await one.send({"type": BODY, "body": piece, "more_body": place < len(pieces) - 1})


def length(size: int) -> list[tuple[bytes, bytes]]:
    return [(b"Content-Length", b"%d" % size)]


@pytest.mark.parametrize("size", [1, ONE_PIECE + 1])
async def test_an_answer_of_known_length_leaves_in_one_piece(size: int) -> None:
    """One write is one system call, and one packet where that is enough."""
    wire = Wire()
    await said(exchange(wire), length(size), b"x" * size)
    head = b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-length: %d\r\n\r\n" % size

    assert wire.writes == [head + b"x" * size]


async def test_a_stream_begins_with_its_head() -> None:
    """Whoever waits for it hears that it was accepted before the first word comes."""
    wire = Wire()
    one = exchange(wire)
    await said(one, [])
    assert wire.writes == [b"HTTP/1.1 200 OK\r\ndate: today\r\ntransfer-encoding: chunked\r\n\r\n"]
    for piece, more in ((b"hello", True), (b"", True), (b"!", False)):
        await one.send({"type": BODY, "body": piece, "more_body": more})

    assert wire.writes[1:] == [b"5\r\nhello\r\n", b"1\r\n!\r\n0\r\n\r\n"]


@pytest.mark.parametrize(
    ("method", "status", "headers", "body"),
    [("HEAD", 200, length(5), b"hello"), ("POST", 204, [], b""), ("POST", 200, length(0), b"")],
)
async def test_answers_without_a_body_have_none(
    method: str, status: int, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    """The head is all, whatever the app says after it."""
    wire = Wire()
    await said(exchange(wire, method), headers, body, status=status)

    assert len(wire.writes) == 1
    assert wire.writes[0].endswith(b"\r\n\r\n") and b"chunked" not in wire.writes[0]


async def test_a_client_that_knows_no_chunks_hears_the_end_from_the_connection() -> None:
    """HTTP/1.0: the body as it is, and the connection closed behind it."""
    wire = Wire()
    await said(exchange(wire, knows_chunks=False), [], b"one", b"two", b"")

    assert wire.is_closed
    assert b"".join(wire.writes) == b"HTTP/1.1 200 OK\r\ndate: today\r\nconnection: close\r\n\r\nonetwo"


async def test_an_answer_that_says_close_ends_its_connection() -> None:
    """As the drain says it; and not twice."""
    wire = Wire()
    await said(exchange(wire), [(b"connection", b"keep, Close"), *length(2)], b"ok")

    assert wire.is_closed and wire.writes[0].count(b"connection") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [(b"x", b"a\r\nevil: 1"), (b"x", b"a\n"), (b"x", b"\0"), (b"x", b"\x7f"), (b"x\r\nevil", b"1"), (b"x y", b"1")],
)
async def test_a_header_that_is_none_is_never_written(name: bytes, value: bytes) -> None:
    """Nothing that an upstream or a caller made up may begin another header, or another answer."""
    wire = Wire()
    with pytest.raises(RuntimeError, match="Invalid HTTP header"):
        await said(exchange(wire), [(name, value), *length(2)], b"ok")

    assert wire.writes == []


@pytest.mark.parametrize("pieces", [(b"hel", b"lo!"), (b"he", b"l")], ids=["longer", "shorter"])
async def test_a_body_is_as_long_as_its_head_says(pieces: tuple[bytes, ...]) -> None:
    """The client would take the rest for the next answer, or wait for it."""
    with pytest.raises(RuntimeError, match="Content-Length"):
        await said(exchange(Wire()), length(5), *pieces)


async def test_a_body_that_is_here_is_read_without_waiting() -> None:
    """And once; after it comes nothing but the client's leaving."""
    one = exchange(Wire())
    one.body += b"{}"
    one.more_body = False
    one.message_event.set()
    assert await one.receive() == {"type": "http.request", "body": b"{}", "more_body": False}
    waits = asyncio.ensure_future(one.receive())
    await asyncio.sleep(0)
    assert not waits.done()
    one.disconnected = True
    one.message_event.set()

    assert await waits == {"type": "http.disconnect"}
